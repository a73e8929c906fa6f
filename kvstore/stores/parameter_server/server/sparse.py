"""Rows of a row-sparse key on a server: a `RowTable` with the settings and states of rounds.

The rows before the last round are stored for reads of the past, and usual rounds are done in C.
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
from ....optimizer.builtin import ElementwiseOptimizer, arrays_of, map_state
from ....optimizer.optimizer import Optimizer
from ....optimizer.optimizer import State as Tree
from ...entry import Array
from ...row_index import RowIndex
from ...row_table import RowTable, is_lazy, needs_all_rows
from ...rows import Ids, merge_rows, sum_rows
from ..native._native import TableRows
from ..protocol.optimizer_states import NOTHING, PartState
from ..protocol.payload_bytes import as_bytes
from ..transport.native._streams import GatheredRows
from .optimizer import OptimizerState, OptimizerVersion, check_form, refuse_parts
from .payload import not_kept

_SPARE = 1.25  # allocated rows, as a multiple of the rows that an update changes


class _KeptRows(NamedTuple):
    """The rows after a round: all, with the blank row, or only the rows that the next round changed."""

    round: int
    ids: Ids
    rows: Array
    blank: Array | None


_NOTHING_KEPT = _KeptRows(-1, np.empty(0, np.int64), np.empty(0), None)


class TableSlice(RowTable, TableRows):
    """A slice of a row-sparse key; `whole`: it is the only one."""

    def __init__(
        self, key: Key, start: int, shape: tuple[int, ...], dtype: np.dtype[Any], whole: bool
    ) -> None:
        self.state = OptimizerState()
        super().__init__(key, shape, dtype, start)
        self.whole = whole
        self._keeps = -1  # the previous round, if its rows are to be stored
        self._before = _NOTHING_KEPT
        self._kept_memory: Array = self._block  # for copies of the rows that an update changes
        self._ids_memory: Ids = np.empty(0, np.int64)  # for their ids, where `row_rounds.h` does the round,
        self._maps_memory: Ids = np.empty((0, 0), np.int64)  # and for their positions in each part
        #: A loaded state that becomes the table's with the next update, and its settings.
        self.given: tuple[OptimizerVersion, PartState] | None = None

    @property
    def updater(self) -> Updater | None:
        """The updater with the state of the rows held."""
        return self.state.updater

    @updater.setter
    def updater(self, updater: Updater | None) -> None:
        self.state.updater = updater

    # --------------------------------------------------------------------------------------------- values

    def gather_rows(self, ids: Ids) -> GatheredRows | None:
        """Return rows with ascending ids, to be sent before they change; None: use `read`."""
        if self.blank.view(np.uint8).any() or not self.blank.nbytes or not self.count:
            return None
        return GatheredRows(as_bytes(self.held), self.blank.nbytes, self._row_positions(ids))

    def past_rows(self, round: int, ids: Ids | None) -> tuple[Ids, Array]:
        """Return what `read` returned after a round; KVStoreError: it is not stored."""
        self._note_rounds()
        kept = self._before
        if kept.round != round or self._keeps != round:
            raise not_kept(self.key, round)
        if kept.blank is None:  # only these rows have changed since that round
            ids, rows = self.read(ids)
        elif ids is None:
            return kept.ids, kept.rows
        else:
            rows = np.repeat(kept.blank, len(ids), axis=0)
        _, there, where = np.intersect1d(ids, kept.ids, assume_unique=True, return_indices=True)
        rows[there] = kept.rows[where]
        return ids, rows

    def absent_row(self, round: int | None = None) -> Array | None:
        """Return the value of absent rows, after a round or now; None: zeros, or no row is absent."""
        blank = self.blank if round is None or self._before.blank is None else self._before.blank
        return None if self.index is None or not blank.view(np.uint8).any() else blank

    def hide(self) -> None:
        """Leave reads and updates to this class, and not to C."""
        self._note_rounds()
        TableRows.hide(self)

    def _note_rounds(self) -> None:
        """Read which rows rounds in C have stored."""
        found = self.take_kept()
        if found is None:
            return
        self._keeps, n = found
        self._before = _NOTHING_KEPT
        if self._keeps >= 0:
            self._before = _KeptRows(self._keeps, self._ids_memory[:n], self._kept_memory[:n], None)

    def _keep_copy(self, ids: Ids | None) -> None:
        """Copy these rows before a round, or all; without memory for it there is no copy."""
        if self._keeps >= 0:
            self._before = _NOTHING_KEPT
            with suppress(MemoryError):
                self._before = _KeptRows(
                    self._keeps, *self.read(ids), self.blank.copy() if ids is None else None
                )

    def _memory_for_copies(self, n: int) -> Array | None:
        """Return memory for copies of `n` rows; None: they are not to be stored, or no memory."""
        if self._keeps < 0:
            return None
        self._before = _NOTHING_KEPT
        if len(self._kept_memory) < n:
            with suppress(MemoryError):
                self._kept_memory = pages.empty((int(_SPARE * n), *self.shape[1:]), self.dtype)
        return self._kept_memory[:n] if len(self._kept_memory) >= n else None

    # --------------------------------------------------------------------------------------------- states

    def part_state(self, settings: OptimizerVersion) -> PartState:
        """Return the state of this generation."""
        state = self.state
        if self.given is not None and self.given[0].generation == settings.generation:
            return self.given[1]
        updater = state.current_updater(settings)
        if updater is None or self.key not in updater.states:
            return NOTHING
        tree, counts = updater.states[self.key], (state.updates, state.num_update)
        if self.index is None:
            return PartState(True, tree, None, None, *counts)
        return PartState(True, tree, self.ids_as_they_lie(), self.blank_tree, *counts)

    def put_state(self, given: PartState, settings: OptimizerVersion) -> None:
        """Replace the state of a generation, from the next update on: it has every row of the state."""
        self.hide()
        optimizer = settings.optimizer
        assert optimizer is not None
        if given.known and given.ids is not None and not cpu.ascending_ids(np.sort(given.ids), self.shape[0]):
            raise StateFileError(f"the state of key {self.key!r} is of rows that its slice does not have")
        if given.known:
            self._check_state(given, optimizer)
        self.given = settings, given

    def follow(self) -> None:
        """Set float32 copies of 16-bit rows, also loaded ones, to rows that were assigned."""
        if self.given is not None:
            self._take_given(self.given[0])
        super().follow()

    def drop_old_states(self, settings: OptimizerVersion) -> None:
        """Keep the states of these settings only, which can be loaded ones."""
        self.hide()
        self._take_given(settings)
        if self.state.current_updater(settings) is None:
            self.updater = self._blank_of = self.blank_tree = None

    def _take_given(self, settings: OptimizerVersion) -> None:
        """Set the state that `put_state` was given, before an update of that generation."""
        found, self.given = self.given, None
        if found is None or found[0].generation != settings.generation:
            return
        given = found[1]
        updater = self.state.restart_counts(settings, given.updates, given.num_update)
        self._blank_of = None  # the state of absent rows is replaced, too
        if not given.known:
            return
        if given.ids is None:
            self.hold_all()
            self._set_tree(given.tree)
            return
        order = np.argsort(given.ids)
        positions = self._hold_rows(given.ids[order])
        self.blank_tree, self._blank_of = given.blank, updater
        made = map_state(given.blank, lambda blank: np.repeat(blank, self.count, axis=0))
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
        """Return whether absent rows have a state of the present generation."""
        return self.index is not None and self.state_tree() is not None and self._blank_of is self.updater

    def take_back(self, ids: Ids | None, rows: Array, blank: Array, blank_tree: Tree) -> None:
        """Restore the table from a snapshot; `ids` are those of `rows`, in the order of storage."""
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

    def apply_sources(
        self,
        sources: list[RowSparseArray | Array],
        settings: OptimizerVersion,
        clock: int,
        keeps: int = -1,
        version: int = 0,
    ) -> None:
        """Replace rows by the sum of sources, or update them; a failure leaves the table unchanged.

        `keeps` is the previous round, if its rows are to be stored for `past_rows`. `version` of the settings
        is the newest that a round of the slice has used.
        """
        self.hide()
        self._take_given(settings)
        self._keeps = keeps
        by_rows = settings.optimizer is not None and settings.optimizer.fused and is_lazy(settings.optimizer)
        if not by_rows or not all(isinstance(source, RowSparseArray) for source in sources):
            self._keep_copy(None)
        sparse = [source for source in sources if isinstance(source, RowSparseArray)]
        if len(sparse) < len(sources):
            self._apply_dense([_as_dense(source) for source in sources], settings, clock)
        elif settings.optimizer is None:
            self.replace(sparse, merge_rows(sparse))
        elif not settings.optimizer.fused:
            self._call_rule(sum_rows(sparse), settings, clock)
        else:
            self._update_rows(sparse, settings, clock, version)

    def _update_rows(
        self, sources: list[RowSparseArray], settings: OptimizerVersion, clock: int, version: int
    ) -> None:
        assert settings.optimizer is not None
        if needs_all_rows(settings.optimizer):
            self.hold_all()
        lent = self.state.count_update(settings, self.key, clock)
        if not is_lazy(settings.optimizer):
            self.update_all(sum_rows(sources), lent)
            return
        parts = merge_rows(sources)
        ids, were_all_held = parts[0], self.index is None
        before = self._memory_for_copies(sum(len(source.indices) for source in sources))
        before = None if before is None else before[: len(ids)]
        try:
            kind, params, master, states = self.update(parts, lent, before)
        except BaseException:
            self._keep_copy(ids)  # before any change
            raise
        if before is not None:
            self._before = _KeptRows(self._keeps, ids.copy(), before, None)
        if master is None and were_all_held:  # else the update has moved the states, and the plan is invalid
            self._show_to_c(sources, settings, version, (kind, params, states))

    def _show_to_c(
        self,
        sources: list[RowSparseArray],
        settings: OptimizerVersion,
        version: int,
        plan: tuple[int, tuple[float, ...], tuple[Array, ...]],
    ) -> None:
        """Have C do such rounds, where all rows are held."""
        optimizer = settings.optimizer
        if self.index is not None or self.state.updates < 1:
            return
        if not isinstance(optimizer, ElementwiseOptimizer) or not optimizer.is_repeated():
            return
        n = sum(len(source.indices) for source in sources)
        if len(self._ids_memory) < n or len(self._maps_memory) < len(sources):
            with suppress(MemoryError):
                count = max(len(self._ids_memory), int(_SPARE * n))
                self._maps_memory = np.empty((len(sources), count), np.int64)
                self._ids_memory = np.empty(count, np.int64)
        kept = self._kept_memory if len(self._kept_memory) else None
        number = cpu.dtype_number(self.dtype)
        self.show(
            self.held, number, self.start, *plan, self.state, version, settings.epoch,
            self._ids_memory, self._maps_memory, kept,
        )  # fmt: skip

    def _apply_dense(self, sources: list[Array], settings: OptimizerVersion, clock: int) -> None:
        self.hold_all()
        if settings.optimizer is None:
            cpu.reduce([(sources, self.held, [])])
        elif settings.optimizer.fused:
            self.update_dense(sources, self.state.count_update(settings, self.key, clock))
        else:
            total = pages.empty(self.shape, self.dtype)
            cpu.reduce([(sources, total, [])])
            self._call_rule(total, settings, clock)

    def _call_rule(self, gradient: Array | RowSparseArray, settings: OptimizerVersion, clock: int) -> None:
        """Have a rule in Python update the whole table, or the rows held where it needs no others."""
        assert settings.optimizer is not None
        if needs_all_rows(settings.optimizer):
            if not self.whole:
                refuse_parts(settings.optimizer, self.key)
            self.hold_all()
        self.call_rule(gradient, self.state.count_update(settings, self.key, clock))


def _as_dense(source: RowSparseArray | Array) -> Array:
    return source.todense() if isinstance(source, RowSparseArray) else source
