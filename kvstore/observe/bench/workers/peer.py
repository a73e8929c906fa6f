"""What a worker of the bench does for its peer: prepare the keys, check the sums, time the calls."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter

from ..key_lists import BenchKey
from .arrays import WorkerArrays

Call = Callable[[], object]

#: Calls between two times that the gradients are written anew: sums in place grow meanwhile.
_BLOCK = 16


class BenchPeer(ABC):
    """One worker of a library that sums.

    Attributes
    ----------
    rank, size : int
        Number of this worker, and how many there are.
    ways : dict of str to callable
        Ways to do the same, by name; the quickest one counts.
    address : str
        Of rank 0: where the others find it, if the library does not know that itself.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.ways: dict[str, Call] = {}
        self.address = ""
        self.gradients = WorkerArrays(())

    @abstractmethod
    def join(self, address: str) -> None:
        """Meet the other workers; `address` is that of rank 0."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all workers are here."""

    @abstractmethod
    def close(self) -> None:
        """Leave the other workers."""

    @abstractmethod
    def prepare(self, keys: Sequence[BenchKey]) -> str | None:
        """Make arrays and ways, and check what comes back.

        Returns
        -------
        str or None
            What is wrong; None if all is right.
        """

    def versions(self) -> dict[str, str]:
        """Give the versions of the libraries that do the work."""
        return {}

    def run(self, way: str, calls: int) -> list[float]:
        """Seconds of each call. One more begins each block: it takes up what the barrier has left."""
        call = self.ways[way]
        times: list[float] = []
        gc.collect()
        gc.disable()
        try:
            while len(times) < calls:
                self.gradients.refill()
                self.barrier()
                call()
                times += [_timed(call) for _ in range(min(_BLOCK, calls - len(times)))]
        finally:
            gc.enable()
        return times


def _timed(call: Call) -> float:
    began = perf_counter()
    call()
    return perf_counter() - began


class AllReducePeer(BenchPeer):
    """One worker of a library with an all-reduce in place."""

    @abstractmethod
    def make_ways(self) -> dict[str, Call]:
        """Name the ways to sum the gradients of all workers in place."""

    def prepare(self, keys: Sequence[BenchKey]) -> str | None:
        """Make arrays and ways, and check the sums of each way."""
        self.gradients = WorkerArrays(keys)
        self.ways = self.make_ways()
        for name, call in self.ways.items():
            self.gradients.write_patterns(self.rank)
            call()
            if wrong := self.gradients.wrong(self.size):
                return f"the sum of key {wrong!r} ({name})"
        return None
