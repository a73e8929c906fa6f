"""Conversion between MXNet's arrays and those of stores.

Dense arrays share their memory: MXNet exports it after its engine has completed the operations on it.
Row-sparse outputs are created at each pull, because their number of rows changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays.host import readable_array
from ..arrays.sparse import RowSparseArray
from .library import mx

Array = npt.NDArray[Any]


def is_rows(array: Any) -> bool:
    """Return whether an array is a row-sparse array of MXNet."""
    return isinstance(array, mx.nd.sparse.RowSparseNDArray)


def converted_values(value: Any) -> Any:
    """Convert the values of a push or an init, nested in lists as given.

    Row-sparse arrays become kvstore's.
    """
    if isinstance(value, (list, tuple)):
        return [converted_values(one) for one in value]
    if not is_rows(value):
        return value
    data, indices = readable_array(value.data), readable_array(value.indices)
    return RowSparseArray(data, indices, value.shape)


class RowSparseOuts:
    """Output arrays of a call for stores; `deliver` writes the row-sparse ones.

    Attributes
    ----------
    arrays : array, or list of arrays nested as given
    """

    def __init__(self, out: Any) -> None:
        self._pairs: list[tuple[RowSparseArray, Any]] = []
        self.arrays = self._map_outs(out)

    def _map_outs(self, out: Any) -> Any:
        if isinstance(out, (list, tuple)):
            return [self._map_outs(one) for one in out]
        if not is_rows(out):
            return out
        ours = RowSparseArray.zeros(out.shape, np.dtype(out.dtype))
        self._pairs.append((ours, out))
        return ours

    def deliver(self) -> None:
        """Write MXNet's row-sparse arrays."""
        for ours, theirs in self._pairs:
            put_rows(ours, theirs)


def put_rows(rows: RowSparseArray, out: Any) -> None:
    """Set the rows of a row-sparse array of MXNet; also while a forward pass is recorded."""
    with mx.autograd.pause():
        made = mx.nd.sparse.row_sparse_array(
            (rows.data, rows.indices), shape=rows.shape, ctx=out.context, dtype=out.dtype
        )
        made.copyto(out)
    out.wait_to_read()


def as_ndarray(array: Array) -> Any:
    """Return an NDArray on the memory of a contiguous array; MXNet's writes change that memory."""
    return mx.nd.from_numpy(array.view())


def state_as_ndarrays(state: Any) -> Any:
    """Return an optimizer's state in which NDArrays replace the arrays."""
    if isinstance(state, tuple):
        return tuple(state_as_ndarrays(part) for part in state)
    return as_ndarray(state) if isinstance(state, np.ndarray) and state.ndim else state


def rows_of(array: Array) -> Any:
    """Return a row-sparse copy of a dense array with all rows, as MXNet represents such weights."""
    ids = np.arange(len(array), dtype=np.int64)
    return mx.nd.sparse.row_sparse_array((array, ids), shape=array.shape, dtype=array.dtype)


def gradient_as_ndarray(grad: Any) -> Any:
    """Return a gradient as an array of MXNet."""
    if not isinstance(grad, RowSparseArray):
        return as_ndarray(np.ascontiguousarray(grad))
    if not grad.nnz_rows:
        return mx.nd.sparse.zeros("row_sparse", grad.shape, dtype=grad.dtype)
    return mx.nd.sparse.row_sparse_array((grad.data, grad.indices), shape=grad.shape, dtype=grad.dtype)
