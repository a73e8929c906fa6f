"""Rows of a row-sparse key on a server: only those that somebody has touched take memory.

Rows lie in the order in which they came, beside them in the same order the rows of the optimizer's states.
All others are one blank row, of which weight and states go through every update that touches absent rows: so
a table gives the numbers of one that is all there, whatever the rule does to rows without a gradient.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from ....arrays import pages
from ....arrays.grouping import Key
from ....arrays.sparse import RowSparseArray, trusted_rows
from ....errors import StateFileError
from ....kernels import cpu
from ....optimizer import SGLD, Updater
from ....optimizer.builtin import Elementwise, arrays_of
from ....optimizer.optimizer import Optimizer
from ....optimizer.optimizer import State as Tree
from ....optimizer.updater import Plan
from ...entry import Array
from ...rows import Ids, merge, merged
from ..native._native import TableRows
from ..protocol.optimizer_states import NOTHING, PartState, works_by_rows
from ..protocol.payloads import as_bytes
from ..transport.native._streams import GatheredRows
from .optimizer import OptimizerVersion, State, check_form, refuse_parts
from .payload import not_kept
from .row_index import NONE, Pair, RowIndex

_ROOM = 1.25  # memory for so many times the rows that are there
_LARGE = 2 * 1024 * 1024  # from so many bytes on,
_ADDRESSES = 16  # addresses for so many times the rows
_MAP_NORESERVE = 0x4000  # in mmap since some Python only


class _Kept(NamedTuple):
    """What a table was after a round: all, with the blank row, or the rows that the next one changed."""

    round: int
    ids: Ids
    rows: Array
    blank: Array | None


_NOTHING_KEPT = _Kept(-1, np.empty(0, np.int64), np.empty(0), None)


class Table(TableRows):
    """A slice of a row-sparse key, which begins with row `start` of the whole table; `shape` is the slice's.

    `whole`: the slice is all of the key. Row ids count from the slice's first row.
    """

    def __init__(
        self, key: Key, start: int, shape: tuple[int, ...], dtype: np.dtype[Any], whole: bool
    ) -> None:
        self.key, self.start, self.shape, self.dtype, self.whole = key, start, shape, dtype, whole
        self.state = State()
        #: Where the rows that are held lie; None: all, in their order.
        self.index: RowIndex | None = RowIndex(*NONE)
        self.count = 0
        #: What an absent row is.
        self.blank: Array = np.zeros((1, *shape[1:]), dtype)
        self.blank_tree: Tree = None
        self._blank_generation = -1  # that `blank_tree` belongs to; -1: none
        self._block: Array = np.empty((0, *shape[1:]), dtype)
        self._rooms: list[Array] = []
        self._keeps = -1  # round before the one that is being done, if what it left is to be kept
        self._before = _NOTHING_KEPT
        self._kept_room: Array = self._block  # for the rows that an update changes, as they were
        self._ids_room: Ids = np.empty(0, np.int64)  # for their ids, where `row_rounds.h` does the round,
        self._maps_room: Ids = np.empty((0, 0), np.int64)  # and where they are in each part

    @property
    def held(self) -> Array:
        """Rows in the order in which they lie."""
        return self._block[: self.count]

    @property
    def nbytes(self) -> int:
        """Memory of the rows and their ids, in bytes."""
        return int(self.held.nbytes) + (0 if self.index is None else self.index.nbytes)

    # --------------------------------------------------------------------------------------------- values

    def assign(self, value: RowSparseArray) -> None:
        """Become `value`; states of rows stay."""
        self.hide()
        if self.tree() is None:
            self._take_over(value.indices.copy(), pages.copy(value.data))
            return
        self.blank[...] = 0
        self.held[...] = 0
        positions = self._hold(value.indices)
        self.held[positions] = value.data

    def assign_all(self, rows: Array) -> None:
        """Become a table with all rows."""
        self.fill()
        np.copyto(self.held, rows.reshape(self.shape))

    def read(self, ids: Ids | None) -> tuple[Ids, Array]:
        """Return rows, of which ids ascend, as new arrays; None: all that are held."""
        if ids is None:
            ids = (
                np.arange(self.shape[0], dtype=np.int64) if self.index is None else self.index.all()[0].copy()
            )
        positions = self._positions(ids)
        rows = np.empty((len(ids), *self.shape[1:]), self.dtype)
        cpu.reduce_rows([self.held], [positions], rows)
        if self.blank.view(np.uint8).any():
            rows[positions < 0] = self.blank[0]
        return ids, rows

    def gathered(self, ids: Ids) -> GatheredRows | None:
        """Return rows, of which ids ascend, to be sent before they change; None: they have to be read."""
        if self.blank.view(np.uint8).any() or not self.blank.nbytes or not self.count:
            return None
        return GatheredRows(as_bytes(self.held), self.blank.nbytes, self._positions(ids))

    def past(self, round: int, ids: Ids | None) -> tuple[Ids, Array]:
        """Do the same as `read` with the table as it was after a round; KVStoreError: that is not kept."""
        self._note_rounds()
        kept = self._before
        if kept.round != round or self._keeps != round:
            raise not_kept(self.key, round)
        if kept.blank is None:  # only some rows have changed since then
            ids, rows = self.read(ids)
        elif ids is None:
            return kept.ids, kept.rows
        else:
            rows = np.repeat(kept.blank, len(ids), axis=0)
        _, there, where = np.intersect1d(ids, kept.ids, assume_unique=True, return_indices=True)
        rows[there] = kept.rows[where]
        return ids, rows

    def hide(self) -> None:
        """Leave reads and updates to this class."""
        self._note_rounds()
        super().hide()

    def _note_rounds(self) -> None:
        """Know what rounds have kept that were done without Python."""
        found = self.take_kept()
        if found is None:
            return
        self._keeps, n = found
        self._before = _NOTHING_KEPT
        if self._keeps >= 0:
            self._before = _Kept(self._keeps, self._ids_room[:n], self._kept_room[:n], None)

    def _keep(self, ids: Ids | None) -> None:
        """Keep these rows as they are before a round, or all; without memory for them there is nothing."""
        if self._keeps >= 0:
            self._before = _NOTHING_KEPT
            with suppress(MemoryError):
                self._before = _Kept(self._keeps, *self.read(ids), self.blank.copy() if ids is None else None)

    def _room_to_keep(self, n: int) -> Array | None:
        """Memory for `n` rows as they are before an update; None: they are not kept, or there is none."""
        if self._keeps < 0:
            return None
        self._before = _NOTHING_KEPT
        if len(self._kept_room) < n:
            with suppress(MemoryError):
                self._kept_room = pages.empty((int(_ROOM * n), *self.shape[1:]), self.dtype)
        return self._kept_room[:n] if len(self._kept_room) >= n else None

    def fill(self) -> None:
        """Hold every row, in their order."""
        self.hide()
        if self.index is None:
            return
        before, tree, order = self.held, self.tree(), self.index.all()
        self._block = _spread(before, self.blank, order, self.shape[0])
        if tree is not None:
            self._set_tree(
                _mapped(lambda a, blank: _spread(a, blank, order, self.shape[0]), tree, self.blank_tree)
            )
        self.index, self.count = None, self.shape[0]

    def _take_over(self, ids: Ids, rows: Array) -> None:
        self._block, self.count = rows, len(ids)
        full = len(ids) == self.shape[0]
        self.index = None if full else RowIndex(ids, np.arange(len(ids), dtype=np.int64))
        self.blank[...] = 0

    def _positions(self, ids: Ids) -> Ids:
        """Where rows lie; -1 for absent ones."""
        return ids if self.index is None else self.index.positions(ids)

    def _hold(self, ids: Ids) -> Ids:
        """Where rows of ascending ids lie, now that absent ones are copies of the blank one."""
        positions = self._positions(ids)
        new = positions < 0
        if new.any():
            positions[new] = np.arange(self.count, self.count + int(new.sum()))
            self._add(ids[new], positions[new])
        return positions

    def _add(self, ids: Ids, positions: Ids) -> None:
        assert self.index is not None
        before, tree = self.held, self.tree()
        count = before.shape[0] + len(ids)
        self._block = _grown(self._block, before, self.blank, count)
        if tree is not None:
            rooms = iter(self._rooms)

            def grow(leaf: Array, blank: Array) -> Array:
                room = next(rooms, leaf)
                if room.ctypes.data != leaf.ctypes.data:  # another state by now
                    room = leaf
                return _grown(room, leaf, blank, count)

            grown = _mapped(grow, tree, self.blank_tree)
            self._rooms = list(arrays_of(grown))
            self._set_tree(_mapped(lambda a, _: a[:count], grown, grown))
        self.index.add(ids, positions)
        self.count = count

    @contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        """Hold no more rows than before if the body raises."""
        index, count = self.index, self.count
        mark = None if index is None else index.mark()
        updater, tree = self.state.updater, self.tree()
        try:
            yield
        except BaseException:
            self.index, self.count = index, count
            if index is not None and mark is not None:
                index.go_back(mark)
            if tree is not None and self.state.updater is updater:
                self._set_tree(tree)
            elif self.state.updater is not None:  # made by the update that failed
                self.state.updater.states.pop(self.key, None)
            raise

    # --------------------------------------------------------------------------------------------- states

    def tree(self) -> Tree:
        """Return the optimizer's state of the rows held; None also where there is none yet."""
        updater = self.state.updater
        return None if updater is None else updater.states.get(self.key)

    def _set_tree(self, tree: Tree) -> None:
        assert self.state.updater is not None
        self.state.updater.states[self.key] = tree

    def part_state(self, settings: OptimizerVersion) -> PartState:
        """Return the state of this generation."""
        state = self.state
        updater = state.current(settings)
        if updater is None or self.key not in updater.states:
            return NOTHING
        tree, counts = updater.states[self.key], (state.updates, state.num_update)
        if self.index is None:
            return PartState(True, tree, None, None, *counts)
        return PartState(True, tree, self.ids_as_they_lie(), self.blank_tree, *counts)

    def ids_as_they_lie(self) -> Ids:
        """Return the ids of the rows held, in the order in which they lie."""
        assert self.index is not None
        ids, where = self.index.all()
        lying = np.empty(self.count, np.int64)
        lying[where] = ids
        return lying

    def put_state(self, given: PartState, settings: OptimizerVersion) -> None:
        """Take over the state of a generation; every row that it is of is held from now on."""
        self.hide()
        state, optimizer = self.state, settings.optimizer
        assert optimizer is not None
        if given.known and given.ids is not None and not cpu.ascending_ids(np.sort(given.ids), self.shape[0]):
            raise StateFileError(f"the state of key {self.key!r} is of rows that its slice does not have")
        if given.known:
            self._check_state(given, optimizer)
        state.updater, state.generation = Updater(optimizer), settings.generation
        state.keep((given.updates, given.num_update))
        self._blank_generation = -1  # what absent rows had is over, too
        if not given.known:
            return
        if given.ids is None:
            self.fill()
            self._set_tree(given.tree)
            return
        order = np.argsort(given.ids)
        positions = self._hold(given.ids[order])
        self.blank_tree, self._blank_generation = given.blank, settings.generation
        made = _mapped(lambda _, blank: np.repeat(blank, self.count, axis=0), given.tree, given.blank)
        for there, part in zip(arrays_of(made), arrays_of(given.tree), strict=True):
            there[positions] = part[order]
        self._set_tree(made)

    def _check_state(self, given: PartState, optimizer: Optimizer) -> None:
        n = self.shape[0] if given.ids is None else len(given.ids)
        one = optimizer.create_state_multi_precision(self.key, self.blank)
        check_form(self.key, given.tree, one, n)
        if given.ids is not None:
            check_form(self.key, given.blank, one, 1)

    def has_blank_tree(self) -> bool:
        """Whether absent rows have a state of the present generation."""
        return (
            self.index is not None
            and self.tree() is not None
            and self._blank_generation == self.state.generation
        )

    def take_back(self, ids: Ids | None, rows: Array, blank: Array, blank_tree: Tree) -> None:
        """Become what a snapshot told of; `ids` are those of `rows`, as they lie."""
        self.hide()
        self._block, self.count = pages.copy(rows), len(rows)
        np.copyto(self.blank, blank)
        self.blank_tree = blank_tree
        self._blank_generation = -1 if blank_tree is None else self.state.generation
        if ids is None:
            self.index = None
            return
        where = np.argsort(ids)
        self.index = RowIndex(ids[where], where)
        if len(ids) != len(rows) or not cpu.ascending_ids(ids[where], self.shape[0]):
            raise StateFileError(f"the rows of key {self.key!r} in a snapshot do not fit their ids")

    def follow(self) -> None:
        """Bring float32 copies of 16-bit rows in line with rows that were set from outside."""
        updater, tree = self.state.updater, self.tree()
        if updater is None or tree is None:
            return
        updater.follow(self.key, self.held)
        if self.index is not None:
            blank = Updater(updater.optimizer)
            blank.states[self.key] = self.blank_tree
            blank.follow(self.key, self.blank)

    def _blank_for(self, optimizer: Optimizer) -> None:
        if self._blank_generation != self.state.generation:
            self.blank_tree = optimizer.create_state_multi_precision(self.key, self.blank)
            self._blank_generation = self.state.generation

    def _plan(self, updater: Updater) -> Plan:
        """Plan an update of the rows held."""
        self._blank_for(updater.optimizer)
        kind, params, master, states = updater.plan(self.key, self.held)
        if isinstance(updater.optimizer, SGLD):
            params = (*params, self.start * int(np.prod(self.shape[1:], dtype=np.int64)))
        return kind, params, master, states

    # ------------------------------------------------------------------------------------------ rounds

    def apply(
        self,
        sources: list[RowSparseArray | Array],
        settings: OptimizerVersion,
        clock: int,
        keeps: int = -1,
        version: int = 0,
    ) -> None:
        """Replace by the sum of sources, or update with it; if that fails the table is as before.

        `keeps` is the round before this one, if what it left is to be kept for `past`. `version` of the
        settings is the newest that a round of the slice has had.
        """
        self.hide()
        self._keeps = keeps
        by_rows = settings.optimizer is not None and settings.optimizer.fused and _lazy(settings.optimizer)
        if not by_rows or not all(isinstance(source, RowSparseArray) for source in sources):
            self._keep(None)
        sparse = [source for source in sources if isinstance(source, RowSparseArray)]
        if len(sparse) < len(sources):
            self._apply_dense([_as_dense(source) for source in sources], settings, clock)
        elif settings.optimizer is None:
            self._replace(sparse)
        elif not settings.optimizer.fused:
            self._call(merged(sparse), settings, clock)
        else:
            self._update(sparse, settings, clock, version)

    def _replace(self, sources: list[RowSparseArray]) -> None:
        ids, maps, datas = merge(sources)
        fits = len(self._block) >= len(ids)
        room = self._block if fits else pages.empty((len(ids), *self.shape[1:]), self.dtype)
        cpu.reduce_rows(datas, maps, room[: len(ids)])
        self._take_over(ids, room)
        self.state.updater = None

    def _update(
        self, sources: list[RowSparseArray], settings: OptimizerVersion, clock: int, version: int
    ) -> None:
        assert settings.optimizer is not None
        if isinstance(settings.optimizer, SGLD):
            self.fill()  # every element has its own noise
        if not _lazy(settings.optimizer):
            self._update_all(merged(sources), settings, clock)
            return
        ids, maps, datas = merge(sources)
        before = self._room_to_keep(sum(len(source.indices) for source in sources))
        before = None if before is None else before[: len(ids)]
        try:
            with self._unless_it_fails(), self.state.counting(settings, self.key, clock) as updater:
                positions = self._hold(ids)
                kind, params, master, states = self._plan(updater)
                cpu.update_rows(kind, params, datas, maps, positions, self.held, master, states, before)
        except BaseException:
            self._keep(ids)  # nothing has changed
            raise
        if before is not None:
            self._before = _Kept(self._keeps, ids, before, None)
        if master is None:
            self._show(sources, settings, version, (kind, params, states))

    def _show(
        self,
        sources: list[RowSparseArray],
        settings: OptimizerVersion,
        version: int,
        plan: tuple[int, tuple[float, ...], tuple[Array, ...]],
    ) -> None:
        """Have rounds like this one done without Python, where all rows are held."""
        optimizer = settings.optimizer
        if self.index is not None or self.state.updates < 1:
            return
        if not isinstance(optimizer, Elementwise) or not optimizer.is_repeated():
            return
        n = sum(len(source.indices) for source in sources)
        if len(self._ids_room) < n or len(self._maps_room) < len(sources):
            with suppress(MemoryError):
                room = max(len(self._ids_room), int(_ROOM * n))
                self._maps_room = np.empty((len(sources), room), np.int64)
                self._ids_room = np.empty(room, np.int64)
        kept = self._kept_room if len(self._kept_room) else None
        number = cpu.dtype_number(self.dtype)
        self.show(
            self.held, number, self.start, *plan, self.state, version, settings.base,
            self._ids_room, self._maps_room, kept,
        )  # fmt: skip

    def _update_all(self, gradient: RowSparseArray, settings: OptimizerVersion, clock: int) -> None:
        with self._unless_it_fails(), self.state.counting(settings, self.key, clock) as updater:
            positions = self._hold(gradient.indices)
            spread = np.zeros(self.held.shape, self.dtype)
            spread[positions] = gradient.data
            kind, params, master, states = self._plan(updater)
            items: list[cpu.UpdateItem] = [(kind, params, [spread], self.held, master, states, [])]
            if self.index is not None:
                items.append(self._blank_item(updater.optimizer, kind, params))
            cpu.update(items)

    def _blank_item(self, optimizer: Optimizer, kind: int, params: tuple[float, ...]) -> Any:
        keeps = optimizer.keeps_master(self.blank)
        master, inner = self.blank_tree if keeps else (None, self.blank_tree)  # type: ignore[misc]
        nothing = np.zeros_like(self.blank)
        return kind, params, [nothing], self.blank, master, arrays_of(inner), []

    def _apply_dense(self, sources: list[Array], settings: OptimizerVersion, clock: int) -> None:
        self.fill()
        if settings.optimizer is None:
            cpu.reduce([(sources, self.held, [])])
        elif settings.optimizer.fused:
            with self.state.counting(settings, self.key, clock) as updater:
                kind, params, master, states = self._plan(updater)
                cpu.update([(kind, params, sources, self.held, master, states, [])])
        else:
            total = pages.empty(self.shape, self.dtype)
            cpu.reduce([(sources, total, [])])
            self._call(total, settings, clock)

    def _call(self, gradient: Array | RowSparseArray, settings: OptimizerVersion, clock: int) -> None:
        """Let a rule in Python work on the whole table, or, where it needs no more, on the rows held."""
        if not works_by_rows(settings.optimizer):
            if not self.whole:
                refuse_parts(settings.optimizer, self.key)
            self.fill()
        with self._unless_it_fails(), self.state.counting(settings, self.key, clock) as updater:
            rows = None
            if isinstance(gradient, RowSparseArray):
                rows = self._hold(gradient.indices)
                gradient = trusted_rows(gradient.data, rows, self.held.shape)
            if self.index is not None:
                self._blank_for(updater.optimizer)
            changes = [self.held, *arrays_of(self.tree())]
            with undone(changes, rows if works_by_rows(settings.optimizer) else None):
                updater(self.key, gradient, self.held)


def _lazy(optimizer: Optimizer) -> bool:
    """Whether an update changes no other rows than those that have a gradient."""
    return optimizer.sparse_mode(True) != "dense"


def _as_dense(source: RowSparseArray | Array) -> Array:
    return source.todense() if isinstance(source, RowSparseArray) else source


@contextmanager
def undone(arrays: list[Array], rows: Ids | None = None) -> Iterator[None]:
    """Put arrays, or these rows of them, back if the body raises."""
    before = [array.copy() if rows is None else array[rows] for array in arrays]
    try:
        yield
    except BaseException:
        for array, old in zip(arrays, before, strict=True):
            array[... if rows is None else rows] = old
        raise


def _mapped(change: Callable[[Array, Array], Array], tree: Tree, beside: Tree) -> Tree:
    """Return a state of other arrays: `change` makes each of the array, and of the one beside it."""
    if isinstance(tree, tuple):
        assert isinstance(beside, tuple)
        return tuple(_mapped(change, part, other) for part, other in zip(tree, beside, strict=True))
    if tree is None:
        return None
    assert isinstance(beside, np.ndarray)
    return change(tree, beside)


def _grown(room: Array, rows: Array, blank: Array, count: int) -> Array:
    """Memory that begins with `rows` and goes on with copies of a blank one, at least to `count`."""
    if len(room) < count:
        room = _room(rows, count)
        room[: len(rows)] = rows
    room[len(rows) : count] = blank
    return room


def _room(rows: Array, count: int) -> Array:
    """Memory for more rows: addresses for many, of which only pages that are touched take memory.

    So a table that grows is seldom copied.
    """
    row_bytes = rows.dtype.itemsize * math.prod(rows.shape[1:])
    if count * row_bytes >= _LARGE:
        n = _ADDRESSES * count
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        with suppress(OSError, ValueError, OverflowError):  # a limit on addresses
            memory = mmap.mmap(-1, n * row_bytes, flags=flags)
            memory.madvise(mmap.MADV_HUGEPAGE)
            return np.ndarray((n, *rows.shape[1:]), rows.dtype, buffer=memory)
    return pages.empty((max(count, int(_ROOM * len(rows))), *rows.shape[1:]), rows.dtype)


def _spread(rows: Array, blank: Array, order: Pair, n: int) -> Array:
    """Return a table with every row: `rows[where]` at `ids`, copies of the blank row elsewhere."""
    ids, where = order
    table = pages.empty((n, *rows.shape[1:]), rows.dtype)
    table[...] = blank
    table[ids] = rows[where]
    return table
