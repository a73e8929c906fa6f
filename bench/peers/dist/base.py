"""The interface of a peer of the parameter server, and how it is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import process_time

from bench.cases.dist import ENTRIES, DistCase, Inputs
from bench.peers.base import Array, no_collections, timed
from bench.peers.group.base import GroupPeer
from bench.peers.group.link import Place

PUSHPULL, PAIR = "pushpull", "push, then pull"


class DistPeer(GroupPeer):
    """One worker of a peer, which lives through all cases of a job.

    Before each call the worker writes the next gradients into its arrays, and all meet at the barrier.
    """

    case_type = DistCase

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.entry = ENTRIES[place.name]
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
        """Write what the next call pushes."""
        self.calls += 1
        self.write(self.calls)

    def first(self) -> None:
        """Make the call whose results peers are compared by."""
        self.next_gradients()
        self.call()

    def call(self) -> None:
        """Call in the first way."""
        next(iter(self.variants.values()))()

    def dense(self, case: DistCase) -> Inputs:
        """Make a worker's arrays, which are written from call to call."""
        data = Inputs(case, self.place.rank)
        self.data = data
        self.write = lambda call: data.write(data.gradients(call))
        return data

    def release(self) -> None:
        super().release()
        self.data, self.write = None, _nothing


def _nothing(call: int) -> None:
    """Push the same again."""


def changes(after: Sequence[Array], before: Sequence[Array]) -> list[Array]:
    """Subtract: beside the weights themselves one would not see what an update changed."""
    return [new - old for new, old in zip(after, before, strict=True)]
