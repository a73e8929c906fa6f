"""Row-sparse keys of the shared store: tables in the region, rounds done by the one worker that opens them.

A table has two places, as every value has, and beside each the number of rows that it holds (-1: all of them)
and their ids. Sums go to the place that is not in use; updates of rows work in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays import pages
from ...arrays.grouping import Key
from ...arrays.host import writable
from ...arrays.sparse import RowSparseArray, reserve_rows, trusted_rows
from ...kernels import cpu
from ...observe.counters import MOVING
from ..entry import Array
from ..rows import Ids, merge, merged, with_all_rows
from .native import _shared as shm

if TYPE_CHECKING:
    from .optimizer import JobUpdater

Handle = shm.Handle

_LINE = 64


class DenseTable:
    """Rows of a table, kept in memory that is reused from push to push.

    Attributes
    ----------
    shape, dtype
        Of the whole table.
    data : array
        The rows that are present, in ascending order of their ids.
    ids : int64 array or None
        Their ids; None when all rows are present, so that a row's id is its position.
    """

    __slots__ = ("_block", "data", "dtype", "ids", "shape")

    def __init__(self, value: RowSparseArray) -> None:
        self.shape, self.dtype = value.shape, value.dtype
        self._block: Array = pages.copy(value.data)
        self.ids: Ids | None = value.indices.copy()
        self.data = self._block
        self._note_if_full()

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return int(self._block.nbytes) + (0 if self.ids is None else self.ids.nbytes)

    def replace_by_sum(self, sources: list[RowSparseArray]) -> None:
        """Become the sum of `sources`, left to right in each row; rows that none of them has are gone."""
        rows, maps, datas = merge(sources)
        block = self._room(len(rows), datas)
        cpu.reduce_rows(datas, maps, block)
        self.data, self.ids = block, rows
        self._note_if_full()

    def fill(self) -> Array:
        """Make every row present, absent ones as zeros, and return the table."""
        if self.ids is not None:
            full = pages.zeros(self.shape, self.dtype)
            full[self.ids] = self.data
            self._block = self.data = full
            self.ids = None
        return self.data

    def gather(self, ids: Ids, out: RowSparseArray) -> None:
        """Fill `out` with the rows of ascending, unique `ids`; a row that is absent comes as zeros."""
        positions = ids if self.ids is None else cpu.locate_ids(self.ids, ids)
        block = reserve_rows(out, len(ids))
        self._emit([self.data], [positions], block, out, ids)

    def copy_to(self, out: RowSparseArray) -> None:
        """Fill `out` with every row that is present."""
        ids = np.arange(self.shape[0], dtype=np.int64) if self.ids is None else self.ids.copy()
        positions = np.arange(len(ids), dtype=np.int64)
        self._emit([self.data], [positions], reserve_rows(out, len(ids)), out, ids)

    def dense(self) -> Array:
        """Return the table as a new dense array, or as the live one when all rows are present."""
        if self.ids is None:
            return self.data
        full = np.zeros(self.shape, self.dtype)
        full[self.ids] = self.data
        return full

    def view(self) -> RowSparseArray:
        """Live, read-only rows."""
        ids = np.arange(self.shape[0], dtype=np.int64) if self.ids is None else self.ids.view()
        data = self.data.view()
        data.flags.writeable = ids.flags.writeable = False
        return trusted_rows(data, ids, self.shape)

    def _emit(self, datas: list[Array], maps: list[Ids], block: Array, out: RowSparseArray, ids: Ids) -> None:
        if block.dtype == self.dtype:
            cpu.reduce_rows(datas, maps, block)
        else:
            rows = np.empty(block.shape, self.dtype)
            cpu.reduce_rows(datas, maps, rows)
            np.copyto(block, rows, casting="unsafe")
        out.data, out.indices = block, ids

    def _room(self, n: int, sources: list[Array]) -> Array:
        """Memory for `n` rows: the old block where it is large enough and no source lies in it."""
        reuse = len(self._block) >= n and not any(np.may_share_memory(self._block, s) for s in sources)
        if not reuse:
            self._block = pages.empty((n, *self.shape[1:]), self.dtype)
        return self._block[:n]

    def _note_if_full(self) -> None:
        if self.ids is not None and len(self.ids) == self.shape[0]:
            self.ids = None


class SparseKeys:
    """The row-sparse keys of a job, as one process sees them."""

    def __init__(self, job: shm.Job, updater: JobUpdater) -> None:
        self._job, self._job_updater = job, updater
        # What this worker has pushed last and the time before, by parity of the round; used again.
        self._pushed: dict[tuple[Key, int], Array] = {}

    # ------------------------------------------------------------------------------------------ reading

    def table(self, handle: Handle) -> DenseTable:
        """Look at the rows in use."""
        n, ids = handle.rows()
        table = DenseTable.__new__(DenseTable)
        table.shape, table.dtype = handle.shape, handle.dtype
        table._block = handle.value()
        table.data = table._block if n < 0 else table._block[:n]
        table.ids = None if n < 0 else ids[:n]
        return table

    def view(self, handle: Handle) -> RowSparseArray:
        """Show the rows in use; a copy where they may change."""
        view = self.table(handle).view()
        return view if handle.stays else trusted_rows(view.data.copy(), view.indices.copy(), view.shape)

    def copy_to(self, handle: Handle, out: Any) -> None:
        """Fill `out`, row-sparse or dense, with all rows."""
        if isinstance(out, RowSparseArray):
            self.table(handle).copy_to(out)
            return
        array, deliver = writable(out, f"out of key {handle.key!r}")
        np.copyto(array, self.table(handle).dense(), casting="unsafe")
        if deliver is not None:
            deliver()

    # ------------------------------------------------------------------------------------------ pushing

    def arrive(self, handle: Handle, sources: list[RowSparseArray]) -> None:
        """Push the sum of `sources`: ids and rows go to memory that the others reach."""
        nbytes = sum(source.data.nbytes for source in sources)
        with shm.Phase(self._job, MOVING, handle, handle.arrived + 1, nbytes):
            total = sources[0] if len(sources) == 1 else merged(sources)
            block = self._block(handle, total)
            shm.arrive_with_rows(handle, self._job.offset_of(block), total.data.nbytes)

    def _block(self, handle: Handle, total: RowSparseArray) -> Array:
        """Copy ids and rows to memory of the region."""
        n = len(total.indices)
        start = _line_up(8 + 8 * n)
        block = self._room(handle, start + total.data.nbytes)
        block[:8].view(np.int64)[0] = n
        block[8 : 8 + 8 * n].view(np.int64)[:] = total.indices
        there = block[start : start + total.data.nbytes].view(total.dtype).reshape(total.data.shape)
        np.copyto(there, total.data)
        return block

    def _room(self, handle: Handle, nbytes: int) -> Array:
        name = (handle.key, (handle.arrived + 1) % 2)
        block = self._pushed.get(name)
        if block is None or block.nbytes < nbytes:
            block = self._pushed[name] = self._job.empty((nbytes + nbytes // 4,), np.dtype(np.uint8))
        return block

    def _source(self, handle: Handle, source: int | Array) -> RowSparseArray:
        if not isinstance(source, int):
            return with_all_rows(source)
        return rows_at(handle, source, handle.shape, handle.dtype)

    # ------------------------------------------------------------------------------------------ rounds

    def carry_out(self, handle: Handle) -> None:
        """Do the work of the round that this worker has opened."""
        sources = [self._source(handle, source) for source in shm.opened_sources(handle)]
        if shm.mode(self._job) & 1:
            self._update(handle, sources)
        elif handle.sparse:
            self._replace(handle, sources)
        else:
            total = merged(sources)
            value = handle.value(other=True)
            value[...] = 0
            value[total.indices] = total.data
            shm.close_opened(handle, True)

    def _replace(self, handle: Handle, sources: list[RowSparseArray]) -> None:
        rows, maps, datas = merge(sources)
        cpu.reduce_rows(datas, maps, handle.value(other=True)[: len(rows)])
        self._note_rows(handle, rows)
        shm.close_opened(handle, True)

    def _update(self, handle: Handle, sources: list[RowSparseArray]) -> None:
        weight, filled = self._weight(handle)
        updates = self._job_updater
        if updates.updater is None:
            handle.note_undo([(weight, None)])
            updates.apply(handle, merged(sources), weight)
            shm.close_opened(handle, filled)
            return
        with updates.counting(handle) as count:
            updates.bring_state(handle, weight)
            if updates.updater.optimizer.fused:
                self._fused(handle, sources, weight)
            else:
                handle.note_undo([(array, None) for array in (weight, *updates.state_arrays(handle))])
                updates.apply(handle, merged(sources), weight)
            updates.note_state(handle)
            shm.close_opened(handle, filled, count())

    def _fused(self, handle: Handle, sources: list[RowSparseArray], weight: Array) -> None:
        updater = self._job_updater.updater
        assert updater is not None
        rule, params, master, states = updater.plan(handle.key, weight)
        changed = (weight, *states) if master is None else (weight, master, *states)
        if updater.optimizer.sparse_mode(handle.sparse) == "dense":
            handle.note_undo([(array, None) for array in changed])
            cpu.update([(rule, params, [merged(sources).todense()], weight, master, states, [])])
            return
        rows, maps, datas = merge(sources)
        handle.note_undo([(array, rows) for array in changed])
        cpu.update_rows(rule, params, datas, maps, rows, weight, master, states)

    def _weight(self, handle: Handle) -> tuple[Array, bool]:
        """Return the dense weight, and whether it lies at the place not in use: absent rows were filled."""
        if not handle.sparse or handle.rows()[0] < 0:
            return handle.value(), False
        table, full = self.table(handle), handle.value(other=True)
        full[...] = 0
        full[table.ids] = table.data
        handle.set_rows(True, -1)
        return full, True

    def _note_rows(self, handle: Handle, rows: Ids) -> None:
        _, ids = handle.rows(other=True)
        ids[: len(rows)] = rows
        handle.set_rows(True, -1 if len(rows) == handle.shape[0] else len(rows))

    def overwrite(self, handle: Handle, value: RowSparseArray) -> None:
        """Put the rows of `value` at the place that is not in use."""
        handle.value(other=True)[: len(value.indices)] = value.data
        self._note_rows(handle, value.indices)


def rows_at(handle: Handle, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> RowSparseArray:
    """Look at rows of an array of that shape that somebody has pushed, where they lie."""
    n = int(handle.state_array(offset, (1,), np.dtype(np.int64))[0])
    ids = handle.state_array(offset + 8, (n,), np.dtype(np.int64))
    data = handle.state_array(offset + _line_up(8 + 8 * n), (n, *shape[1:]), dtype)
    return trusted_rows(data, ids, shape)


def _line_up(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE
