"""Buckets: the gradients that are pushed in one call, and the order of gradients in them."""

from __future__ import annotations

from collections.abc import Callable

from ..engine import Work, ended_at
from ..observe.timeline.marks import Marks
from ..store import KVStore
from .exchange import GradientExchange, WeightExchange
from .gradient_slots import GradientSlot


def push_order(store: KVStore, slots: list[GradientSlot]) -> list[GradientSlot] | None:
    """Return the order in which all workers push gradients; None if any order is right.

    Engines of collectives need one order on all workers: approximately that of a backward pass.
    """
    return None if store.is_capable("optimizer") else slots[::-1]


class GradientBuckets:
    """Collects complete gradients, and pushes them when they fill a bucket.

    Parameters
    ----------
    exchange : GradientExchange or WeightExchange
        The exchange that pushes a bucket.
    marks : Marks
        The marks of a timeline.
    nbytes : float
        Size of a bucket.
    order : list of GradientSlot or None
        The result of `push_order`.
    """

    def __init__(
        self,
        exchange: GradientExchange | WeightExchange,
        marks: Marks,
        nbytes: float,
        order: list[GradientSlot] | None,
    ) -> None:
        self._exchange, self._marks, self._full, self._order = exchange, marks, nbytes, order
        self._bucket: list[GradientSlot] = []
        self._nbytes = 0
        self._pushed: list[tuple[int, set[Work], int]] = []  # buckets since the last step of the timeline

    @property
    def is_empty(self) -> bool:
        """Return whether no gradient waits for its push."""
        return not self._bucket

    def add(self, slot: GradientSlot, takes_part: Callable[[GradientSlot], bool]) -> None:
        """Add a complete gradient; with a fixed order, add all gradients that are next in that order."""
        if self._order is None:
            self._put_slot(slot)
            return
        for ready in self._order:
            if ready.ready and not ready.queued:
                self._put_slot(ready)
            elif not ready.ready and takes_part(ready):
                return

    def add_remaining(
        self, slots: list[GradientSlot], takes_part: Callable[[GradientSlot], bool], waits: bool = False
    ) -> None:
        """Add and push all gradients that are not pushed yet, and zeros for absent gradients.

        `waits`: the caller waits for the push next.
        """
        for slot in self._order or reversed(slots):
            if takes_part(slot) and not slot.queued:
                self._put_slot(slot)
        self._push_bucket(waits)

    def record_step(self, begin: int) -> None:
        """Record the end of an exchange, and the buckets that it has pushed, in the timeline."""
        for pushed, works, nbytes in self._pushed:
            self._marks.bucket(pushed, max(map(ended_at, works), default=0), nbytes)
        self._pushed.clear()
        self._marks.step(begin)

    def _put_slot(self, slot: GradientSlot) -> None:
        slot.queued = True
        self._bucket.append(slot)
        self._nbytes += slot.nbytes
        if self._nbytes >= self._full:
            self._push_bucket()

    def _push_bucket(self, waits: bool = False) -> None:
        bucket, nbytes = self._bucket, self._nbytes
        self._bucket, self._nbytes = [], 0
        if not bucket:
            return
        begin = self._marks.begin()
        try:
            self._exchange.start(bucket, waits)
        except Exception as error:
            for slot in bucket:  # `step` must not use a gradient that was not sent
                if slot.work is None:
                    slot.error = error
            raise
        if begin:
            self._pushed.append((begin, {slot.work for slot in bucket if slot.work is not None}, nbytes))
