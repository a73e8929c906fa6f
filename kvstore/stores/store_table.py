"""A row-sparse key of a store of one process, where one updater serves all keys."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ..arrays import pages
from ..arrays.grouping import Key
from ..arrays.sparse import RowSparseArray
from ..errors import KVStoreError
from ..optimizer import Updater
from ..optimizer.optimizer import State as Tree
from .row_table import RowTable, UpdaterContext, needs_all_rows
from .rows import Array

_MISSING: Any = object()


class StoreTable(RowTable):
    """A table that keeps the states of its rows itself as long as some rows are absent.

    Once all are held, the store's updater keeps their states, as for a dense key.
    """

    def __init__(self, key: Key, value: RowSparseArray) -> None:
        super().__init__(key, value.shape, value.dtype)
        self._of: dict[Any, Tree] | None = None  # the updater's states that belong with the table's
        self.assign(value)

    def dense(self) -> Array:
        """Return the table as a dense array: the live one if all rows are held.

        KVStoreError: there is no memory for that.
        """
        if self.index is None:
            return self.held
        try:
            whole = pages.empty(self.shape, self.dtype)
        except (MemoryError, OverflowError) as error:
            raise KVStoreError(self._too_large()) from error
        self.copy_dense(whole)
        return whole

    # -------------------------------------------------------------------------------------------- states

    def updater_for(self, main: Updater) -> UpdaterContext:
        """Hold the rows that the rule needs, and return the updater for an update with it.

        KVStoreError: there is no memory for these rows.
        """
        if needs_all_rows(main.optimizer):
            self.hold_all()
        return nullcontext(self.attach(main))

    def attach(self, main: Updater) -> Updater:
        """Return the updater that has the table's states, with the settings of the store's."""
        given = main.states.get(self.key, _MISSING)
        if self.updater is None or self._of is not main.states:  # another optimizer, or states from a file
            self.updater, self._of = Updater(main.optimizer), main.states
        if given is not _MISSING and given is not self.updater.states.get(self.key, _MISSING):
            self.hold_all()  # loaded states are those of all rows
            self.updater.states[self.key] = given
        self._move_states(self.updater, main)
        self.updater.optimizer = main.optimizer
        return self.updater

    def _move_states(self, own: Updater, main: Updater) -> None:
        """Move states of all rows to the store's updater, and states of some rows to this table."""
        if self.index is not None:
            self.updater = Updater(main.optimizer) if own is main else own
        elif own is not main:
            if self.key in own.states:
                main.states[self.key] = own.states[self.key]
            self.updater = main

    def drop_old_states(self, main: Updater | None) -> None:
        """Keep the states of the store's updater only, which can be states of a file."""
        if main is not None:
            self.attach(main)
        elif self.updater is not None:
            self.updater = self._of = self._blank_of = self.blank_tree = None

    def has_own_state(self, main: Updater) -> bool:
        """Return whether there is a state, possibly None, that the store's updater does not have."""
        own = self.updater
        return own is not None and own is not main and self._of is main.states and self.key in own.states

    def whole_tree(self) -> Tree:
        """Return the state of all rows, in new arrays.

        KVStoreError: there is no memory for that.
        """
        if self.index is None:
            return self.state_tree()
        self._blank_for(self.updater)
        return self._spread_states(self.state_tree(), self.blank_tree)

    def follow_by(self, main: Updater) -> None:
        """Update float32 copies of 16-bit rows after a change outside of pushes."""
        self.attach(main)
        self.follow()
