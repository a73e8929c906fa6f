"""Rows of several row-sparse arrays: their union, and their sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays.sparse import RowSparseArray, trusted_rows
from ..kernels import cpu

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]


#: Ascending ids of rows; their positions in each source (-1: the row is absent; None: the source has all of
#: them, in this order); the rows of each source.
Merged = tuple[Ids, list[Ids | None], list[Array]]


def merge_rows(sources: list[RowSparseArray]) -> Merged:
    """Return the union of the sources' rows, with their positions in each source.

    Ids that all sources have are not copied. Sources without rows are left out.
    """
    some = [source for source in sources if len(source.indices)]
    if some and all(_have_same_rows(some[0], source) for source in some[1:]):
        return some[0].indices, [None] * len(some), [source.data for source in some]
    rows, maps = cpu.merge_ids([source.indices for source in some])
    return rows, [*maps], [source.data for source in some]


def _have_same_rows(one: RowSparseArray, other: RowSparseArray) -> bool:
    mine, others = one.indices, other.indices
    if len(mine) != len(others):
        return False
    return len(mine) == one.shape[0] or (mine[-1] == others[-1] and np.array_equal(mine, others))


def sum_rows(sources: list[RowSparseArray]) -> RowSparseArray:
    """Return the sum of `sources` as a new row-sparse array."""
    rows, maps, datas = merge_rows(sources)
    data = np.empty((len(rows), *sources[0].shape[1:]), sources[0].dtype)
    cpu.reduce_rows(datas, maps, data)
    is_shared = any(rows is source.indices for source in sources)
    return trusted_rows(data, rows.copy() if is_shared else rows, sources[0].shape)


def with_all_rows(table: Array) -> RowSparseArray:
    """Return a dense array as a row-sparse one that holds every row, those of zeros too."""
    return trusted_rows(table, np.arange(len(table), dtype=np.int64), table.shape)
