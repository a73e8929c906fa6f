"""The stored value of a row-sparse key: some rows of a table, or all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import pages
from ..arrays.sparse import RowSparseArray, reserve_rows, trusted_rows
from ..kernels import cpu

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]


class RowTable:
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


def merge(sources: list[RowSparseArray]) -> tuple[Ids, list[Ids], list[Array]]:
    """Union of the sources' row ids, each source's map into it, and the rows of each source.

    Sources without rows are left out.
    """
    some = [source for source in sources if len(source.indices)]
    if len(some) == 1:
        ids = some[0].indices.copy()
        return ids, [np.arange(len(ids), dtype=np.int64)], [some[0].data]
    rows, maps = cpu.merge_ids([source.indices for source in some])
    return rows, maps, [source.data for source in some]


def merged(sources: list[RowSparseArray]) -> RowSparseArray:
    """Return the sum of `sources` as a new row-sparse array."""
    rows, maps, datas = merge(sources)
    data = np.empty((len(rows), *sources[0].shape[1:]), sources[0].dtype)
    cpu.reduce_rows(datas, maps, data)
    return trusted_rows(data, rows, sources[0].shape)


def with_all_rows(table: Array) -> RowSparseArray:
    """Return a dense array as a row-sparse one that holds every row, those of zeros too."""
    return trusted_rows(table, np.arange(len(table), dtype=np.int64), table.shape)
