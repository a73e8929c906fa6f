"""Row-sparse arrays: tables that store only some of their rows."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DTypeError, RowIndexError, ShapeError
from ..kernels import cpu
from .host import RowSparseBase, number_array, readable_array

if TYPE_CHECKING:
    import numpy.typing as npt

_ELEMENTS = 2**60  # of up to 8 bytes each: sizes in bytes fit 64 bits, with a sign


class RowSparseArray(RowSparseBase):
    """A table of shape ``(rows, ...)`` that stores only the listed rows. All other rows are zero.

    Parameters
    ----------
    data : array
        The stored rows, of shape ``(n, ...)``. A contiguous NumPy array is not copied if the indices are
        sorted and unique.
    indices : array of integers
        Row id of each stored row, of shape ``(n,)``. Unsorted ids are sorted. The rows of a repeated id are
        summed in the given order.
    shape : tuple of int
        Shape of the whole table; ``shape[1:] == data.shape[1:]``. It has fewer than 2**60 elements.

    Raises
    ------
    ShapeError, DTypeError, ArrayError
        If the three arguments do not match.
    RowIndexError
        If an id is outside ``0 <= id < shape[0]``.

    Notes
    -----
    A pull into this object writes into the memory of `data` if it is large enough, and replaces `data` and
    `indices` by views of this memory.
    """

    __slots__ = ("_capacity", "data", "indices", "shape")

    data: npt.NDArray[Any]
    indices: npt.NDArray[np.int64]
    shape: tuple[int, ...]

    def __init__(self, data: Any, indices: Any, shape: tuple[int, ...]) -> None:
        rows = readable_array(data, "data")
        self.shape = full = _plain_shape(shape)
        if rows.ndim != len(full) or rows.shape[1:] != full[1:]:
            raise ShapeError(f"data of shape {rows.shape} cannot be rows of a table of shape {full}")
        ids = _checked_ids(indices, rows, self.shape[0])
        self.data, self.indices = _canonical_rows(rows, ids)
        self._capacity: npt.NDArray[Any] | None = None

    @classmethod
    def from_dense(cls, dense: Any) -> RowSparseArray:
        """Return a table that stores the rows of `dense` with at least one nonzero element (or NaN)."""
        table = readable_array(dense, "dense")
        if table.ndim < 1:
            raise ShapeError("a row-sparse array needs at least one dimension")
        flat = table.reshape(table.shape[0], -1) if table.size else table.reshape(table.shape[0], 0)
        ids = np.flatnonzero((flat != 0).any(axis=1)).astype(np.int64)
        return trusted_rows(np.ascontiguousarray(table[ids]), ids, table.shape, cls)

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> RowSparseArray:
        """Return a table without stored rows, for example as the output of a pull."""
        full = _plain_shape(shape)
        return cls(np.zeros((0, *full[1:]), dtype), np.zeros(0, np.int64), full)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the stored rows."""
        return self.data.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions of the table."""
        return len(self.shape)

    @property
    def nnz_rows(self) -> int:
        """Number of stored rows."""
        return len(self.indices)

    def todense(self) -> npt.NDArray[Any]:
        """Return the whole table as a new dense array."""
        dense = np.zeros(self.shape, self.data.dtype)
        dense[self.indices] = self.data
        return dense

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return the dense table, so that NumPy expressions such as ``weight += gradient`` work."""
        return self.todense() if dtype is None else self.todense().astype(dtype)

    def copy(self) -> RowSparseArray:
        """Return a copy that shares no memory with this table."""
        return trusted_rows(self.data.copy(), self.indices.copy(), self.shape, type(self))

    def __repr__(self) -> str:
        return (
            f"RowSparseArray({self.nnz_rows} of {self.shape[0]} rows, shape={self.shape}, dtype={self.dtype})"
        )


def trusted_rows(
    data: npt.NDArray[Any],
    indices: npt.NDArray[np.int64],
    shape: tuple[int, ...],
    kind: type[RowSparseArray] = RowSparseArray,
) -> RowSparseArray:
    """Wrap arrays that are in canonical form, without a check."""
    array = kind.__new__(kind)
    array.data, array.indices, array.shape, array._capacity = data, indices, shape, None
    return array


def reserve_rows(out: RowSparseArray, n: int) -> npt.NDArray[Any]:
    """Return a writable block for `n` rows: the array's own memory if it is large enough."""
    block = out._capacity
    if block is None or len(block) < n:
        own = out.data
        fits = len(own) >= n and own.flags.writeable and own.flags.c_contiguous
        block = own if fits else np.empty((n, *out.shape[1:]), out.data.dtype)
        out._capacity = block
    return block[:n]


def _plain_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    try:
        full = tuple(operator.index(n) for n in shape)
    except TypeError:
        raise ShapeError(f"shape must be a tuple of ints, not {shape!r}") from None
    if not full or min(full) < 0 or max(full) >= 2**63:
        raise ShapeError(
            f"a row-sparse shape has at least one dimension, each from 0 to 2**63 - 1, not {full}"
        )
    if math.prod(max(n, 1) for n in full) >= _ELEMENTS:
        raise ShapeError(
            f"a table of shape {full} has 2**60 elements or more, which no array can have; take row ids "
            "modulo a smaller number of rows"
        )
    return full


def _checked_ids(indices: Any, rows: npt.NDArray[Any], n_rows: int) -> npt.NDArray[np.int64]:
    ids = number_array(indices, "indices")
    if ids.size == 0:
        ids = ids.astype(np.int64)
    if ids.dtype.kind not in "iu":
        raise DTypeError(f"indices must be integers, not {ids.dtype}")
    if ids.ndim != 1 or len(ids) != len(rows):
        raise ShapeError(f"indices must be one id for each of the {len(rows)} rows, got shape {ids.shape}")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= n_rows):
        raise RowIndexError(
            f"row ids lie in [{ids.min()}, {ids.max()}], the table has rows 0 to {n_rows - 1}"
        )
    return np.ascontiguousarray(ids, dtype=np.int64)


def _canonical_rows(
    rows: npt.NDArray[Any], ids: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    if len(ids) < 2 or bool((ids[1:] > ids[:-1]).all()):
        return rows, ids
    order = np.argsort(ids, kind="stable")
    unique = np.unique(ids)
    if len(unique) == len(ids):
        return np.ascontiguousarray(rows[order]), unique
    # 16-bit floats are summed in float32 and rounded once, as in a push.
    wide = np.float32 if rows.dtype.itemsize == 2 else rows.dtype
    merged = np.zeros((len(unique), *rows.shape[1:]), wide)
    np.add.at(merged, np.searchsorted(unique, ids), rows.astype(wide, copy=False))
    return merged.astype(rows.dtype, copy=False), unique


def checked_rows(value: RowSparseArray) -> RowSparseArray:
    """Return `value`, converted again if its parts were changed; raises the errors of the constructor."""
    return value if is_canonical(value) else RowSparseArray(value.data, value.indices, value.shape)


def is_canonical(value: RowSparseArray) -> bool:
    """Return whether the parts of `value` are still in canonical form."""
    data, ids = value.data, value.indices
    return (
        cpu.is_plain(data)
        and cpu.is_plain(ids)
        and ids.dtype == np.int64
        and data.ndim == len(value.shape)
        and data.shape[1:] == value.shape[1:]
        and ids.shape == data.shape[:1]
        and cpu.ascending_ids(ids, value.shape[0])
    )


def kind_of(value: Any) -> tuple[str, str, tuple[int, ...]]:
    """Return storage, name of the element type, and shape of a value."""
    storage = "row-sparse" if isinstance(value, RowSparseArray) else "dense"
    return storage, value.dtype.name, tuple(value.shape)
