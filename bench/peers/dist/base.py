"""The interface of a peer of the parameter server, and its timing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import process_time

import numpy as np

from bench.cases.dist import ENTRIES, DistCase, Inputs
from bench.peers.base import Array, Call, no_collections, timed
from bench.peers.group.base import GroupPeer
from bench.peers.group.link import Place

PUSHPULL, PAIR = "pushpull", "push, then pull"


class DistPeer(GroupPeer):
    """One worker of a peer, for all cases of a job.

    Before each call the worker writes the next gradients into its arrays, and waits at the barrier.
    """

    case_type = DistCase

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.entry = ENTRIES[place.name]
        self.used = 0  # keys
        self.data: Inputs | None = None
        self.write: Callable[[int], None] = _nothing

    def run(self, variant: str, repeats: int) -> list[float]:
        call, times = self.variants[variant], list[float]()
        self.cpu = 0.0
        with no_collections():
            for _ in range(repeats):
                self.next_gradients()
                self.place.gate.wait()
                before = process_time()
                times += timed(call, 1)
                self.cpu += process_time() - before
        return times

    def next_gradients(self) -> None:
        """Write the gradients of the next call."""
        self.calls += 1
        self.write(self.calls)

    def first(self) -> None:
        """Make the call whose results are compared between peers."""
        self.next_gradients()
        self.call()

    def call(self) -> None:
        """Call in the first way."""
        next(iter(self.variants.values()))()

    def dense(self, case: DistCase) -> Inputs:
        """Make a worker's arrays, which are rewritten before each call."""
        data = Inputs(case, self.place.rank)
        self.data = data
        self.write = lambda call: data.write(data.gradients(call))
        return data

    def new_keys(self, case: DistCase) -> list[int]:
        """Return keys for a case that no earlier case had."""
        self.used += len(case.shapes)
        return list(range(self.used - len(case.shapes), self.used))

    def check_ways(self, sent: bool = False) -> None:
        """Call in each way: all results must equal that of the first call, or the sent values."""
        assert self.data is not None
        outs = self.data.flat_outs
        if not sent:
            self.first()
        found = self.data.flat if sent else outs.copy()
        for way, call in self.variants.items():
            outs.fill(-1)
            call()
            if not np.array_equal(outs, found):
                raise RuntimeError(
                    f"{way}: the result differs from the sent values" if sent else f"{way}: different sums"
                )

    def release(self) -> None:
        super().release()
        self.data, self.write = None, _nothing


class AllReduce(DistPeer):
    """A worker that sums by an all-reduce; the sums are written into the arrays of the gradients."""

    def ways(self, values: list[Array], flat: Array) -> dict[str, Call]:
        """Return the ways to sum arrays that are views of flat memory."""
        raise NotImplementedError

    def prepare(self, case: DistCase) -> list[Array]:
        data = self.dense(case)
        self.variants = self.ways(data.values, data.flat)
        self.first()
        return data.values


def _nothing(call: int) -> None:
    """Keep the gradients of the last call."""


def changes(after: Sequence[Array], before: Sequence[Array]) -> list[Array]:
    """Return the differences: the change by an update is small compared with the weights."""
    return [new - old for new, old in zip(after, before, strict=True)]
