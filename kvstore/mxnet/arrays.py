"""MXNet's arrays as the stores take them, and NumPy arrays as MXNet takes them.

Dense arrays share their memory: MXNet hands it out once its engine is done with them. Row-sparse ones are
built anew on the way out, for their number of rows changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays.host import readable
from ..arrays.sparse import RowSparseArray
from .library import mx

Array = npt.NDArray[Any]


def is_rows(array: Any) -> bool:
    """Whether an array is MXNet's row-sparse."""
    return isinstance(array, mx.nd.sparse.RowSparseNDArray)


def taken(value: Any) -> Any:
    """Return values of a push or an init, nested in lists as they come, with our row-sparse arrays."""
    if isinstance(value, (list, tuple)):
        return [taken(one) for one in value]
    if not is_rows(value):
        return value
    data, indices = readable(value.data), readable(value.indices)
    return RowSparseArray(data, indices, value.shape)


class Outs:
    """Outs of a call as the stores take them; `deliver` brings row-sparse ones home.

    Attributes
    ----------
    arrays : array, or list of arrays nested as given
    """

    def __init__(self, out: Any) -> None:
        self._pairs: list[tuple[RowSparseArray, Any]] = []
        self.arrays = self._mapped(out)

    def _mapped(self, out: Any) -> Any:
        if isinstance(out, (list, tuple)):
            return [self._mapped(one) for one in out]
        if not is_rows(out):
            return out
        ours = RowSparseArray.zeros(out.shape, np.dtype(out.dtype))
        self._pairs.append((ours, out))
        return ours

    def deliver(self) -> None:
        """Fill MXNet's row-sparse arrays."""
        for ours, theirs in self._pairs:
            put_rows(ours, theirs)


def put_rows(rows: RowSparseArray, out: Any) -> None:
    """Give MXNet's row-sparse array these rows; rows are also fetched while a forward pass is recorded."""
    with mx.autograd.pause():
        made = mx.nd.sparse.row_sparse_array(
            (rows.data, rows.indices), shape=rows.shape, ctx=out.context, dtype=out.dtype
        )
        made.copyto(out)
    out.wait_to_read()


def lent(array: Array) -> Any:
    """Return an NDArray on the memory of a contiguous array; what MXNet writes to it is written there."""
    return mx.nd.from_numpy(array.view())


def lent_all(state: Any) -> Any:
    """Return an optimizer's state with an NDArray in the place of each array; the rest as it is."""
    if isinstance(state, tuple):
        return tuple(lent_all(part) for part in state)
    return lent(state) if isinstance(state, np.ndarray) and state.ndim else state


def rows_of(array: Array) -> Any:
    """Return a row-sparse copy of a dense array, with all rows, as MXNet keeps such weights."""
    ids = np.arange(len(array), dtype=np.int64)
    return mx.nd.sparse.row_sparse_array((array, ids), shape=array.shape, dtype=array.dtype)


def lent_gradient(grad: Any) -> Any:
    """Return a gradient as MXNet's array."""
    if not isinstance(grad, RowSparseArray):
        return lent(np.ascontiguousarray(grad))
    if not grad.nnz_rows:
        return mx.nd.sparse.zeros("row_sparse", grad.shape, dtype=grad.dtype)
    return mx.nd.sparse.row_sparse_array((grad.data, grad.indices), shape=grad.shape, dtype=grad.dtype)
