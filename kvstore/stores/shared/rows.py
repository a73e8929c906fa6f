"""Row-sparse keys of the shared store: tables in the region, rounds done by the one worker that opens them.

A table has two places, as every value has, and beside each the number of rows that it holds (-1: all of them)
and their ids. Sums go to the place that is not in use; updates of rows work in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays.grouping import Key
from ...arrays.host import writable
from ...arrays.sparse import RowSparseArray, trusted_rows
from ...kernels import cpu
from ...observe.counters import MOVING
from ..entry import Array
from ..rows import Ids, RowTable, merge, merged, with_all_rows
from .native import _shared as shm

if TYPE_CHECKING:
    from .optimizer import JobUpdater

Handle = shm.Handle

_LINE = 64


class SparseKeys:
    """The row-sparse keys of a job, as one process sees them."""

    def __init__(self, job: shm.Job, updater: JobUpdater) -> None:
        self._job, self._job_updater = job, updater
        # What this worker has pushed last and the time before, by parity of the round; used again.
        self._pushed: dict[tuple[Key, int], Array] = {}

    # ------------------------------------------------------------------------------------------ reading

    def table(self, handle: Handle) -> RowTable:
        """Look at the rows in use."""
        n, ids = handle.rows()
        table = RowTable.__new__(RowTable)
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
