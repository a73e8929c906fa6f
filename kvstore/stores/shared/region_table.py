"""A row-sparse key in the region: the rows that were touched, and their states, in memory that grows.

The region has two places for the rows, as every value has two. With each place it keeps some numbers (below),
and the row that all absent rows are equal to. Without an optimizer, a sum is written to the place that is not
in use. An update changes rows in place, after `note_undo` has saved rows and numbers: until the round is
complete, the numbers describe as many rows as before, and no reader uses the memory beyond these rows. Rows
and states that outgrow their memory are first copied to larger memory; the old memory is freed once the round
is complete. So a death at any moment leaves a table of one round, and at worst memory that is lost.

The ids are in the order in which rows were first touched. Each process has its own index, to which it adds
the ids that are new since its last look. First it compares the last ids that it knows: they may be from a
round that has failed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays import pages
from ...arrays.grouping import Key
from ...arrays.sparse import RowSparseArray
from ...errors import KVStoreError
from ...kernels import cpu
from ...optimizer import Updater
from ...optimizer.builtin import arrays_of, map_state
from ...optimizer.optimizer import State as Tree
from ..entry import Array
from ..row_index import NONE, IdPositions, RowIndex
from ..row_table import RowTable, UpdaterContext, needs_all_rows, spread_rows
from ..rows import Ids, merge_rows
from .native import _shared as shm

if TYPE_CHECKING:
    from .optimizer import JobUpdater

Handle = shm.Handle

#: The numbers of a place: rows held (-1: all, in their order); rows that fit the memory, and its offset; ids
#: that fit their memory, and its offset; a number that differs whenever the order of the held rows differs.
_HELD, _ROOM, _ROWS, _IDS_ROOM, _IDS, _LINEAGE = range(6)

_GROWTH = 1.5  # allocated rows per row held
_LEAST = 16  # the least number of allocated rows
_INT64 = np.dtype(np.int64)


class RegionTables:
    """The row-sparse keys of a job, in one process."""

    def __init__(self, job: shm.Job) -> None:
        self._job = job
        self._tables: dict[Key, RegionTable] = {}
        self._lock = threading.Lock()

    def table_of(self, handle: Handle) -> RegionTable:
        """Return the table of a key."""
        with self._lock:
            if handle.key not in self._tables:
                self._tables[handle.key] = RegionTable(self._job, handle)
            return self._tables[handle.key]


class RegionTable(RowTable):
    """A row-sparse key in one process of a job. A thread holds `lock` while it reads or updates."""

    def __init__(self, job: shm.Job, handle: Handle) -> None:
        super().__init__(handle.key, handle.shape, handle.dtype)
        self._job, self._handle = job, handle
        self.lock = threading.RLock()
        self._words: Ids = handle.table_words()
        self._lying: Ids = np.empty(0, np.int64)
        self._lineage, self._known, self._tail = -1, 0, np.empty(0, np.int64)
        # Memory that the current round has replaced, and has allocated; memory that failed rounds had
        # allocated.
        self._outgrown: list[Array] = []
        self._taken: list[Array] = []
        self._unused: list[Array] = []

    # --------------------------------------------------------------------------------------------- looking

    def read_numbers(self) -> RegionTable:
        """Read the numbers of the rows in use, as the last round has left them."""
        self._words = self._handle.table_words()
        held, room, at, ids_room, ids_at, lineage = (int(n) for n in self._words[:6])
        count = self.shape[0] if held < 0 else held
        if count > room or held > ids_room:
            raise KVStoreError(f"the rows of key {self.key!r} changed while they were read; read again")
        self.blank = self._handle.blank_row()
        self._block = self._handle.region_array(at, (room, *self.shape[1:]), self.dtype)
        self._lying = self._handle.region_array(ids_at, (ids_room,), _INT64)
        if held < 0:
            self.index, self._lineage = None, -1
        else:
            self._add_ids(held, lineage)
        self.count = count
        return self

    def _add_ids(self, count: int, lineage: int) -> None:
        """Add the ids in the region to the index."""
        known, tail = self._known, self._tail
        same = self.index is not None and lineage == self._lineage and count >= known
        if not same or not np.array_equal(self._lying[known - len(tail) : known], tail):
            self.index, known = RowIndex(*NONE), 0
        self._lineage = -1  # if this fails, the next look reads all ids again
        if count > known or not same:
            self._tail = self._lying[known:count].copy()
            order = np.argsort(self._tail)
            assert self.index is not None
            self.index.add(self._tail[order], order + known)
        self._known, self._lineage = count, lineage

    def forget_numbers(self) -> None:
        """Let the next look read everything again."""
        self._lineage = -1
        self.updater = self._blank_of = None

    def show_all(self) -> None:
        """For a read: hold every row, in private memory, if an absent one is not zero."""
        if self.index is not None and self.blank.astype(bool).any():
            try:
                own = pages.empty(self.shape, self.dtype)
            except (MemoryError, OverflowError) as error:
                raise KVStoreError(self._too_large()) from error
            self._block = spread_rows(self.held, self.blank, self.index.all_ids(), own)
            self.index, self.count, self._lineage = None, self.shape[0], -1

    @property
    def nbytes(self) -> int:
        """The bytes of the rows held and their ids."""
        return int(self.held.nbytes) + (0 if self.index is None else 8 * self.count)

    # --------------------------------------------------------------------------------------------- memory

    def _empty_rows(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        self._taken.append(self._handle.new_state(shape, dtype, len(self._taken) % 8)[1])
        return self._taken[-1]

    def _new_rows(self, like: Array, count: int) -> Array:
        return self._empty_rows((max(count, int(_GROWTH * len(like)), _LEAST), *like.shape[1:]), like.dtype)

    def _new_whole(self, like: Array) -> Array:
        return self._empty_rows((self.shape[0], *like.shape[1:]), like.dtype)

    def _fill_rows(self, order: IdPositions) -> None:
        before = [self._block, *self._rooms]
        super()._fill_rows(order)
        self._outgrown += before

    def _grow_memory(self, room: Array, rows: Array, blank: Array, count: int) -> Array:
        grown = super()._grow_memory(room, rows, blank, count)
        if grown is not room:
            self._outgrown.append(room)
        return grown

    def _add_rows(self, ids: Ids, positions: Ids) -> None:
        before = self.count
        super()._add_rows(ids, positions)
        self._lying = self._grow_memory(self._lying, self._lying[:before], np.zeros(1, np.int64), self.count)
        self._lying[before : self.count] = ids
        self._known, self._tail = (
            self.count,
            ids.copy(),
        )  # as in the index; `forget_numbers` resets it on failure

    def _order_rows(self) -> None:
        """Do nothing: `updater_for` does it, and numbers and states do not change after they were saved."""

    def _give_back(self) -> None:
        """Free memory that was replaced, unless another worker has undone the round."""
        own = self._job.offset_of(self._block), self._job.offset_of(self._lying)
        if (int(self._words[_ROWS]), int(self._words[_IDS])) == own:
            self._free_arrays(self._outgrown)
        self._outgrown.clear()
        self._taken.clear()

    def _free_arrays(self, arrays: list[Array]) -> None:
        for array in arrays:
            if offset := self._job.offset_of(array):
                self._handle.free_memory(offset, array.nbytes)
        arrays.clear()

    def _note_failure(self) -> None:
        """Record memory for the next round to free, because this round will be undone.

        States that are already described stay. If the round is complete, or another worker has it, all memory
        stays: its numbers may name it.
        """
        if self._handle.is_opened:
            _, text = self._handle.record()
            named = set(_array_offsets(json.loads(text))) if text else set()
            self._unused += [array for array in self._taken if self._job.offset_of(array) not in named]
        self._outgrown.clear()
        self._taken.clear()
        self.forget_numbers()

    # --------------------------------------------------------------------------------------------- rounds

    @contextmanager
    def work_in_round(self) -> Iterator[RegionTable]:
        """Work on the rows in use, in the round that this worker has opened; the body completes the round."""
        with self.lock:
            try:
                self._free_arrays(self._unused)
                yield self.read_numbers()
                self._give_back()
            except BaseException:
                self._note_failure()
                raise

    def updater_for(self, updates: JobUpdater) -> UpdaterContext:
        """Make the rows that the rule needs, with their states, and return the updater for an update."""
        updater = self._attach_states(updates)
        if needs_all_rows(updater.optimizer):
            self.hold_all()
        elif self.index is not None and self.count == self.shape[0]:
            with suppress(KVStoreError):
                self.hold_all()  # no index is needed any more
        self._make_states(updater)
        return nullcontext(updater)

    def all_rows_for_update(self) -> Array:
        """Return all rows, for an updater of the user that keeps its own states."""
        self.updater, self._blank_of, self._rooms = None, None, []
        weight = self.hold_all()
        self._note_changes(None, [weight])
        return weight.view()

    def _note_changes(self, rows: Ids | None, arrays: list[Array]) -> None:
        self._put_record()
        held = int(self._words[_HELD])
        before = self.shape[0] if held < 0 else held
        some = None if rows is None else rows[rows < before]
        pieces: list[tuple[Array, Array | None]] = [(self._words, None)]
        pieces += [(array, some) for array in arrays if array.ndim and array.size]
        self._handle.note_undo(pieces)
        self._put_words(self._words, self._block, self._lying)

    def _put_words(self, words: Ids, rows: Array, lying: Ids) -> None:
        held = -1 if self.index is None else self.count
        if held < 0 <= words[_HELD]:
            words[_LINEAGE] = self._next_lineage()
        words[_HELD] = 0  # no process reads the new count with the old memory
        words[_ROWS], words[_ROOM] = self._job.offset_of(rows), len(rows)
        words[_IDS], words[_IDS_ROOM] = self._job.offset_of(lying), len(lying)
        words[_HELD] = held

    def _next_lineage(self) -> int:
        return 1 + max(int(self._handle.table_words(other)[_LINEAGE]) for other in (False, True))

    def complete(self) -> None:
        """Copy states into the region that a rule has replaced by others."""
        tree = self.state_tree()
        if any(not self._job.offset_of(array) for array in arrays_of(tree) if array.size):
            self._set_tree(map_state(tree, self._bring_array))
            self._put_record()

    # ------------------------------------------------------------------------------------ the other place

    def replace_other(self, sources: list[RowSparseArray]) -> None:
        """Write the sum of `sources` to the place that is not in use."""
        with self.lock:
            ids, maps, datas = merge_rows(sources)
            rows = self._allocate_other(ids)
            cpu.reduce_rows(datas, maps, rows[: len(ids)])

    def assign_other(self, value: RowSparseArray, updates: JobUpdater) -> None:
        """Write `value` to the place that is not in use; if rows have states, they keep their order."""
        with self.lock:
            self.read_numbers()
            try:
                self._assign_other(value, updates)
            finally:
                self._outgrown.clear()
                self._taken.clear()
                self.forget_numbers()

    def _assign_other(self, value: RowSparseArray, updates: JobUpdater) -> None:
        record = None if updates.updater is None else record_of(self._handle, shm.mode(self._job))
        if record is None or record["state"] is None:
            self._allocate_other(value.indices)[: len(value.indices)] = value.data
        elif "blank" in record:
            self._attach_states(updates)
            self._assign_in_order(value)
        else:  # all rows have states
            self._assign_whole(value, updates)

    def _allocate_other(self, ids: Ids) -> Array:
        """Let the other place hold the rows of `ids`; return memory for these."""
        words = self._handle.table_words(other=True)
        words[_HELD] = 0
        rows = self._reserve_rows(words, _ROOM, _ROWS, (len(ids), *self.shape[1:]), self.dtype)
        lying = self._reserve_rows(words, _IDS_ROOM, _IDS, (len(ids),), _INT64)
        self._taken.clear()  # the numbers of the other place name this memory
        lying[: len(ids)] = ids
        self._handle.blank_row(other=True)[...] = 0
        words[_LINEAGE] = self._next_lineage()
        words[_HELD] = -1 if len(ids) == self.shape[0] else len(ids)
        return rows

    def _reserve_rows(
        self, words: Ids, room: int, at: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Array:
        """Return memory of the other place for rows of that shape: its present memory, if large enough."""
        count, offset, old = shape[0], int(words[at]), int(words[room])
        before = self._handle.region_array(offset, (old, *shape[1:]), dtype)
        if offset and old >= count:
            return before
        made = self._empty_rows((max(count, 1), *shape[1:]), dtype)
        words[room] = 0  # a death here leaves no count that is too large
        words[at] = self._job.offset_of(made)
        words[room] = len(made)
        if offset:
            self._handle.free_memory(offset, before.nbytes)
        return made

    def _assign_in_order(self, value: RowSparseArray) -> None:
        """Write `value` to the place that is not in use, with rows in the order of the states."""
        assert self.index is not None
        rows = self._allocate_other(self._lying[: self.count])
        words = self._handle.table_words(other=True)
        lying = self._handle.region_array(int(words[_IDS]), (int(words[_IDS_ROOM]),), _INT64)
        rows[: self.count] = 0
        self._block, self._lying, self.blank = rows, lying, self._handle.blank_row(other=True)
        self.held[self._hold_rows(value.indices)] = value.data
        self._put_record()
        self._put_words(words, self._block, self._lying)
        if self.dtype.itemsize == 2:
            self.follow()
        self._words = words
        self._give_back()

    def _assign_whole(self, value: RowSparseArray, updates: JobUpdater) -> None:
        """Write `value` with all rows to the place that is not in use."""
        rows = self._allocate_other(np.arange(self.shape[0], dtype=np.int64))
        rows[...] = 0
        rows[value.indices] = value.data
        self._block, self.index, self.count = rows, None, self.shape[0]
        self._attach_states(updates)
        if self.dtype.itemsize == 2:
            self.follow()

    # --------------------------------------------------------------------------------------------- states

    def whole_tree(self, mode: int) -> tuple[bool, Tree]:
        """Return whether there is a state, and the state of all rows, in new arrays."""
        record = record_of(self._handle, mode)
        if record is None:
            return False, None
        tree = map_state(state_of_outline(self._handle, record["state"]), np.copy)
        if tree is None or "blank" not in record:
            return True, tree
        held = map_state(tree, lambda array: array[: self.count])
        blank = state_of_outline(self._handle, record["blank"])
        return True, self._spread_states(held, blank)

    def _attach_states(self, updates: JobUpdater) -> Updater:
        """Return the updater with the table's states, which are in the region."""
        assert updates.updater is not None
        optimizer = updates.updater.optimizer
        if self.updater is None:
            self.updater = Updater(optimizer)
        self.updater.optimizer = optimizer
        self._mode = shm.mode(self._job)
        record = record_of(self._handle, self._mode)
        if record is None:
            self._begin_anew(self.updater)
        else:
            self._set_states(self.updater, record)
        return self.updater

    def _begin_anew(self, updater: Updater) -> None:
        updater.states.pop(self.key, None)
        self._blank_of, self._rooms = None, []
        if self._handle.record_at:  # of an earlier optimizer
            self._handle.updates = 0
            updater.optimizer._index_update_count.pop(self.key, None)

    def _set_states(self, updater: Updater, record: dict[str, Any]) -> None:
        tree = state_of_outline(self._handle, record["state"])
        if "blank" not in record and tree is not None:  # of all rows
            updater.states.pop(self.key, None)
            self._rooms = []
            self.hold_all()
        else:
            self.blank_tree, self._blank_of = state_of_outline(self._handle, record.get("blank")), updater
            self._rooms = list(arrays_of(tree))
            tree = map_state(tree, lambda array: array[: self.count])
        self._set_tree(tree)

    def _make_states(self, updater: Updater) -> None:
        """Make states in the region if there are none yet."""
        if self.key in updater.states:
            return
        optimizer = updater.optimizer
        tree = optimizer.create_state_multi_precision(self.key, self.held)
        if self.index is None:
            self._set_tree(map_state(tree, self._bring_array))
            return
        self.blank_tree = map_state(
            optimizer.create_state_multi_precision(self.key, self.blank), self._bring_array
        )
        self._blank_of = updater
        self._rooms = [self._in_capacity(array) for array in arrays_of(tree)]
        rooms = iter(self._rooms)
        self._set_tree(map_state(tree, lambda _: next(rooms)[: self.count]))

    def _in_capacity(self, rows: Array) -> Array:
        room = self._new_rows(rows, max(len(self._block), 1))
        room[: len(rows)] = rows
        return room

    def _bring_array(self, array: Array) -> Array:
        """Return an array in the region: itself, or a copy."""
        if self._job.offset_of(array) or not array.size:
            return array
        there = self._empty_rows(array.shape, array.dtype)
        np.copyto(there, array)
        return there

    def _put_record(self) -> None:
        """Describe the states in the region, if the description there is of others."""
        if self.updater is None or self.key not in self.updater.states:
            return
        rooms = iter(self._rooms)
        tree = (
            self.state_tree() if self.index is None else map_state(self.state_tree(), lambda _: next(rooms))
        )
        record = {"mode": self._mode, "state": outline_state(self._job, tree)}
        if self.index is not None:
            record["blank"] = outline_state(self._job, self.blank_tree)
        text = json.dumps(record).encode()
        if text != self._handle.record()[1]:
            self._handle.set_record(text)


def _array_offsets(outline: Any) -> Iterator[int]:
    """Yield the offsets of the arrays of a description."""
    parts = outline.values() if isinstance(outline, dict) else outline if isinstance(outline, list) else ()
    if isinstance(outline, dict) and "at" in outline:
        yield outline["at"]
    for part in parts:
        yield from _array_offsets(part)


def record_of(handle: Handle, mode: int) -> dict[str, Any] | None:
    """Return the description of the states of a mode's optimizer in the region; None if there is none."""
    _, text = handle.record()
    record = json.loads(text) if text else None
    return record if record is not None and record["mode"] == mode else None


def outline_state(job: shm.Job, state: Tree) -> Any:
    """Return the description of a state in the region."""
    if isinstance(state, tuple):
        return [outline_state(job, part) for part in state]
    if state is None:
        return None
    return {"at": job.offset_of(state), "shape": list(state.shape), "dtype": state.dtype.name}


def state_of_outline(handle: Handle, outline: Any) -> Tree:
    """Return a state in the region from its description."""
    if outline is None:
        return None
    if isinstance(outline, list):
        return tuple(state_of_outline(handle, part) for part in outline)
    dtype = handle.dtype if outline["dtype"] == handle.dtype.name else np.dtype(outline["dtype"])
    return handle.region_array(outline["at"], tuple(outline["shape"]), dtype)
