"""Rows of a row-sparse key: in every store, only rows that were touched use memory.

Rows are in the order of their first touch, and the rows of the optimizer's states are in the same order. One
blank row stands for all absent rows: its weight and its states take part in every update of absent rows. So a
table gives the numbers of a dense key with every rule, also for rows without a gradient.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import numpy as np

from ..arrays import pages
from ..arrays.grouping import Key
from ..arrays.sparse import RowSparseArray, reserve_rows, trusted_rows
from ..errors import KVStoreError
from ..kernels import cpu
from ..optimizer import SGLD, GroupAdaGrad, Optimizer, Updater
from ..optimizer.builtin import BuiltInOptimizer, arrays_of
from ..optimizer.optimizer import State as Tree
from ..optimizer.updater import Plan
from .row_index import NONE, IdPositions, RowIndex
from .rows import Array, Ids, Merged

#: The updater for one update.
UpdaterContext = AbstractContextManager[Updater]

_ROOM = 1.25  # allocated rows per row held
_LARGE = 2 * 1024 * 1024  # from this many bytes on,
_ADDRESSES = 16  # reserved addresses per row held
_MAP_NORESERVE = 0x4000  # in mmap since a later Python


class RowTable:
    """Rows of a key, or of a slice that begins with row `start` of the key; `shape` is the slice's.

    Row ids count from the slice's first row.
    """

    def __init__(self, key: Key, shape: tuple[int, ...], dtype: np.dtype[Any], start: int = 0) -> None:
        self.key, self.start, self.shape, self.dtype = key, start, shape, dtype
        #: The updater with the optimizer's state of the rows held.
        self.updater: Updater | None = None
        #: The positions of the rows held; None: all rows, in their order.
        self.index: RowIndex | None = RowIndex(*NONE)
        self.count = 0
        #: The contents of an absent row.
        self.blank: Array = np.zeros((1, *shape[1:]), dtype)
        self.blank_tree: Tree = None
        self._blank_of: Updater | None = None  # the updater of `blank_tree`
        self._block: Array = np.empty((0, *shape[1:]), dtype)
        self._rooms: list[Array] = []

    @property
    def held(self) -> Array:
        """The rows held, in the order of their positions."""
        return self._block[: self.count]

    @property
    def nbytes(self) -> int:
        """Memory of the rows and their ids, in bytes."""
        return int(self.held.nbytes) + (0 if self.index is None else self.index.nbytes)

    # Hooks for a store; they do nothing here.

    def hide(self) -> None:
        """Let this class handle reads and updates; called before any change."""

    def _note_changes(self, rows: Ids | None, arrays: list[Array]) -> None:
        """Record that an update is about to change arrays, or their rows at the positions `rows`."""

    def _new_rows(self, like: Array, count: int) -> Array:
        """Return memory for at least `count` rows like those of `like`."""
        return _row_capacity(like, count)

    def _new_whole(self, like: Array) -> Array:
        """Return memory for all rows."""
        return pages.empty((self.shape[0], *like.shape[1:]), like.dtype)

    # --------------------------------------------------------------------------------------------- values

    def assign(self, value: RowSparseArray) -> None:
        """Replace the rows by `value`; states of rows stay."""
        self.hide()
        if self.state_tree() is None:
            self._set_rows(value.indices.copy(), pages.copy(value.data))
            return
        self.blank[...] = 0
        self.held[...] = 0
        positions = self._hold_rows(value.indices)
        self.held[positions] = value.data

    def assign_all(self, rows: Array) -> None:
        """Hold all rows, with these values."""
        self.hold_all()
        np.copyto(self.held, rows.reshape(self.shape))

    def read(self, ids: Ids | None) -> tuple[Ids, Array]:
        """Return rows of ascending ids as new arrays; None: all rows held."""
        if ids is None:
            ids = self._all_ids()
        rows = np.empty((len(ids), *self.shape[1:]), self.dtype)
        self._gather_rows(ids, rows)
        return ids, rows

    def copy_rows(self, out: RowSparseArray, ids: Ids | None) -> None:
        """Write rows of ascending ids to `out`; None: all rows that can differ from zero."""
        if ids is None:
            self.show_all()
            ids = self._all_ids()
        block = reserve_rows(out, len(ids))
        if block.dtype == self.dtype:
            self._gather_rows(ids, block)
        else:
            np.copyto(block, self.read(ids)[1], casting="unsafe")
        out.data, out.indices = block, ids

    def copy_dense(self, out: Array) -> None:
        """Write the table to an array of its shape, of any type."""
        with np.errstate(all="ignore"):
            if self.index is None:
                np.copyto(out, self.held, casting="unsafe")
                return
            ids, where = self.index.all_ids()
            np.copyto(out, self.blank, casting="unsafe")
            out[ids] = self.held[where].astype(out.dtype, copy=False)

    def view(self) -> RowSparseArray:
        """Return the rows held, read-only: live if all are, else as copies."""
        self.show_all()
        ids, data = (self._all_ids(), self.held.view()) if self.index is None else self.read(None)
        data.flags.writeable = ids.flags.writeable = False
        return trusted_rows(data, ids, self.shape)

    def show_all(self) -> None:
        """Hold every row if an absent one is not zero."""
        if self.index is not None and self.blank.astype(bool).any():
            self.hold_all()

    def hold_all(self) -> Array:
        """Hold every row, in their order, and return the table.

        KVStoreError: there is no memory for that.
        """
        self.hide()
        if self.index is None:
            return self.held
        try:
            self._fill_rows(self.index.all_ids())
        except (MemoryError, OverflowError) as error:
            raise KVStoreError(self._too_large()) from error
        return self.held

    def _fill_rows(self, order: IdPositions) -> None:
        before, tree = self.held, self.state_tree()
        block = spread_rows(before, self.blank, order, self._new_whole(before))
        if tree is not None:
            self._blank_for(self.updater)
            self._set_tree(
                _map_trees(
                    lambda a, blank: spread_rows(a, blank, order, self._new_whole(a)), tree, self.blank_tree
                )
            )
        self._block, self.index, self.count = block, None, self.shape[0]
        self._rooms = []

    def _too_large(self) -> str:
        nbytes = self.dtype.itemsize * math.prod(self.shape)
        return (
            f"key {self.key!r} holds {self.count} of {self.shape[0]} rows, and this needs all of them: "
            f"{nbytes:.3g} bytes, for which there is no memory. Push row-sparse gradients, read with "
            "row_sparse_pull, and use an optimizer that updates single rows (see the page on sparse tables)"
        )

    def _all_ids(self) -> Ids:
        """Return the ids of the rows held, ascending, as a new array."""
        if self.index is None:
            return np.arange(self.shape[0], dtype=np.int64)
        return self.index.all_ids()[0].copy()

    def _gather_rows(self, ids: Ids, rows: Array) -> None:
        positions = self._row_positions(ids)
        every = self.index is None and len(ids) == self.count
        cpu.reduce_rows([self.held], [None if every else positions], rows)
        if self.index is not None and self.blank.view(np.uint8).any():
            rows[positions < 0] = self.blank[0]

    def _set_rows(self, ids: Ids, rows: Array) -> None:
        self._block, self.count = rows, len(ids)
        full = len(ids) == self.shape[0]
        self.index = None if full else RowIndex(ids, np.arange(len(ids), dtype=np.int64))
        self.blank[...] = 0

    def _row_positions(self, ids: Ids) -> Ids:
        """Return the positions of rows; -1 for absent ones."""
        return ids if self.index is None else self.index.positions(ids)

    def _hold_rows(self, ids: Ids) -> Ids:
        """Return the positions of rows of ascending ids; absent ones are added as copies of the blank row."""
        positions = self._row_positions(ids)
        if self.index is not None and (new := positions < 0).any():
            positions[new] = np.arange(self.count, self.count + int(new.sum()))
            self._add_rows(ids[new], positions[new])
        return positions

    def _add_rows(self, ids: Ids, positions: Ids) -> None:
        assert self.index is not None
        before, tree = self.held, self.state_tree()
        count = before.shape[0] + len(ids)
        self._block = self._grow_memory(self._block, before, self.blank, count)
        if tree is not None:
            rooms = iter(self._rooms)

            def grow(leaf: Array, blank: Array) -> Array:
                room = next(rooms, leaf)
                if room.ctypes.data != leaf.ctypes.data:  # the state was replaced
                    room = leaf
                return self._grow_memory(room, leaf, blank, count)

            grown = _map_trees(grow, tree, self.blank_tree)
            self._rooms = list(arrays_of(grown))
            self._set_tree(_map_trees(lambda a, _: a[:count], grown, grown))
        self.index.add(ids, positions)
        self.count = count

    def _grow_memory(self, room: Array, rows: Array, blank: Array, count: int) -> Array:
        """Return memory that begins with `rows`, with copies of the blank row after them, up to `count`."""
        if len(room) < count:
            room = self._new_rows(rows, count)
            room[: len(rows)] = rows
        room[len(rows) : count] = blank
        return room

    @contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        """Hold no more rows than before if the body raises."""
        index, count = self.index, self.count
        mark = None if index is None else index.mark()
        updater, tree = self.updater, self.state_tree()
        try:
            yield
        except BaseException:
            self.index, self.count = index, count
            if index is not None and mark is not None:
                index.restore_mark(mark)
            if tree is not None and self.updater is updater:
                self._set_tree(tree)
            elif self.updater is not None:  # made by the update that failed
                self.updater.states.pop(self.key, None)
            raise

    # --------------------------------------------------------------------------------------------- states

    def state_tree(self) -> Tree:
        """Return the optimizer's state of the rows held; None also if there is none yet."""
        return None if self.updater is None else self.updater.states.get(self.key)

    def _spread_states(self, tree: Tree, blank: Tree) -> Tree:
        """Return the state of all rows, in new arrays, from that of the rows held and that of a blank row.

        KVStoreError: there is no memory for that.
        """
        assert self.index is not None
        try:
            return spread_tree(tree, blank, self.index.all_ids(), self.shape[0])
        except (MemoryError, OverflowError) as error:
            raise KVStoreError(
                f"the states of table {self.key!r} with all its {self.shape[0]} rows do not fit the memory "
                "of this process"
            ) from error

    def _set_tree(self, tree: Tree) -> None:
        assert self.updater is not None
        self.updater.states[self.key] = tree

    def ids_as_they_lie(self) -> Ids:
        """Return the ids of the rows held, in the order of their positions."""
        assert self.index is not None
        ids, where = self.index.all_ids()
        lying = np.empty(self.count, np.int64)
        lying[where] = ids
        return lying

    def follow(self) -> None:
        """Update float32 copies of 16-bit rows after a change outside of pushes."""
        updater, tree = self.updater, self.state_tree()
        if updater is None or tree is None:
            return
        updater.follow(self.key, self.held)
        if self.index is not None:
            blank = Updater(updater.optimizer)
            blank.states[self.key] = self.blank_tree
            blank.follow(self.key, self.blank)

    def _blank_for(self, updater: Updater | None) -> None:
        """Create the state of absent rows, if there is none."""
        if updater is not None and self._blank_of is not updater:
            self.blank_tree = updater.optimizer.create_state_multi_precision(self.key, self.blank)
            self._blank_of = updater

    def _plan(self, updater: Updater) -> Plan:
        """Plan an update of the rows held."""
        self._blank_for(updater)
        kind, params, master, states = updater.plan(self.key, self.held)
        if isinstance(updater.optimizer, SGLD):
            params = (*params, self.start * math.prod(self.shape[1:]))
        return kind, params, master, states

    # ------------------------------------------------------------------------------------------ updates

    def replace(self, sources: list[RowSparseArray], parts: Merged) -> None:
        """Replace the rows by the sum of `sources`, which have the rows `parts`.

        Rows in none of them are dropped.
        """
        self.hide()
        ids, maps, datas = parts
        room = self._block
        if len(room) < len(ids) or any(np.may_share_memory(room, source.data) for source in sources):
            room = pages.empty((len(ids), *self.shape[1:]), self.dtype)
        cpu.reduce_rows(datas, maps, room[: len(ids)])
        self._set_rows(ids if len(ids) == self.shape[0] else ids.copy(), room)
        self.updater = self._blank_of = self.blank_tree = None

    def update(self, parts: Merged, context: UpdaterContext, before: Array | None = None) -> Plan:
        """Update the rows of `parts`; `before` receives their previous values. If it fails, nothing changes.

        Returns the plan of the update.
        """
        self.hide()
        ids, maps, datas = parts
        with self._unless_it_fails(), context as updater:
            positions = self._hold_rows(ids)
            plan = kind, params, master, states = self._plan(updater)
            where = None if self.index is None and len(ids) == self.count else positions
            self._note_changes(where, [self.held, *states, *([] if master is None else [master])])
            cpu.update_rows(kind, params, datas, maps, where, self.held, master, states, before)
        self._order_rows()
        return plan

    def update_all(self, gradient: RowSparseArray, context: UpdaterContext) -> None:
        """Update every row; rows without a gradient get zero."""
        self.hide()
        with self._unless_it_fails(), context as updater:
            positions = self._hold_rows(gradient.indices)
            whole = self._spread_gradient(gradient, positions)
            kind, params, master, states = self._plan(updater)
            items: list[cpu.UpdateItem] = [(kind, params, [whole], self.held, master, states, [])]
            if self.index is not None:
                items.append(self._blank_item(updater.optimizer, kind, params))
            changes = [self.held, *arrays_of(self.state_tree())]
            if self.index is not None:
                changes += [self.blank, *arrays_of(self.blank_tree)]
            self._note_changes(None, changes)
            cpu.update(items)
        self._order_rows()

    def _spread_gradient(self, gradient: RowSparseArray, positions: Ids) -> Array:
        if self.index is None and len(positions) == self.count:
            return gradient.data
        whole = np.zeros(self.held.shape, self.dtype)
        whole[positions] = gradient.data
        return whole

    def _blank_item(self, optimizer: Optimizer, kind: int, params: tuple[float, ...]) -> Any:
        keeps = optimizer.keeps_master(self.blank)
        master, inner = self.blank_tree if keeps else (None, self.blank_tree)  # type: ignore[misc]
        nothing = np.zeros_like(self.blank)
        return kind, params, [nothing], self.blank, master, arrays_of(inner), []

    def update_dense(self, sources: list[Array], context: UpdaterContext) -> None:
        """Update every row by dense gradients; all rows are held."""
        with context as updater:
            kind, params, master, states = self._plan(updater)
            cpu.update([(kind, params, sources, self.held, master, states, [])])

    def call_rule(self, gradient: Array | RowSparseArray, context: UpdaterContext) -> None:
        """Call a rule in Python with the rows held, which are all if it needs them.

        If it raises, rows and states are as before.
        """
        self.hide()
        with self._unless_it_fails(), context as updater:
            rows = None
            if isinstance(gradient, RowSparseArray):
                rows = self._hold_rows(gradient.indices)
                gradient = trusted_rows(gradient.data, rows, self.held.shape)
            if self.index is not None:
                self._blank_for(updater)
            changes = [self.held, *arrays_of(self.state_tree())]
            some = rows if works_by_rows(updater.optimizer) else None
            self._note_changes(some, changes)
            with undo_on_error(changes, some):
                updater(self.key, gradient, self.held)
        self._order_rows()

    def _order_rows(self) -> None:
        """Order all rows once all are held: then no index is needed."""
        if self.index is not None and self.count == self.shape[0]:
            with suppress(KVStoreError):
                self.hold_all()


# ---------------------------------------------------------------------------------------------------- rules


def is_lazy(optimizer: Optimizer) -> bool:
    """Return whether an update changes only rows that have a gradient."""
    return optimizer.sparse_mode(True) != "dense"


def works_by_rows(optimizer: Optimizer | None) -> bool:
    """Return whether a rule that is not element-wise needs only single rows of a table."""
    return isinstance(optimizer, GroupAdaGrad) and type(optimizer).update is BuiltInOptimizer.update


def needs_all_rows(optimizer: Optimizer) -> bool:
    """Return whether an update needs all rows: each has its own noise, or the rule needs the whole table."""
    return isinstance(optimizer, SGLD) if optimizer.fused else not works_by_rows(optimizer)


# --------------------------------------------------------------------------------------------------- memory


@contextmanager
def undo_on_error(arrays: list[Array], rows: Ids | None = None) -> Iterator[None]:
    """Restore arrays, or these rows of them, if the body raises."""
    before = [array.copy() if rows is None else array[rows] for array in arrays]
    try:
        yield
    except BaseException:
        for array, old in zip(arrays, before, strict=True):
            array[... if rows is None else rows] = old
        raise


def spread_tree(tree: Tree, blank: Tree, order: IdPositions, n: int) -> Tree:
    """Return the state of all `n` rows: that of `order`, and copies of the blank one for others."""
    return _map_trees(
        lambda rows, one: spread_rows(rows, one, order, pages.empty((n, *rows.shape[1:]), rows.dtype)),
        tree,
        blank,
    )


def spread_rows(rows: Array, blank: Array, order: IdPositions, table: Array) -> Array:
    """Write every row to a table: `rows[where]` at `ids`, copies of the blank row elsewhere."""
    ids, where = order
    table[...] = blank
    table[ids] = rows[where]
    return table


def _map_trees(change: Callable[[Array, Array], Array], tree: Tree, counterpart: Tree) -> Tree:
    """Build a state: `change` of each array of `tree` and its counterpart in the other state."""
    if isinstance(tree, tuple):
        assert isinstance(counterpart, tuple)
        return tuple(_map_trees(change, part, other) for part, other in zip(tree, counterpart, strict=True))
    if tree is None:
        return None
    assert isinstance(counterpart, np.ndarray)
    return change(tree, counterpart)


def _row_capacity(rows: Array, count: int) -> Array:
    """Return memory for more rows: addresses for many, of which only touched pages use memory.

    So a table that grows is rarely copied.
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
