"""Rows of a row-sparse key on a server: a `RowTable` with the settings and states of rounds.

What a table was before a round is kept for reads of the past, and usual rounds are done without Python.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from ....arrays import pages
from ....arrays.grouping import Key
from ....arrays.sparse import RowSparseArray
from ....errors import StateFileError
from ....kernels import cpu
from ....optimizer import Updater
from ....optimizer.builtin import Elementwise, arrays_of, mapped
from ....optimizer.optimizer import Optimizer
from ....optimizer.optimizer import State as Tree
from ...entry import Array
from ...row_index import RowIndex
from ...row_table import RowTable, is_lazy, needs_all_rows
from ...rows import Ids, merge, merged
from ..native._native import TableRows
from ..protocol.optimizer_states import NOTHING, PartState
from ..protocol.payloads import as_bytes
from ..transport.native._streams import GatheredRows
from .optimizer import OptimizerVersion, State, check_form, refuse_parts
from .payload import not_kept

_ROOM = 1.25  # memory for so many times the rows that an update changes


class _Kept(NamedTuple):
    """What a table was after a round: all, with the blank row, or the rows that the next one changed."""

    round: int
    ids: Ids
    rows: Array
    blank: Array | None


_NOTHING_KEPT = _Kept(-1, np.empty(0, np.int64), np.empty(0), None)


class Table(RowTable, TableRows):
    """A slice of a row-sparse key; `whole`: it is all of the key."""

    def __init__(
        self, key: Key, start: int, shape: tuple[int, ...], dtype: np.dtype[Any], whole: bool
    ) -> None:
        self.state = State()
        super().__init__(key, shape, dtype, start)
        self.whole = whole
        self._keeps = -1  # round before the one that is being done, if what it left is to be kept
        self._before = _NOTHING_KEPT
        self._kept_room: Array = self._block  # for the rows that an update changes, as they were
        self._ids_room: Ids = np.empty(0, np.int64)  # for their ids, where `row_rounds.h` does the round,
        self._maps_room: Ids = np.empty((0, 0), np.int64)  # and where they are in each part
        #: A loaded state that is the table's from the next update on, and the settings that it belongs to.
        self.given: tuple[OptimizerVersion, PartState] | None = None

    @property
    def updater(self) -> Updater | None:
        """Has the optimizer's state of the rows held."""
        return self.state.updater

    @updater.setter
    def updater(self, updater: Updater | None) -> None:
        self.state.updater = updater

    # --------------------------------------------------------------------------------------------- values

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

    def absent(self, round: int | None = None) -> Array | None:
        """Return what absent rows are, after a round or now; None: zeros, or all rows are held."""
        blank = self.blank if round is None or self._before.blank is None else self._before.blank
        return None if self.index is None or not blank.view(np.uint8).any() else blank

    def hide(self) -> None:
        """Leave reads and updates to this class."""
        self._note_rounds()
        TableRows.hide(self)

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

    # --------------------------------------------------------------------------------------------- states

    def part_state(self, settings: OptimizerVersion) -> PartState:
        """Return the state of this generation."""
        state = self.state
        if self.given is not None and self.given[0].generation == settings.generation:
            return self.given[1]
        updater = state.current(settings)
        if updater is None or self.key not in updater.states:
            return NOTHING
        tree, counts = updater.states[self.key], (state.updates, state.num_update)
        if self.index is None:
            return PartState(True, tree, None, None, *counts)
        return PartState(True, tree, self.ids_as_they_lie(), self.blank_tree, *counts)

    def put_state(self, given: PartState, settings: OptimizerVersion) -> None:
        """Take over the state of a generation, from the next update on: it holds every row of the state."""
        self.hide()
        optimizer = settings.optimizer
        assert optimizer is not None
        if given.known and given.ids is not None and not cpu.ascending_ids(np.sort(given.ids), self.shape[0]):
            raise StateFileError(f"the state of key {self.key!r} is of rows that its slice does not have")
        if given.known:
            self._check_state(given, optimizer)
        self.given = settings, given

    def follow(self) -> None:
        """Bring float32 copies of 16-bit rows, also loaded ones, in line with rows that were set."""
        if self.given is not None:
            self._take_given(self.given[0])
        super().follow()

    def drop_old_states(self, settings: OptimizerVersion) -> None:
        """Keep the states of these settings only, which can be loaded ones."""
        self.hide()
        self._take_given(settings)
        if self.state.current(settings) is None:
            self.updater = self._blank_of = self.blank_tree = None

    def _take_given(self, settings: OptimizerVersion) -> None:
        """Become what `put_state` was given, before an update of that generation."""
        found, self.given = self.given, None
        if found is None or found[0].generation != settings.generation:
            return
        given, state = found[1], self.state
        assert settings.optimizer is not None
        state.updater, state.generation = Updater(settings.optimizer), settings.generation
        state.keep((given.updates, given.num_update))
        self._blank_of = None  # what absent rows had is over, too
        if not given.known:
            return
        if given.ids is None:
            self.fill()
            self._set_tree(given.tree)
            return
        order = np.argsort(given.ids)
        positions = self._hold(given.ids[order])
        self.blank_tree, self._blank_of = given.blank, state.updater
        made = mapped(given.blank, lambda blank: np.repeat(blank, self.count, axis=0))
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
        return self.index is not None and self.tree() is not None and self._blank_of is self.updater

    def take_back(self, ids: Ids | None, rows: Array, blank: Array, blank_tree: Tree) -> None:
        """Become what a snapshot told of; `ids` are those of `rows`, as they lie."""
        self.hide()
        self._block, self.count = pages.copy(rows), len(rows)
        np.copyto(self.blank, blank)
        self.blank_tree = blank_tree
        self._blank_of = None if blank_tree is None else self.updater
        if ids is None:
            self.index = None
            return
        where = np.argsort(ids)
        self.index = RowIndex(ids[where], where)
        if len(ids) != len(rows) or not cpu.ascending_ids(ids[where], self.shape[0]):
            raise StateFileError(f"the rows of key {self.key!r} in a snapshot do not fit their ids")

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
        self._take_given(settings)
        self._keeps = keeps
        by_rows = settings.optimizer is not None and settings.optimizer.fused and is_lazy(settings.optimizer)
        if not by_rows or not all(isinstance(source, RowSparseArray) for source in sources):
            self._keep(None)
        sparse = [source for source in sources if isinstance(source, RowSparseArray)]
        if len(sparse) < len(sources):
            self._apply_dense([_as_dense(source) for source in sources], settings, clock)
        elif settings.optimizer is None:
            self.replace(sparse, merge(sparse))
        elif not settings.optimizer.fused:
            self._call(merged(sparse), settings, clock)
        else:
            self._update(sparse, settings, clock, version)

    def _update(
        self, sources: list[RowSparseArray], settings: OptimizerVersion, clock: int, version: int
    ) -> None:
        assert settings.optimizer is not None
        if needs_all_rows(settings.optimizer):
            self.fill()
        lent = self.state.counting(settings, self.key, clock)
        if not is_lazy(settings.optimizer):
            self.update_all(merged(sources), lent)
            return
        parts = merge(sources)
        ids, were_all_held = parts[0], self.index is None
        before = self._room_to_keep(sum(len(source.indices) for source in sources))
        before = None if before is None else before[: len(ids)]
        try:
            kind, params, master, states = self.update(parts, lent, before)
        except BaseException:
            self._keep(ids)  # nothing has changed
            raise
        if before is not None:
            self._before = _Kept(self._keeps, ids.copy(), before, None)
        if master is None and were_all_held:  # else the update has moved the states: the plan names old ones
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
            self.held, number, self.start, *plan, self.state, version, settings.epoch,
            self._ids_room, self._maps_room, kept,
        )  # fmt: skip

    def _apply_dense(self, sources: list[Array], settings: OptimizerVersion, clock: int) -> None:
        self.fill()
        if settings.optimizer is None:
            cpu.reduce([(sources, self.held, [])])
        elif settings.optimizer.fused:
            self.update_dense(sources, self.state.counting(settings, self.key, clock))
        else:
            total = pages.empty(self.shape, self.dtype)
            cpu.reduce([(sources, total, [])])
            self._call(total, settings, clock)

    def _call(self, gradient: Array | RowSparseArray, settings: OptimizerVersion, clock: int) -> None:
        """Let a rule in Python work on the whole table, or, where it needs no more, on the rows held."""
        assert settings.optimizer is not None
        if needs_all_rows(settings.optimizer):
            if not self.whole:
                refuse_parts(settings.optimizer, self.key)
            self.fill()
        self.call(gradient, self.state.counting(settings, self.key, clock))


def _as_dense(source: RowSparseArray | Array) -> Array:
    return source.todense() if isinstance(source, RowSparseArray) else source
