"""multiprocessing: queues, and a Manager's dict; the first worker sums the values of all workers."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import numpy as np

from bench.cases import shared as shared_cases
from bench.cases.shared import SharedCase
from bench.peers.base import Array
from bench.peers.group.base import GroupPeer
from bench.peers.worker import die_with_parent, serve

_tools: dict[str, Any] = {}


class Central(GroupPeer):
    """Send to the first worker; receive the sum from it."""

    def prepare(self, case: SharedCase) -> list[Array]:
        data = shared_cases.inputs(case, self.place.rank)
        self.value = data.values[0]
        self.buffers = [data.flat]
        self.variants = {"": self.step}
        self.step()
        self.calls = 1
        return data.values

    def step(self) -> None:
        if self.place.rank:
            self.put(self.value)
            np.copyto(self.value, self.take())
        else:
            for value in self.take_all():
                self.value += value
            self.hand_out(self.value)

    def put(self, value: Array) -> None: ...

    def take(self) -> Array:
        raise NotImplementedError

    def take_all(self) -> list[Array]:
        raise NotImplementedError

    def hand_out(self, value: Array) -> None: ...


class Queues(Central):
    """One queue to the first worker, and one from it to each worker."""

    def put(self, value: Array) -> None:
        _tools["queues"][0].put(value)

    def take(self) -> Array:
        array: Array = _tools["queues"][self.place.rank].get(timeout=60)
        return array

    def take_all(self) -> list[Array]:
        return [_tools["queues"][0].get(timeout=60) for _ in range(1, self.place.workers)]

    def hand_out(self, value: Array) -> None:
        for queue in _tools["queues"][1:]:
            queue.put(value)

    def scale(self, factor: float) -> None:
        """Wait until all workers have the sum: a queue pickles in another thread."""
        self.place.gate.wait()
        super().scale(factor)


class Manager(Central):
    """A dict in the manager's process, with a barrier between the steps."""

    def put(self, value: Array) -> None:
        _tools["dict"][self.place.rank] = value
        _tools["barrier"].wait(60)

    def take(self) -> Array:
        _tools["barrier"].wait(60)
        array: Array = _tools["dict"]["sum"]
        return array

    def take_all(self) -> list[Array]:
        _tools["barrier"].wait(60)
        return [_tools["dict"][rank] for rank in range(1, self.place.workers)]

    def hand_out(self, value: Array) -> None:
        _tools["dict"]["sum"] = value
        _tools["barrier"].wait(60)


def _worker(claim: str, name: str, address: str, rank: int, workers: int) -> None:
    die_with_parent()
    serve(claim, name, address, rank, workers)


def main() -> None:
    """Make the queues, then the workers, which inherit them."""
    die_with_parent()
    claim, name, address = sys.argv[1:4]
    workers = int(sys.argv[4])
    context = multiprocessing.get_context("fork")
    if name == "queue":
        _tools["queues"] = [context.Queue() for _ in range(workers)]
    else:
        manager = context.Manager()
        _tools.update(manager=manager, dict=manager.dict(), barrier=context.Barrier(workers))
    processes = [
        context.Process(target=_worker, args=(claim, name, address, r, workers)) for r in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
