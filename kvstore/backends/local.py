"""The store of one process: several values for a key, summed and updated in one pass over memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import pages
from ..arrays import readable, same_type, writable
from ..config import StoreConfig
from ..errors import (
    ArrayError,
    DTypeError,
    DuplicateKeyError,
    KeyKindError,
    KeyNotFoundError,
    RowIndexError,
    ShapeError,
    UpdaterError,
)
from ..grouping import Group, Key
from ..kernels import cpu
from ..optimizer import Optimizer, Updater
from ..sparse import RowSparseArray
from .rows import RowTable, merge, merged

log = logging.getLogger("kvstore.local")

Array = npt.NDArray[Any]
Deliver = Callable[[], None]
UserUpdater = Callable[[Key, Any, Array], None]


class Entry:
    """What is stored for a key: a dense array, or a row table."""

    __slots__ = ("dtype", "key", "number", "scratch", "shape", "table", "value")

    def __init__(self, key: Key, number: int, value: Array | RowSparseArray) -> None:
        self.key = key
        #: Place in the order of updates: int keys ascend, str keys follow the order of their init.
        self.number = key if isinstance(key, int) else number
        self.shape, self.dtype = value.shape, value.dtype
        self.table = RowTable(value) if isinstance(value, RowSparseArray) else None
        self.value: Array = np.empty(0) if isinstance(value, RowSparseArray) else pages.copy(value)
        #: Memory for a merged gradient or for a weight to go back to; made when first needed.
        self.scratch: dict[str, Array] = {}

    def assign(self, value: Array | RowSparseArray) -> None:
        """Overwrite with a value of the same shape, type and storage."""
        if isinstance(value, RowSparseArray):
            self.table = RowTable(value)
        else:
            np.copyto(self.value, value)

    def weight(self) -> Array:
        """Return the live dense weight; a row table gets all its rows."""
        return self.value if self.table is None else self.table.fill()

    def scratch_like(self, name: str) -> Array:
        """Return reusable memory of the key's shape and type."""
        if name not in self.scratch:
            self.scratch[name] = pages.empty(self.shape, self.dtype)
        return self.scratch[name]


#: A dense key of one call: its entry, the arrays to sum, the arrays to fill.
Batch = list[tuple[Entry, list[Array], list[Array]]]


class LocalBackend:
    """See `kvstore.backends.protocol.Backend`."""

    rank = 0
    local_rank = 0
    num_workers = 1

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self.updater: Updater | None = None
        self._user_updater: UserUpdater | None = None
        self._entries: dict[Key, Entry] = {}
        self._told: set[Key] = set()
        if config.threads:
            cpu.set_threads(config.threads)

    # ------------------------------------------------------------------------------------------ verbs

    def init(self, groups: list[Group]) -> None:
        """Copy one value for each new key."""
        new = [(key, self._first_value(key, values)) for key, values in groups if values]
        for number, (key, value) in enumerate(new, start=len(self._entries)):
            self._entries[key] = Entry(key, number, value)

    def assign(self, groups: list[Group]) -> None:
        """Overwrite known keys and initialise others; an init that fails comes before any change."""
        known = [(key, values[0]) for key, values in groups if key in self._entries]
        self.init([(key, values) for key, values in groups if key not in self._entries])
        for key, value in known:
            self._entries[key].assign(value)

    def forget(self, keys: list[Key]) -> None:
        """Undo the init of keys."""
        for key in keys:
            self._entries.pop(key, None)

    def push(self, groups: list[Group]) -> None:
        """Sum, then update or replace."""
        dense, sparse = self._sources(groups)
        with _CountsOf(self.updater):
            self._apply_dense([(entry, srcs, []) for entry, srcs in dense])
            self._apply_sparse(sparse)

    def pull(self, groups: list[Group], ignore_sparse: bool) -> None:
        """Copy out."""
        later: list[Deliver] = []
        batch: Batch = []
        tables: list[tuple[RowTable, RowSparseArray]] = []
        for key, outs in groups:
            entry = self._entry(key)
            dense = [out for out in outs if not isinstance(out, RowSparseArray)]
            if len(dense) < len(outs):
                tables += self._sparse_outs(entry, outs, ignore_sparse)
            if dense:
                batch.append((entry, [], self._outs(entry, dense, later)))
        self._emit(batch)
        for table, out in tables:
            table.copy_to(out)
        for deliver in later:
            deliver()

    def pushpull(self, groups: list[Group], outs: list[Group] | None) -> None:
        """Push, and hand the result out while it is in the cache."""
        later: list[Deliver] = []
        dense, sparse = self._sources(groups)
        targets = dict(groups if outs is None else outs)
        batch = [(entry, srcs, self._fused_outs(entry, srcs, targets, later)) for entry, srcs in dense]
        rest = [(key, arrays) for key, arrays in targets.items() if arrays]
        self._check_outs(rest)
        with _CountsOf(self.updater):
            self._apply_dense(batch)
            self._apply_sparse(sparse)
        for deliver in later:
            deliver()
        if rest:
            self.pull(rest, ignore_sparse=True)

    def row_sparse_pull(self, wanted: list[tuple[Key, list[tuple[RowSparseArray, Any]]]]) -> None:
        """Gather rows."""
        jobs: list[tuple[RowTable, Array, RowSparseArray]] = []
        for key, pairs in wanted:
            entry = self._entry(key)
            if entry.table is None:
                raise ArrayError(
                    f"key {key!r} holds a dense array; row_sparse_pull reads row-sparse keys only"
                )
            for out, ids in pairs:
                _check_shape(entry, out, "out")
                jobs.append((entry.table, _row_ids(entry, ids), out))
        for table, rows, out in jobs:
            table.gather(rows, out)

    def set_updater(self, updater: UserUpdater | None) -> None:
        """Use a callable, or go back to plain sums."""
        self.updater = updater if isinstance(updater, Updater) else None
        self._user_updater = updater if self.updater is None else None

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Use an optimizer, with fresh states."""
        self.set_updater(Updater(optimizer))

    # ------------------------------------------------------------------------------------- inspection

    def keys(self) -> list[Key]:
        """All keys in the order of their init."""
        return list(self._entries)

    def view(self, key: Key) -> Array | RowSparseArray:
        """Live memory, read-only."""
        entry = self._entry(key)
        if entry.table is not None:
            return entry.table.view()
        view = entry.value.view()
        view.flags.writeable = False
        return view

    def placement(self) -> dict[Key, list[tuple[str, int]]]:
        """Everything lies in this process."""
        sizes = {
            key: e.value.nbytes if e.table is None else e.table.nbytes for key, e in self._entries.items()
        }
        return {key: [("worker 0", size)] for key, size in sizes.items()}

    def barrier(self) -> None:
        """There is nobody to wait for."""

    def close(self) -> None:
        """Let the memory go."""
        self._entries.clear()
        self.set_updater(None)

    # ----------------------------------------------------------------------------------------- checks

    def _first_value(self, key: Key, values: list[Any]) -> Array | RowSparseArray:
        if key in self._entries:
            raise DuplicateKeyError(f"key {key!r} is initialised already; init and broadcast take a key once")
        if len(values) > 1:
            raise DuplicateKeyError(f"key {key!r} stands {len(values)} times in one init; give it one value")
        self._check_kind(key)
        value = values[0]
        return value if isinstance(value, RowSparseArray) else readable(value, f"value of key {key!r}")

    def _check_kind(self, key: Key) -> None:
        some = next(iter(self._entries), key)
        if isinstance(some, str) != isinstance(key, str):
            raise KeyKindError(
                f"key {key!r} is a {type(key).__name__}, this store's keys are {type(some).__name__}"
            )

    def _entry(self, key: Key) -> Entry:
        try:
            return self._entries[key]
        except KeyError:
            pass
        self._check_kind(key)
        raise KeyNotFoundError(f"key {key!r} is not initialised; call init or broadcast with it first")

    def _sources(
        self, groups: list[Group]
    ) -> tuple[list[tuple[Entry, list[Array]]], list[tuple[Entry, list[RowSparseArray]]]]:
        """Check everything that is pushed, before anything changes; dense and row-sparse work apart."""
        dense: list[tuple[Entry, list[Array]]] = []
        sparse: list[tuple[Entry, list[RowSparseArray]]] = []
        for key, values in groups:
            entry = self._entries.get(key) or self._entry(key)
            if entry.table is None and cpu.first_misfit(values, entry.value) < 0:
                if values:
                    dense.append((entry, values))
            elif all(isinstance(value, RowSparseArray) for value in values):
                if values:
                    sparse.append((entry, [_checked(entry, value) for value in values]))
            else:
                dense.append((entry, [_dense_source(entry, value) for value in values]))
        if len(dense) > 1:
            dense.sort(key=lambda pair: pair[0].number)
        sparse.sort(key=lambda pair: pair[0].number)
        return dense, sparse

    def _outs(self, entry: Entry, outs: list[Any], later: list[Deliver]) -> list[Array]:
        """Arrays to fill; what must be converted or copied home is added to `later`."""
        if entry.table is None and cpu.first_misfit(outs, entry.value) < 0 and cpu.first_unwritable(outs) < 0:
            return outs
        direct = []
        for out in outs:
            array, deliver = writable(out, f"out of key {entry.key!r}")
            _check_shape(entry, array, "out")
            if array.dtype == entry.dtype:
                direct.append(array)
            else:
                later.append(_conversion(entry, array))
            if deliver is not None:
                later.append(deliver)
        return direct

    def _fused_outs(
        self, entry: Entry, srcs: list[Array], targets: dict[Key, list[Any]], later: list[Deliver]
    ) -> list[Array]:
        """Take a key's outs out of `targets` where they can be filled together with the sum."""
        outs = targets.get(entry.key, [])
        if outs is srcs and cpu.first_unwritable(srcs) < 0 and entry.table is None:
            targets[entry.key] = []
            return srcs
        if entry.table is not None or any(isinstance(out, RowSparseArray) for out in outs):
            return []
        direct = self._outs(entry, outs, later)
        targets[entry.key] = []
        return direct

    def _check_outs(self, rest: list[Group]) -> None:
        """Make sure, before the push, that the pull after it will work."""
        for key, outs in rest:
            entry = self._entry(key)
            for out in outs:
                if isinstance(out, RowSparseArray):
                    continue
                array, _ = writable(out, f"out of key {key!r}")
                _check_shape(entry, array, "out")

    def _sparse_outs(
        self, entry: Entry, outs: list[Any], ignore_sparse: bool
    ) -> list[tuple[RowTable, RowSparseArray]]:
        sparse = [out for out in outs if isinstance(out, RowSparseArray)]
        if ignore_sparse:
            if entry.key not in self._told:
                self._told.add(entry.key)
                log.info("pull of key %r leaves row-sparse outs alone; use row_sparse_pull", entry.key)
            return []
        if entry.table is None:
            raise ArrayError(f"key {entry.key!r} holds a dense array; pull it into a dense out")
        for out in sparse:
            _check_shape(entry, out, "out")
        return [(entry.table, out) for out in sparse]

    # ------------------------------------------------------------------------------------------ dense

    def _apply_dense(self, batch: Batch) -> None:
        if not batch:
            return
        if any(entry.table is not None for entry, _, _ in batch):
            batch = [self._onto_table(*work) for work in batch]
        if self.updater is None and self._user_updater is None:
            cpu.reduce([(srcs, entry.weight(), outs) for entry, srcs, outs in batch])
        elif self.updater is not None and self.updater.optimizer.fused:
            cpu.update([self._planned(entry, srcs, outs) for entry, srcs, outs in batch])
        else:
            for entry, srcs, _ in batch:
                self._call(entry, _sum_into(srcs, entry.scratch_like("merged")))
            self._emit([(entry, [], outs) for entry, _, outs in batch if outs])

    def _onto_table(
        self, entry: Entry, srcs: list[Array], outs: list[Array]
    ) -> tuple[Entry, list[Array], list[Array]]:
        """Dense values on a row-sparse key: all rows become present."""
        if entry.table is not None:
            entry.table.fill()
        return entry, srcs, outs

    def _planned(
        self, entry: Entry, srcs: list[Array], outs: list[Array]
    ) -> tuple[int, tuple[float, ...], list[Array], Array, Array | None, tuple[Array, ...], list[Array]]:
        weight = entry.weight()
        rule, params, master, states = self._plan(entry, weight)
        return rule, params, srcs, weight, master, states, outs

    def _plan(
        self, entry: Entry, weight: Array
    ) -> tuple[int, tuple[float, ...], Array | None, tuple[Array, ...]]:
        assert self.updater is not None
        return self.updater.plan(entry.key, weight)

    def _emit(self, batch: Batch) -> None:
        cpu.reduce([([_dense_of(entry)], None, outs) for entry, _, outs in batch])

    # ----------------------------------------------------------------------------------------- sparse

    def _apply_sparse(self, work: list[tuple[Entry, list[RowSparseArray]]]) -> None:
        for entry, sources in work:
            if self.updater is None and self._user_updater is None:
                self._replace_by_rows(entry, sources)
            elif self.updater is not None and self.updater.optimizer.fused:
                self._update_rows(entry, sources)
            else:
                self._call(entry, merged(sources))

    def _replace_by_rows(self, entry: Entry, sources: list[RowSparseArray]) -> None:
        if entry.table is not None:
            entry.table.replace_by_sum(sources)
            return
        gradient = merged(sources)
        entry.value[...] = 0
        entry.value[gradient.indices] = gradient.data

    def _update_rows(self, entry: Entry, sources: list[RowSparseArray]) -> None:
        weight = entry.weight()
        mode = self.updater.optimizer.sparse_mode(entry.table is not None) if self.updater else "rows"
        rule, params, master, states = self._plan(entry, weight)
        if mode == "dense":
            cpu.update([(rule, params, [merged(sources).todense()], weight, master, states, [])])
            return
        rows, maps, datas = merge(sources)
        cpu.update_rows(rule, params, datas, maps, rows, weight, master, states)

    # ---------------------------------------------------------------------------------------- updater

    def _call(self, entry: Entry, gradient: Array | RowSparseArray) -> None:
        """Let an updater change the weight; if it raises, the weight is as before."""
        weight = entry.weight()
        before = entry.scratch_like("before")
        np.copyto(before, weight)
        try:
            if self.updater is not None:
                self.updater(entry.key, gradient, weight)
            elif self._user_updater is not None:
                self._user_updater(entry.key, gradient, weight)
        except Exception as error:
            np.copyto(weight, before)
            raise UpdaterError(
                f"the updater raised {type(error).__name__} on key {entry.key!r} (worker 0): {error}"
            ) from error


class _CountsOf:
    """Take back the optimizer's update counts if the call fails."""

    __slots__ = ("_snapshot", "_updater")

    def __init__(self, updater: Updater | None) -> None:
        self._updater = updater

    def __enter__(self) -> None:
        if self._updater is not None:
            self._snapshot = self._updater.snapshot_counts()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._updater is not None:
            self._updater.restore_counts(self._snapshot)


def _check_shape(entry: Entry, array: Array | RowSparseArray, what: str) -> None:
    if array.shape != entry.shape:
        raise ShapeError(f"{what} of key {entry.key!r} has shape {array.shape}, the key has {entry.shape}")


def _check_dtype(entry: Entry, dtype: np.dtype[Any]) -> None:
    if not same_type(dtype, entry.dtype):
        raise DTypeError(f"value of key {entry.key!r} has element type {dtype}, the key has {entry.dtype}")


def _checked(entry: Entry, value: RowSparseArray) -> RowSparseArray:
    _check_dtype(entry, value.dtype)
    _check_shape(entry, value, "value")
    return value


def _dense_source(entry: Entry, value: Any) -> Array:
    if isinstance(value, RowSparseArray):
        return _checked(entry, value).todense()
    array = readable(value, f"value of key {entry.key!r}")
    _check_dtype(entry, array.dtype)
    _check_shape(entry, array, "value")
    return array


def _dense_of(entry: Entry) -> Array:
    return entry.value if entry.table is None else entry.table.dense()


def _conversion(entry: Entry, out: Array) -> Deliver:
    return lambda: np.copyto(out, _dense_of(entry), casting="unsafe")


def _sum_into(srcs: list[Array], memory: Array) -> Array:
    cpu.reduce([(srcs, memory, [])])
    return memory


def _row_ids(entry: Entry, ids: Any) -> Array:
    """Sorted, unique row ids, checked; fractions are cut off as MXNet does."""
    given = np.asarray(
        ids if isinstance(ids, (list, tuple)) else readable(ids, f"row_ids of key {entry.key!r}")
    )
    if given.dtype.kind == "f" and not np.isfinite(given).all():
        raise RowIndexError(f"row_ids of key {entry.key!r} are not all finite")
    rows = cpu.unique_ids(given.astype(np.int64).ravel())
    if len(rows) and (rows[0] < 0 or rows[-1] >= entry.shape[0]):
        raise RowIndexError(
            f"row_ids of key {entry.key!r} lie in [{rows[0]}, {rows[-1]}], "
            f"the table has {entry.shape[0]} rows"
        )
    return rows
