"""Bodies about states and whole keys: the same program on several workers, and on one process with all parts."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from tested_store import create

import kvstore as kv


class Worker:
    """One worker of `of`, or a process that pushes the parts of all; worker 1 is late at each step."""

    def __init__(self, of: int, late: float) -> None:
        self.store, self._of, self._late = create(), of, late
        self.alone = self.store.num_workers == 1

    def step(self) -> None:
        if self.store.rank == 1:
            time.sleep(self._late)

    def push(self, keys: Any, parts: Any) -> None:
        """Push what `parts` makes of this worker's rank; of all ranks where there is one process."""
        self.step()
        ranks = range(self._of) if self.alone else [self.store.rank]
        for key in keys:
            self.store.push(key, [parts(key, rank) for rank in ranks])

    def values(self, keys: list[str]) -> list[str]:
        """Return the values, as text of their bits."""
        found = self.store._backend.fetch_all(keys)
        return [(one.todense() if isinstance(one, kv.RowSparseArray) else one).tobytes().hex() for one in found]


def _gradient(size: int) -> Any:
    def made(key: str, rank: int) -> Any:
        return np.arange(size, dtype=np.float32) % 7 + ord(key[0]) % 5 + rank

    return made


def load_without_states(of: int, late: float, path: str, size: int, rule: str, who: str) -> list[str]:
    """Load a file that has no state for keys that have one: these begin anew."""
    worker = Worker(of, late)
    store, keys = worker.store, ["a", "b"]
    store.init(keys, [np.ones(size, np.float32)] * 2)
    store.set_optimizer(kv.optimizer.create(rule, learning_rate=0.1))
    worker.push(["a"], _gradient(size))
    out = np.empty(size, np.float32)
    store.pull("a", out=out)
    store.barrier()
    if store.rank == 0:
        store.save_optimizer_states(path)
    store.barrier()
    for _ in range(3):
        worker.push(keys, _gradient(size))
    seen = worker.values(keys)
    store.barrier()
    if who == "all" or store.rank == 0:
        worker.step()
        store.load_optimizer_states(path)
    if who == "one":
        store.barrier()
    for _ in range(2):
        worker.push(keys, _gradient(size))
        seen += worker.values(keys)
    store.barrier()
    store.close()
    return seen
