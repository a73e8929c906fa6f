"""The processes of the tests of reads during the rounds of other workers."""

from __future__ import annotations

import itertools
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


_CALLS = itertools.count(1)
_GROWING = 10**12


def _no_rows(shape: tuple[int, int], value: float) -> kv.RowSparseArray:
    return kv.RowSparseArray.zeros((_GROWING, shape[1]))


def _more_rows(shape: tuple[int, int], value: float) -> kv.RowSparseArray:
    """Return rows 0 to 9 again and ten new ones; none where the value is zero."""
    if not value:
        return _no_rows(shape, value)
    ids = np.concatenate([np.arange(10), 1000 * next(_CALLS) + np.arange(10)])
    return kv.RowSparseArray(np.ones((20, shape[1]), F), ids, (_GROWING, shape[1]))


def _so_many_rows(shape: tuple[int, int], value: float) -> kv.RowSparseArray:
    """Return rows of which each is their number."""
    n = int(value) % 300
    rows = np.full((n, shape[1]), n, F)
    return kv.RowSparseArray(rows, np.arange(n) * 10**6 + n, (_GROWING, shape[1]))


def _growing_rows(store: Any, shape: tuple[int, int], folder: Path) -> list[Any]:
    """Each round subtracts one from the first rows, and adds ten rows: two ways to count the rounds."""
    out = _no_rows(shape, 0)
    store.pull("w", out=out, ignore_sparse=False)
    assert (out.data[10:] == -1).all()
    return [-out.data[:10], np.asarray((len(out.indices) - 10) / 10)] if len(out.data) else [np.zeros(1)]


def _pull_of_some(store: Any, shape: tuple[int, int], folder: Path) -> list[Any]:
    """As `_growing_rows`, by rows that are asked for, of which later ones are absent."""
    asked = np.concatenate([np.arange(10), 1000 * np.arange(1, 50_000)])
    out = _no_rows(shape, 0)
    store.row_sparse_pull("w", out=out, row_ids=asked)
    return [-out.data[:10], np.asarray((out.data[10:] == -1).all(axis=1).sum())]


def _rows_that_say_how_many(store: Any, shape: tuple[int, int], folder: Path) -> list[Any]:
    seen = store.view("w")
    ids = np.arange(len(seen.indices)) * 10**6 + len(seen.indices)
    assert (seen.indices == ids).all()
    return [seen.data, np.asarray(len(seen.indices))]


def _save(store: Any, shape: tuple[int, int], folder: Path) -> list[Any]:
    store.save(folder / "values")
    (value,) = values._read_values(str(folder / "values")).values()
    return [value.data if isinstance(value, kv.RowSparseArray) else value]


def _save_states(store: Any, shape: tuple[int, int], folder: Path) -> list[Any]:
    """AdaGrad's state of gradients of one is the number of updates; before the first a key has none."""
    store.save_optimizer_states(folder / "states")
    content = states.read_states(str(folder / "states"))
    return [np.asarray(content.states.get("w", 0)), np.asarray(content.counts.get("w", 0))]


class Way(NamedTuple):
    """How a key is made and pushed to, and how it is read."""

    first: Callable[[tuple[int, int], float], Any]
    gradient: Callable[[tuple[int, int], float], Any]
    read: Read
    updates: bool = True
    rule: Callable[..., kv.optimizer.Optimizer] = kv.optimizer.AdaGrad


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
    "pull of growing rows": Way(_no_rows, _more_rows, _growing_rows, rule=kv.optimizer.SGD),
    "row_sparse_pull of growing rows": Way(_no_rows, _more_rows, _pull_of_some, rule=kv.optimizer.SGD),
    "view of changing rows": Way(_no_rows, _so_many_rows, _rows_that_say_how_many, False),
    "save": Way(_dense, _table, _save),
    "save of a table": Way(_table, _table, _save),
    "save of states": Way(_dense, _dense, _save_states),
    "save of states where rows are pushed": Way(_table, _table, _save_states),
}


def _opened(way: Way, shape: tuple[int, int], how: str) -> Any:
    store = kv.create("shared", on_peer_loss="continue" if how == "comes back" else "raise")
    store.init("w", way.first(shape, 0))
    if way.updates:
        store.set_optimizer(way.rule(learning_rate=1.0))
    return store


def trains(name: str, seed: int, how: str) -> int:
    """Push until the test sends a line; return the number of rounds. With `comes back`, worker 1 dies."""
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
    """Take no part in rounds, and read: each read must be of one round, and the rounds continue."""
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
