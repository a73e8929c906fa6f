"""The store of one process. It sums and updates several values of a key in one pass over memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from ...arrays import pages
from ...arrays.grouping import Group, Key, key_kind_error
from ...arrays.host import shape_template
from ...arrays.sparse import RowSparseArray, kind_of
from ...compression import Codec, Feedback
from ...errors import ArrayError, KeyNotFoundError
from ...kernels import cpu
from ...observe.counters import CALLS, MEMORY, MOVING, UPDATING
from ...observe.native._observe import Counters
from ...optimizer import Optimizer, Updater
from ...settings.options import StoreConfig
from ..entry import (
    Array,
    Deliver,
    StoredKey,
    check_shape,
    dense_out,
    dense_source,
    first_value,
    not_row_sparse,
    out_conversion,
    row_ids,
    sparse_outs,
    sparse_source,
)
from ..key_lists import KeyColumns, KeyLists
from ..protocol import Backend, Kind, done_and_counted
from ..store_table import StoreTable
from ..update import UserUpdater, Work, apply_with, emit_outs
from .bound import BoundCall, bind_call, columns_of

if TYPE_CHECKING:
    from ...optimizer.states import StatesContent

log = logging.getLogger("kvstore.local")

_PUSHPULL = CALLS.index("pushpull")


class LocalBackend(Backend):
    """See `kvstore.stores.protocol.Backend`."""

    rank = 0
    local_rank = 0
    num_workers = 1
    logger = "kvstore.local"
    can_bind = quick_lists = True
    feedback: Feedback | None = None
    updater: Updater | None = None
    _counters = Counters("", "", 0, 1, shown=False)  # of a store without counters

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self._apply = apply_with(None)
        self._entries: dict[Key, StoredKey] = {}
        self._quick = self._entries  # empty while times are recorded
        self._lists: KeyLists[KeyColumns[StoredKey]] = KeyLists()
        self._told: set[Key] = set()
        if config.threads:
            cpu.set_threads(config.threads)

    def observe(self, counters: Counters) -> None:
        """Count in `counters` from now on."""
        self._counters = counters
        self._quick = {} if counters.timed else self._entries

    def names(self) -> dict[int, str]:
        """Keys by the number of their entry."""
        return {entry.slice.number: str(key) for key, entry in self._entries.items()}

    # ------------------------------------------------------------------------------------------ verbs

    def init(self, groups: list[Group]) -> None:
        """Copy one value for each new key."""
        new = [(key, self._first_value(key, values)) for key, values in groups if values]
        first = len(self._entries)
        self._entries.update({key: StoredKey(key, first + i, value) for i, (key, value) in enumerate(new)})
        self._lists.clear()

    def assign(self, groups: list[Group]) -> None:
        """Overwrite existing keys and initialise others. A failed `init` changes nothing."""
        known = [(key, values[0]) for key, values in groups if key in self._entries]
        self.init([(key, values) for key, values in groups if key not in self._entries])
        for key, value in known:
            entry = self._entries[key]
            if entry.table is not None:
                entry.table.drop_old_states(self.updater)
            entry.assign(value)
            if self.updater is not None and entry.dtype.itemsize == 2:
                self._update_master(self.updater, entry)

    def _update_master(self, updater: Updater, entry: StoredKey) -> None:
        """Update the float32 copy of a 16-bit weight after a change outside of pushes."""
        if entry.table is None:
            updater.follow(entry.key, entry.value)
        else:
            entry.table.follow_by(updater)

    def discard(self, keys: list[Key]) -> None:
        """Undo the `init` of keys."""
        self._lists.clear()
        for key in keys:
            self._entries.pop(key, None)
            if self.feedback is not None:
                self.feedback.discard(key)

    def push(self, groups: list[Group]) -> None:
        """Sum the values of each key, then update or replace the stored value."""
        if len(groups) == 1 and (work := self._plain_work(groups[0], ())) is not None:
            counters, apply = self._counters, self._apply
            begin = counters.begin()
            apply.dense([work])
            counters.end_work(apply.phase, begin, MEMORY, work[0].slice, work[1], ())
            return
        dense, sparse = self._check_sources(groups)
        self._push_values([(entry, srcs, []) for entry, srcs in dense], sparse)

    def pull(self, groups: list[Group], ignore_sparse: bool) -> None:
        """Copy the stored value to every array of each key."""
        if len(groups) == 1 and (work := self._plain_pull(*groups[0])) is not None:
            begin = self._counters.begin()
            emit_outs([work])
            self._counters.end_work(MOVING, begin, MEMORY, work[0].slice, (), work[2], 0)
            return
        if not groups:
            return
        later: list[Deliver] = []
        batch: list[Work] = []
        tables: list[tuple[StoreTable, RowSparseArray]] = []
        for entry, outs in self._by_number(groups):
            dense = [out for out in outs if not isinstance(out, RowSparseArray)]
            if len(dense) < len(outs):
                tables += self._sparse_outs(entry, outs, ignore_sparse)
            if dense:
                batch.append((entry, [], self._out_arrays(entry, dense, later)))
        begin = self._counters.begin()
        emit_outs(batch)
        for table, out in tables:
            table.copy_rows(out, None)
            self._counters.move(MEMORY, 0, out.data.nbytes)
        for deliver in later:
            deliver()
        self._counters.end_works(MOVING, begin, MEMORY, batch, 0)

    def pushpull(self, groups: list[Group], outs: list[Group] | None) -> None:
        """Push, and copy the result to the outputs while it is in the cache."""
        if (
            len(groups) == 1
            and (work := self._plain_work(groups[0], groups if outs is None else outs)) is not None
        ):
            counters, apply = self._counters, self._apply
            if not (begin := counters.begin()):
                self._quick = self._entries
            apply.dense([work])
            counters.end_work(apply.phase, begin, MEMORY, work[0].slice, work[1], work[2])
            return
        if outs is not None and not all(values for _, values in groups):  # some keys are pulled only
            self._check_outs(outs)
            self.push(groups)
            self.pull(outs, ignore_sparse=True)
            return
        later: list[Deliver] = []
        dense, sparse = self._check_sources(groups)
        targets = dict(groups if outs is None else outs)
        batch = [(entry, srcs, self._fused_outs(entry, targets, later)) for entry, srcs in dense]
        rest = [(key, arrays) for key, arrays in targets.items() if arrays]
        self._check_outs(rest)
        self._push_values(batch, sparse)
        if later:
            begin = self._counters.begin()
            for deliver in later:
                deliver()
            self._counters.end(MOVING, begin)
        if rest:
            self.pull(rest, ignore_sparse=True)

    def quick_pushpull(self, key: Any, value: Any, out: Any) -> bool | Callable[[], None]:
        """Do a `pushpull` of one small dense key with plain arrays, or of a list of keys with one each."""
        if type(key) is list:
            return self._push_columns(key, value, value if out is None else out)
        entry = self._quick.get(key)
        if entry is None:
            return self._timed_pushpull(key, value, out)
        if entry.table is not None or self.feedback is not None:
            return False
        if not self._apply.small(entry, value, out):
            return False
        if self._counters.count_small(_PUSHPULL, entry.slice, value, value if out is None else out):
            self._quick = {}
        return done_and_counted

    def _timed_pushpull(self, key: Key, value: Any, out: Any) -> bool | Callable[[], None]:
        """Do the same while times are recorded."""
        entry, counters = self._entries.get(key), self._counters
        if entry is None or entry.table is not None or self.feedback is not None:
            return False
        begin = counters.begin()
        if not self._apply.small(entry, value, out):
            return False
        counters.count(_PUSHPULL)
        outs = value if out is None else out
        counters.end_work(self._apply.phase, begin, MEMORY, entry.slice, value, outs)
        if not begin:
            self._quick = self._entries
        return done_and_counted

    def quick_push(self, key: Any, value: Any) -> bool | Callable[[], None]:
        """Do the same for a `push`; for lists only."""
        return type(key) is list and self._push_columns(key, value, None)

    def quick_pull(self, key: Any, out: Any) -> bool | Callable[[], None]:
        """Do the same for a `pull`; for lists only."""
        columns = self._lists.find(key, self._key_columns) if type(key) is list else None
        found = None if columns is None else columns.checked_arrays(out, write=True)
        if columns is None or found is None:
            return False
        begin = self._counters.begin()
        cpu.reduce(list(zip(columns.likes, repeat(None), found[0])))
        self._counters.passed(MOVING, begin, MEMORY, 0, columns.nbytes, 0)
        return True

    def _push_columns(self, names: list[Any], value: Any, out: Any) -> bool:
        """Push, and write the outs if there are any; False: nothing has happened."""
        columns = self._lists.find(names, self._key_columns)
        if columns is None or not self.may_push(columns):
            return False
        values = columns.checked_arrays(value, write=out is value)
        outs = values if out is value or out is None else columns.checked_arrays(out, write=True)
        if values is None or outs is None:
            return False
        self.push_columns(columns, values[0], None if out is None else outs[0])
        return True

    def may_push(self, columns: KeyColumns[StoredKey]) -> bool:
        """Return whether pushes to these keys need nothing but arrays."""
        apply = self._apply
        return (
            self.feedback is None
            and apply.takes_columns
            and not (columns.integral and apply.phase == UPDATING)
        )

    def push_columns(
        self, columns: KeyColumns[StoredKey], values: list[Array], outs: list[Array] | None
    ) -> None:
        """Sum, update, write the outs; each key has one value, and one out or none."""
        counters, apply = self._counters, self._apply
        begin = counters.begin()
        apply.dense(zip(columns.keys, values, repeat(None) if outs is None else outs))  # noqa: B905
        received = 0 if outs is None else columns.nbytes
        counters.passed(apply.phase, begin, MEMORY, columns.nbytes, received, len(values))

    def _key_columns(self, names: list[Key]) -> KeyColumns[StoredKey] | None:
        """Return the common part of calls with this list of keys, if all are dense and distinct."""
        entries = [self._entries.get(name) for name in names]
        dense = [entry for entry in entries if entry is not None and entry.table is None]
        return columns_of(dense) if len(dense) == len(names) == len(set(names)) else None

    def bind(self, groups: list[Group], outs: list[Group] | None) -> BoundCall:
        """Check a call once, and return a callable that repeats it."""
        return bind_call(self, groups, outs)

    # The usual call, one dense key with plain arrays, in few steps. None: use the general path, which reports
    # errors.

    def _plain_work(
        self, pushed: Group, outs: Sequence[Group]
    ) -> tuple[StoredKey, list[Array], list[Array]] | None:
        key, values = pushed
        entry = self._entries.get(key)
        if (
            entry is None
            or entry.table is not None
            or self.feedback is not None
            or not values
            or cpu.first_misfit(values, entry.value) >= 0
        ):
            return None
        if not outs:
            self._apply.check(entry)
            return entry, values, []
        pulled = self._plain_pull(*outs[0]) if len(outs) == 1 and outs[0][0] == key else None
        if pulled is None:
            return None
        self._apply.check(entry)
        return entry, values, pulled[2]

    def _plain_pull(self, key: Key, outs: list[Any]) -> tuple[StoredKey, list[Array], list[Array]] | None:
        entry = self._entries.get(key)
        if entry is None or entry.table is not None or cpu.first_misfit(outs, entry.value, True) >= 0:
            return None
        return entry, [], outs

    def _push_values(
        self,
        dense: list[tuple[StoredKey, list[Array], list[Array]]],
        sparse: list[tuple[StoredKey, list[RowSparseArray]]],
    ) -> None:
        if len(dense) + len(sparse) > 1 and any(entry.table is None for entry, _ in sparse):
            self._push_one_by_one(dense, sparse)
            return
        batch: list[Work] = list(dense)
        if (feedback := self.feedback) is not None:
            batch = [(entry, feedback.pushed(entry.key, srcs), outs) for entry, srcs, outs in dense]
        counters, phase = self._counters, self._apply.phase
        if batch:
            begin = counters.begin()
            self._apply.dense(batch)
            counters.end_works(phase, begin, MEMORY, dense)
        for entry, sources in sparse:
            begin, nbytes = counters.begin(), sum(source.data.nbytes for source in sources)
            self._apply.rows(entry, sources)
            counters.passed(phase, begin, MEMORY, nbytes, 0, 1, entry.slice.number)

    def _push_one_by_one(
        self,
        dense: list[tuple[StoredKey, list[Array], list[Array]]],
        sparse: list[tuple[StoredKey, list[RowSparseArray]]],
    ) -> None:
        """Update dense keys, then tables, in the order that all stores have."""
        updates: list[tuple[StoredKey, Callable[[], None]]] = [
            *((one[0], partial(self._push_values, [one], [])) for one in dense),
            *((pair[0], partial(self._push_values, [], [pair])) for pair in sparse),
        ]
        for _, update in sorted(updates, key=lambda one: (one[0].table is not None, one[0].number)):
            update()

    def row_sparse_pull(self, wanted: list[tuple[Key, list[tuple[RowSparseArray, Any]]]]) -> None:
        """Copy the requested rows to the outputs."""
        jobs: list[tuple[StoreTable, Array, RowSparseArray]] = []
        for key, pairs in wanted:
            entry = self._key_entry(key)
            if entry.table is None:
                raise not_row_sparse(key)
            for out, ids in pairs:
                check_shape(entry, out, "out")
                jobs.append((entry.table, row_ids(entry, ids), out))
        for table, rows, out in jobs:
            begin = self._counters.begin()
            table.copy_rows(out, rows)
            self._counters.passed(MOVING, begin, MEMORY, 0, out.data.nbytes)

    def set_updater(self, updater: UserUpdater | None) -> None:
        """Use an updater; None replaces values by sums again."""
        self.updater = updater if isinstance(updater, Updater) else None
        self._apply = apply_with(self._as_part(updater))

    def _as_part(self, updater: UserUpdater | None) -> UserUpdater | None:
        """Let calls of this store that an updater makes count as a part of the update."""
        if updater is None or isinstance(updater, Updater):
            return updater
        counters = self._counters

        def run(key: Key, merged: Any, stored: Array) -> None:
            outer, counters.quiet = counters.quiet, True
            try:
                updater(key, merged, stored)
            finally:
                counters.quiet = outer

        return run

    def set_compression(self, codec: Codec) -> None:
        """Compress each value of a push, with a residual for each position in the list."""
        self.feedback = Feedback(codec).follow(self.feedback)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Use an optimizer, with new states."""
        self.set_updater(Updater(optimizer))

    def configure(self, changes: dict[str, Any]) -> None:
        """Change settings of the optimizer."""
        self._updater_set().optimizer.configure(**changes)

    def gather_states(self) -> Updater:
        """Return the optimizer with its states, which can be live."""
        updater = self._updater_set()
        gathered = Updater(updater.optimizer)
        gathered.states = {**updater.states, **self._states_elsewhere(updater)}
        return gathered

    def _states_elsewhere(self, updater: Updater) -> dict[Key, Any]:
        """Return the states that the updater does not have: of all rows of the tables that lack some."""
        return {
            key: entry.table.whole_tree()
            for key, entry in self._entries.items()
            if entry.table is not None and entry.table.has_own_state(updater)
        }

    def adopt_states(self, content: StatesContent) -> None:
        """Replace the states of the optimizer."""
        self._updater_set().adopt(content, self.key_templates())

    def _updater_set(self) -> Updater:
        assert self.updater is not None
        return self.updater

    # ------------------------------------------------------------------------------------- inspection

    def keys(self) -> list[Key]:
        """List all keys, in the order of their `init`."""
        return list(self._entries)

    def view(self, key: Key) -> Array | RowSparseArray:
        """Return the live memory of a key, read-only."""
        entry = self._key_entry(key)
        if entry.table is not None:
            return entry.table.view()
        view = entry.value.view()
        view.flags.writeable = False
        return view

    def fetch(self, key: Key) -> Array | RowSparseArray:
        """Return the value of a key; see `view`."""
        return self.view(key)

    def kind(self, key: Key) -> Kind:
        """Return storage, element type and shape of a key."""
        return kind_of(self.view(key))

    def empty(self, key: Key) -> Array:
        """Return a new array on large pages."""
        entry = self._key_entry(key)
        if entry.table is not None:
            raise ArrayError(f"key {key!r} is row-sparse; empty makes dense arrays")
        return pages.empty(entry.shape, entry.dtype)

    def key_templates(self) -> dict[Key, Array]:
        """Return for each key an array of its shape and type that needs no memory."""
        return {key: shape_template(e.shape, e.dtype) for key, e in self._entries.items()}

    def placement(self) -> dict[Key, list[tuple[str, int]]]:
        """Return sizes; all keys are in this process."""
        sizes = {
            key: e.value.nbytes if e.table is None else e.table.nbytes for key, e in self._entries.items()
        }
        return {key: [("worker 0", size)] for key, size in sizes.items()}

    def num_dead_nodes(self, timeout: float) -> int:
        """Return 0: there are no other processes."""
        return 0

    def join(self) -> None:
        """Do nothing: there are no other workers."""

    def barrier(self) -> None:
        """Do nothing: there are no other workers to wait for."""

    def abandon(self) -> None:
        """Do nothing: there are no other processes."""

    def close(self) -> None:
        """Free the memory."""
        self._entries.clear()
        self._lists.clear()
        self.feedback = None
        self.set_updater(None)

    # ----------------------------------------------------------------------------------------- checks

    def _by_number(self, groups: list[Group]) -> list[tuple[StoredKey, list[Any]]]:
        """Sort entries into the order of updates, in which pull and pushpull write overlapping outs."""
        found = [(self._key_entry(key), arrays) for key, arrays in groups]
        if len(found) > 1:
            found.sort(key=lambda pair: pair[0].number)
        return found

    def _first_value(self, key: Key, values: list[Any]) -> Array | RowSparseArray:
        self._check_kind(key)
        return first_value(key, values, key in self._entries)

    def _check_kind(self, key: Key) -> None:
        some = next(iter(self._entries), key)
        if isinstance(some, str) != isinstance(key, str):
            raise key_kind_error(key, type(some))

    def _key_entry(self, key: Key) -> StoredKey:
        try:
            return self._entries[key]
        except KeyError:
            pass
        self._check_kind(key)
        raise KeyNotFoundError(f"key {key!r} is not initialised; call init or broadcast with it first")

    def _check_sources(
        self, groups: list[Group]
    ) -> tuple[list[tuple[StoredKey, list[Array]]], list[tuple[StoredKey, list[RowSparseArray]]]]:
        """Check all pushed values before any change; return dense and row-sparse work."""
        dense: list[tuple[StoredKey, list[Array]]] = []
        sparse: list[tuple[StoredKey, list[RowSparseArray]]] = []
        for key, values in groups:
            entry = self._entries.get(key) or self._key_entry(key)
            self._apply.check(entry)
            if self.feedback is not None and values:
                self.feedback.check(key, values, entry.dtype)
            if entry.table is None and cpu.first_misfit(values, entry.value) < 0:
                if values:
                    dense.append((entry, values))
            elif all(isinstance(value, RowSparseArray) for value in values):
                if values:
                    sparse.append((entry, [sparse_source(entry, value) for value in values]))
            else:
                dense.append((entry, [dense_source(entry, value) for value in values]))
        if len(dense) > 1:
            dense.sort(key=lambda pair: pair[0].number)
        sparse.sort(key=lambda pair: pair[0].number)
        return dense, sparse

    def _out_arrays(self, entry: StoredKey, outs: list[Any], later: list[Deliver]) -> list[Array]:
        """Return the arrays to fill; conversions and copies that follow are added to `later`."""
        if entry.table is None and cpu.first_misfit(outs, entry.value, True) < 0:
            return outs
        direct = []
        for out in outs:
            array, deliver = dense_out(entry, out)
            if array.dtype == entry.dtype:
                direct.append(array)
            else:
                later.append(out_conversion(entry, array))
                later.append(partial(self._counters.move, MEMORY, 0, entry.slice.nbytes))
            if deliver is not None:
                later.append(deliver)
        return direct

    def _fused_outs(
        self, entry: StoredKey, targets: dict[Key, list[Any]], later: list[Deliver]
    ) -> list[Array]:
        """Remove a key's outs from `targets` if they can be written together with the sum."""
        outs = targets.get(entry.key, [])
        usual = entry.table is None and cpu.first_misfit(outs, entry.value, True) < 0
        if not usual and (entry.table is not None or any(isinstance(out, RowSparseArray) for out in outs)):
            return []
        targets[entry.key] = []
        return outs if usual else self._out_arrays(entry, outs, later)

    def _check_outs(self, rest: list[Group]) -> None:
        """Check before the push that the pull after it will work."""
        for key, outs in rest:
            entry = self._key_entry(key)
            for out in outs:
                if not isinstance(out, RowSparseArray):
                    dense_out(entry, out)

    def _sparse_outs(
        self, entry: StoredKey, outs: list[Any], ignore_sparse: bool
    ) -> list[tuple[StoreTable, RowSparseArray]]:
        wanted = sparse_outs(entry, entry.table is not None, outs, ignore_sparse, self._told, log)
        return [(entry.table, out) for out in wanted if entry.table is not None]
