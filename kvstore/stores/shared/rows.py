"""Rounds of rows in the shared store; the opener of a round does its work.

For row-sparse keys see `region_table.py`; rows that are pushed to a dense key are merged into its value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays.grouping import Key
from ...arrays.host import writable_array
from ...arrays.sparse import RowSparseArray, trusted_rows
from ...kernels import cpu
from ...observe.counters import MOVING
from ..entry import Array
from ..row_table import is_lazy
from ..rows import Ids, merge_rows, sum_rows, with_all_rows
from .native import _shared as shm
from .region_table import RegionTable

if TYPE_CHECKING:
    from ...optimizer import Optimizer
    from .optimizer import JobUpdater

Handle = shm.Handle

_LINE = 64


class SparseKeys:
    """The rows of one process's keys."""

    def __init__(self, job: shm.Job, updater: JobUpdater) -> None:
        self._job, self._job_updater = job, updater
        # The memory of this worker's last two pushes, by parity of the round; it is reused.
        self._pushed: dict[tuple[Key, int], Array] = {}

    # ------------------------------------------------------------------------------------------ reading

    def _current_table(self, handle: Handle) -> RegionTable:
        """Return the table of a key, up to date; the caller holds its lock."""
        return self._job_updater.tables.table_of(handle).read_numbers()

    def nbytes(self, handle: Handle) -> int:
        """Return the bytes of the rows in use."""
        with self._job_updater.tables.table_of(handle).lock:
            return self._current_table(handle).nbytes

    def view(self, handle: Handle) -> RowSparseArray:
        """Return the rows in use; a copy if they may change."""
        with self._job_updater.tables.table_of(handle).lock:
            view = self._current_table(handle).view()
        return view if handle.is_stable else trusted_rows(view.data.copy(), view.indices.copy(), view.shape)

    def gather(self, handle: Handle, ids: Ids | None, out: RowSparseArray) -> None:
        """Fill `out` with rows; None: all that are held."""
        with self._job_updater.tables.table_of(handle).lock:
            self._current_table(handle).copy_rows(out, ids)

    def copy_to(self, handle: Handle, out: Any) -> None:
        """Fill `out`, row-sparse or dense, with all rows."""
        if isinstance(out, RowSparseArray):
            self.gather(handle, None, out)
            return
        array, deliver = writable_array(out, f"out of key {handle.key!r}")
        with self._job_updater.tables.table_of(handle).lock:
            self._current_table(handle).copy_dense(array)
        if deliver is not None:
            deliver()

    # ------------------------------------------------------------------------------------------ pushing

    def arrive(self, handle: Handle, sources: list[RowSparseArray]) -> None:
        """Push the sum of `sources`: ids and rows are copied to the region."""
        nbytes = sum(source.data.nbytes for source in sources)
        with shm.Phase(self._job, MOVING, handle, handle.arrived + 1, nbytes):
            total = sources[0] if len(sources) == 1 else sum_rows(sources)
            block = self._copy_block(handle, total)
            shm.arrive_with_rows(handle, self._job.offset_of(block), total.data.nbytes)

    def _copy_block(self, handle: Handle, total: RowSparseArray) -> Array:
        """Copy ids and rows to memory of the region."""
        n = len(total.indices)
        start = _line_up(8 + 8 * n)
        block = self._reserve_block(handle, start + total.data.nbytes)
        block[:8].view(np.int64)[0] = n
        block[8 : 8 + 8 * n].view(np.int64)[:] = total.indices
        there = block[start : start + total.data.nbytes].view(total.dtype).reshape(total.data.shape)
        np.copyto(there, total.data)
        return block

    def _reserve_block(self, handle: Handle, nbytes: int) -> Array:
        name = (handle.key, (handle.arrived + 1) % 2)
        block = self._pushed.get(name)
        if block is None or block.nbytes < nbytes:
            block = self._pushed[name] = self._job.empty((nbytes + nbytes // 4,), np.dtype(np.uint8))
        return block

    def _region_source(self, handle: Handle, source: int | Array) -> RowSparseArray:
        if not isinstance(source, int):
            return with_all_rows(source)
        return rows_at(handle, source, handle.shape, handle.dtype)

    # ------------------------------------------------------------------------------------------ rounds

    def carry_out(self, handle: Handle) -> None:
        """Do the work of the round that this worker has opened."""
        sources = [self._region_source(handle, source) for source in shm.opened_sources(handle)]
        if handle.sparse:
            self._carry_out_table(self._job_updater.tables.table_of(handle), handle, sources)
        elif shm.mode(self._job) & 1:
            self._update_dense(handle, sources)
        else:
            total = sum_rows(sources)
            value = handle.value(other=True)
            value[...] = 0
            value[total.indices] = total.data
            shm.close_opened(handle, True)

    def _carry_out_table(self, table: RegionTable, handle: Handle, sources: list[RowSparseArray]) -> None:
        updates = self._job_updater
        if not shm.mode(self._job) & 1:
            table.replace_other(sources)
            shm.close_opened(handle, True)
            return
        with table.work_in_round():
            if updates.updater is None:
                weight = table.all_rows_for_update()
                updates.apply_sum(handle, sum_rows(sources), weight)
                shm.close_opened(handle, False)
                return
            count = updates.begin_update(handle)
            self._update_table(table, sources, updates.updater.optimizer)
            shm.close_opened(handle, False, count())

    def _update_table(self, table: RegionTable, sources: list[RowSparseArray], optimizer: Optimizer) -> None:
        context = table.updater_for(self._job_updater)
        if not optimizer.fused:
            table.call_rule(sum_rows(sources), context)
            table.complete()
        elif is_lazy(optimizer):
            table.update(merge_rows(sources), context)
        else:
            table.update_all(sum_rows(sources), context)

    def _update_dense(self, handle: Handle, sources: list[RowSparseArray]) -> None:
        """Update a dense key."""
        updates, weight = self._job_updater, handle.value()
        if updates.updater is None:
            handle.note_undo([(weight, None)])
            updates.apply_sum(handle, sum_rows(sources), weight)
            shm.close_opened(handle, False)
            return
        count = updates.begin_update(handle)
        updates.bring_state(handle, weight)
        if updates.updater.optimizer.fused:
            self._fused_update(handle, sources, weight)
        else:
            handle.note_undo([(array, None) for array in (weight, *updates.state_arrays(handle))])
            updates.apply_sum(handle, sum_rows(sources), weight)
        updates.note_state(handle)
        shm.close_opened(handle, False, count())

    def _fused_update(self, handle: Handle, sources: list[RowSparseArray], weight: Array) -> None:
        updater = self._job_updater.updater
        assert updater is not None
        rule, params, master, states = updater.plan(handle.key, weight)
        changed = (weight, *states) if master is None else (weight, master, *states)
        if updater.optimizer.sparse_mode(False) == "dense":
            handle.note_undo([(array, None) for array in changed])
            cpu.update([(rule, params, [sum_rows(sources).todense()], weight, master, states, [])])
            return
        rows, maps, datas = merge_rows(sources)
        handle.note_undo([(array, rows) for array in changed])
        cpu.update_rows(rule, params, datas, maps, rows, weight, master, states)

    def overwrite(self, handle: Handle, value: RowSparseArray) -> None:
        """Write the rows of `value` to the place that is not in use."""
        self._job_updater.tables.table_of(handle).assign_other(value, self._job_updater)


def rows_at(handle: Handle, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> RowSparseArray:
    """Return rows of an array of that shape that a worker has pushed, in place."""
    n = int(handle.region_array(offset, (1,), np.dtype(np.int64))[0])
    ids = handle.region_array(offset + 8, (n,), np.dtype(np.int64))
    data = handle.region_array(offset + _line_up(8 + 8 * n), (n, *shape[1:]), dtype)
    return trusted_rows(data, ids, shape)


def _line_up(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE
