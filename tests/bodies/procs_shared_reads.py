"""What the processes of a job do in the tests of reads while the rounds of others go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jobs import hear, tell
from procs_shared_faults import heard
from references import Array

import kvstore as kv
from kvstore.checkpoint import values
from kvstore.optimizer import states

F = np.float32
READS, CHANGES = 50, 4  # so many reads, and so many values that they must have seen


def _shape(seed: int) -> tuple[int, int]:
    return (4000 + 900 * (seed % 4), 64 + 3 * (seed % 2))


def _table(shape: tuple[int, int], value: float) -> kv.RowSparseArray:
    return kv.RowSparseArray(np.full(shape, value, F), np.arange(shape[0]), shape)


def _dense(shape: tuple[int, int], value: float) -> Array:
    return np.full(shape, value, F)


Read = Callable[[Any, tuple[int, int], Path], list[Any]]


def _row_sparse_pull(store: Any, shape: tuple[int, int], folder: Path) -> list[Any]:
    out = _table(shape, -9)
    store.row_sparse_pull("w", out=out, row_ids=np.arange(shape[0]))
    return [out.data]


def _pull_of_rows(store: Any, shape: tuple[int, int], folder: Path) -> list[Any]:
    out = _table(shape, -9)
    store.pull("w", out=out, ignore_sparse=False)
    assert (out.indices == np.arange(shape[0])).all()
    return [out.data]


def _pull(store: Any, shape: tuple[int, int], folder: Path) -> list[Any]:
    out = _dense(shape, -9)
    store.pull("w", out=out)
    return [out]


def _pull_into_another_type(store: Any, shape: tuple[int, int], folder: Path) -> list[Any]:
    out = np.full(shape, -9, np.float64)
    store.pull("w", out=out)
    return [out]


def _view(store: Any, shape: tuple[int, int], folder: Path) -> list[Any]:
    seen = store.view("w")
    return [seen.data if isinstance(seen, kv.RowSparseArray) else seen]


def _save(store: Any, shape: tuple[int, int], folder: Path) -> list[Any]:
    store.save(folder / "values")
    (value,) = values._read(str(folder / "values")).values()
    return [value.data if isinstance(value, kv.RowSparseArray) else value]


def _save_states(store: Any, shape: tuple[int, int], folder: Path) -> list[Any]:
    """AdaGrad's state of gradients of one is the number of updates; before the first a key has none."""
    store.save_optimizer_states(folder / "states")
    content = states.read(str(folder / "states"))
    return [np.asarray(content.states.get("w", 0)), np.asarray(content.counts.get("w", 0))]


class Way(NamedTuple):
    """How a key is made and pushed to, and how it is read."""

    first: Callable[[tuple[int, int], float], Any]
    gradient: Callable[[tuple[int, int], float], Any]
    read: Read
    updates: bool = True


WAYS = {
    "row_sparse_pull": Way(_table, _table, _row_sparse_pull),
    "row_sparse_pull of sums": Way(_table, _table, _row_sparse_pull, False),
    "pull of rows": Way(_table, _table, _pull_of_rows),
    "pull of a table": Way(_table, _table, _pull),
    "pull where rows are pushed": Way(_dense, _table, _pull),
    "pull into another type": Way(_dense, _dense, _pull_into_another_type),
    "pull": Way(_dense, _dense, _pull),
    "view": Way(_dense, _dense, _view),
    "view of a table": Way(_table, _table, _view),
    "save": Way(_dense, _table, _save),
    "save of a table": Way(_table, _table, _save),
    "save of states": Way(_dense, _dense, _save_states),
    "save of states where rows are pushed": Way(_table, _table, _save_states),
}


def _opened(way: Way, shape: tuple[int, int], how: str) -> Any:
    store = kv.create("shared", on_peer_loss="continue" if how == "comes back" else "raise")
    store.init("w", way.first(shape, 0))
    if way.updates:
        store.set_optimizer(kv.optimizer.AdaGrad(learning_rate=1.0))
    return store


def trains(name: str, seed: int, how: str) -> int:
    """Push until the test says something; the number of rounds. Worker 1 is killed where it `comes back`."""
    way, shape = WAYS[name], _shape(seed)
    store = _opened(way, shape, how)
    rounds = 0
    tell("trains")
    while not heard():
        rounds += 1
        store.push("w", way.gradient(shape, (store.rank == 0) if way.updates else rounds))
    store.close()
    return rounds


def reads(name: str, seed: int, how: str, folder: str) -> int:
    """Take no part in rounds, and read: each read must be of one round, and they go on meanwhile."""
    way, shape = WAYS[name], _shape(seed)
    store = _opened(way, shape, how)
    if how == "joins":
        store.push("w", way.gradient(shape, 0))
        store.join()
    seen: list[float] = []
    while len(seen) < READS or len(set(seen)) < CHANGES:
        arrays = way.read(store, shape, Path(folder))
        found = {float(value) for array in arrays for value in np.unique(array)}
        assert len(found) == 1, (name, len(seen), sorted(found)[:4])
        seen += found
    tell("has read")
    hear()
    store.close()
    return len(seen)
