"""Bodies about states and whole keys: one program on several workers, or on a process that has all parts."""

from __future__ import annotations

import hashlib
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
        """Return digests of the values."""
        found = self.store._backend.fetch_all(keys)
        return [_digest(one.todense() if isinstance(one, kv.RowSparseArray) else one) for one in found]


def _digest(array: Any) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


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


def whole_keys(of: int, late: float, rule: str, verb: str, rows: bool) -> list[str]:
    """Set an optimizer that needs whole tensors while a slower worker still reads the old values."""
    worker = Worker(of, late)
    store, shape, keys = worker.store, (1500, 3), ["a", "b"]
    store.init(keys, [np.ones(shape, np.float32)] * 2)
    size, dense = 4500, _gradient(4500)
    seen: list[str] = []
    for _ in range(2):
        worker.push(keys, lambda key, rank: dense(key, rank).reshape(shape))
    worker.step()
    outs = [np.empty(shape, np.float32) for _ in keys]
    if verb == "pull":
        store.pull(keys, out=outs)
    else:
        store.broadcast("c", np.ones(size, np.float32), out=np.empty(size, np.float32))
        for key, out in zip(keys, outs, strict=True):
            worker.step()
            store.pull(key, out=out)
    seen += map(_digest, outs)
    worker.step()
    store.set_optimizer(kv.optimizer.create(rule, learning_rate=0.1))
    for _ in range(3):
        worker.push(keys, _row_gradient if rows else lambda key, rank: dense(key, rank).reshape(shape))
        seen += worker.values(keys)
    assert list(store.keys())[:2] == keys
    store.barrier()
    store.close()
    return seen


def _row_gradient(key: str, rank: int) -> kv.RowSparseArray:
    ids = np.arange(rank, 1500, 7 + ord(key[0]) % 3)
    data = (np.arange(3 * len(ids), dtype=np.float32) % 5 - 2).reshape(-1, 3)
    return kv.RowSparseArray(data, ids, (1500, 3))


def tables(of: int, late: float, rule: str, path: str, held: bool, width: int) -> list[Any]:
    """Push rows of tables; read ids and bits of the stored rows in each possible way."""
    worker = Worker(of, late)
    store, keys = worker.store, ["a", "b"]
    first = np.arange(0, 40, 1 if held else 9)
    value = np.full((len(first), width), 0.5, np.float32)
    store.init(keys, [kv.RowSparseArray(value.copy(), first.copy(), (40, width)) for _ in keys])
    store.set_optimizer(kv.optimizer.create(rule, learning_rate=0.1))
    seen: list[Any] = []
    for turn in range(5):
        if turn == 3 and path:
            store.barrier()
            if store.rank == 0:
                store.save_optimizer_states(path)
            store.barrier()
            worker.step()
            store.load_optimizer_states(path)
            seen += read_tables(store, keys, width)
        worker.push(keys, lambda key, rank: _few_rows(key, rank, turn, width))  # noqa: B023 - called at once
        seen += read_tables(store, keys, width)
    store.barrier()
    store.close()
    return seen


def _few_rows(key: str, rank: int, turn: int, width: int) -> kv.RowSparseArray:
    ids = np.array(sorted({(5 * turn + rank) % 40, (ord(key[0]) + 11 * turn) % 40, 7}))
    data = (np.arange(width * len(ids), dtype=np.float32) % 17 - 3 + rank).reshape(-1, width)
    return kv.RowSparseArray(data, ids, (40, width))


def read_tables(store: Any, keys: list[str], width: int) -> list[Any]:
    """Return ids and bits of tables, as dense and row-sparse outs get them, and rows that were asked for."""
    dense = [np.empty((40, width), np.float32) for _ in keys]
    store.pull(keys, out=dense, ignore_sparse=False)
    sparse = [_no_rows(width) for _ in keys]
    store.pull(keys, out=sparse, ignore_sparse=False)
    some = [_no_rows(width) for _ in keys]
    store.row_sparse_pull(keys, out=some, row_ids=[np.array([1, 7, 9, 33])] * 2)
    seen: list[Any] = [_digest(one) for one in dense]
    for one in (*sparse, *some):
        seen += [one.indices.tolist(), _digest(one.data)]
    return seen


def _no_rows(width: int) -> kv.RowSparseArray:
    return kv.RowSparseArray(np.empty((0, width), np.float32), np.empty(0, np.int64), (40, width))


def rows_of_dense(of: int, late: float, rule: str, shape: list[int], dtype: str, mixed: bool) -> list[str]:
    """Push rows to dense keys: a rule that is lazy leaves the other rows alone, wherever slices begin."""
    worker = Worker(of, late)
    store, keys = worker.store, ["a", "b"]
    first = (np.arange(np.prod(shape)) % 13 / 4).astype(dtype).reshape(shape)
    store.init(keys, [first] * 2)
    settings = {"wd": 0.0 if rule == "groupadagrad" else 0.1, "multi_precision": dtype == "float16"}
    store.set_optimizer(kv.optimizer.create(rule, learning_rate=0.1, **settings))
    seen: list[str] = []
    for turn in range(4):

        def made(key: str, rank: int, turn: int = turn) -> Any:
            if mixed and turn % 2 and rank:
                return (first - turn).astype(dtype)
            ids = np.arange((rank + turn) % 3, shape[0], 4 + ord(key[0]) % 3)
            data = np.arange(len(ids) * np.prod(shape[1:], dtype=int)) % 7 - 2
            return kv.RowSparseArray(data.astype(dtype).reshape(len(ids), *shape[1:]), ids, tuple(shape))

        worker.push(keys, made)
        seen += worker.values(keys)
    store.barrier()
    store.close()
    return seen
