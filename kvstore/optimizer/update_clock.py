"""The time of a schedule for each push, in the order of a worker's calls.

A schedule's time is the largest update count of all keys. Updates of different keys are applied in an order
that depends on timing, so the time of an update is determined at the call of the program.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .optimizer import Index, Optimizer

#: Bits of a stamp for the time; the epoch is in the bits above.
TIME_BITS = 40
_MASK = (1 << TIME_BITS) - 1


class UpdateClock:
    """Update counts of the calls of one worker, and the largest of them, the time.

    Parameters
    ----------
    begin : int
        Count of a key without updates; the optimizer's `begin_num_update`.
    counts : mapping
        Counts of keys with updates.
    time : int
        The time so far.
    epoch : int
        Number of the record of the store that has set the counts. Stamps of an older epoch are ignored in
        this one.
    """

    __slots__ = ("_begin", "_epoch", "counts", "time")

    def __init__(
        self, begin: int = 0, counts: Mapping[Index, int] | None = None, time: int = 0, epoch: int = 0
    ) -> None:
        self._begin, self.counts = begin, dict(counts or {})
        self.time = max(begin, time)
        self._epoch = epoch << TIME_BITS

    @classmethod
    def from_optimizer(cls, optimizer: Optimizer, epoch: int = 0) -> UpdateClock:
        """Return a clock with the counts of an optimizer."""
        counts = optimizer._index_update_count
        return cls(optimizer.begin_num_update, counts, optimizer.num_update, epoch)

    @property
    def stamp(self) -> int:
        """Return the epoch and the time of the last push."""
        return self._epoch | self.time

    def stamps(self, keys: Iterable[Index]) -> list[int]:
        """Return the epoch and the time of the next push of each key, if they are pushed in one call."""
        stamps, last, counts, begin = [], self.time, self.counts, self._begin
        for key in keys:
            count = counts.get(key, begin) + 1
            if count > last:
                last = count
            stamps.append(self._epoch | last)
        return stamps

    def count_push(self, key: Index) -> None:
        """Count a push of a key."""
        count = self.counts[key] = self.counts.get(key, self._begin) + 1
        if count > self.time:
            self.time = count


class CallOrder:
    """Records the time of a schedule at the call of each push; pushes are applied in another order."""

    def __init__(self) -> None:
        self._clock = UpdateClock()
        self._open: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()  # pushes that are not applied yet

    def timed_push(
        self, optimizer: Optimizer, keys: Iterable[Index], call: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a push that is applied with the time of its call.

        Parameters
        ----------
        optimizer : Optimizer
        keys : iterable of int or str
            The keys of the push.
        call : callable
            The push.
        """
        if optimizer.lr_scheduler is None:
            return call
        if not self._open:  # the optimizer has the counts of all pushes
            self._clock = UpdateClock.from_optimizer(optimizer)
        push = partial(call)  # a different object for each push
        self._open.add(push)
        placed = partial(self._apply_at, optimizer, self._clock.time, push)
        for key in keys:
            self._clock.count_push(key)
        return placed

    def _apply_at(self, optimizer: Optimizer, time: int, push: Callable[..., Any], *arguments: Any) -> Any:
        """Apply a push as if `time` were the largest update count; the caller has the store's lock."""
        now, optimizer.num_update = optimizer.num_update, time
        try:
            return push(*arguments)
        finally:
            optimizer.num_update = max(now, optimizer.num_update)
            self._open.discard(push)


def time_at(stamps: Sequence[int], epoch: int) -> int:
    """Return the largest time of stamps of an epoch, or 0 if there are none."""
    return max((stamp & _MASK for stamp in stamps if stamp >> TIME_BITS == epoch), default=0)
