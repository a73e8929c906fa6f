"""The stored data of a key, and checks of arrays that are pushed to it or pulled from it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..arrays import pages
from ..arrays.element_types import same_type
from ..arrays.grouping import Key, check_text
from ..arrays.host import number_array, readable_array, writable_array
from ..arrays.sparse import RowSparseArray, checked_rows
from ..errors import ArrayError, DTypeError, DuplicateKeyError, RowIndexError, ShapeError
from ..kernels import cpu
from ..observe.native._observe import Slice
from .rows import with_all_rows
from .store_table import StoreTable

Array = npt.NDArray[Any]
Deliver = Callable[[], None]


class KeyDescription(Protocol):
    """A key as the checks below see it."""

    @property
    def key(self) -> Key:
        """Name of the key."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the value."""


class StoredKey:
    """The stored data of a key: a dense array, or a row table."""

    __slots__ = ("_spare", "dtype", "key", "number", "shape", "slice", "table", "value")

    def __init__(self, key: Key, number: int, value: Array | RowSparseArray) -> None:
        self.key = key
        #: The position in the order of updates: int keys ascend, str keys follow the order of their init.
        self.number = key if isinstance(key, int) else number
        self.shape, self.dtype = value.shape, value.dtype
        #: The key in counters and events.
        self.slice = Slice(self.number, math.prod(value.shape) * value.dtype.itemsize)
        self.table = StoreTable(key, value) if isinstance(value, RowSparseArray) else None
        self.value: Array = np.empty(0) if isinstance(value, RowSparseArray) else pages.copy(value)
        #: Memory for a merged gradient, or for a weight to restore; allocated when first needed.
        self._spare: dict[str, Array] = {}

    def renumber(self, number: int) -> None:
        """Change the position in the order of updates."""
        self.number, self.slice = number, Slice(number, self.slice.nbytes)

    def assign(self, value: Array | RowSparseArray) -> None:
        """Overwrite with a value of the same shape, type and storage."""
        if self.table is not None:
            assert isinstance(value, RowSparseArray)
            self.table.assign(value)
        else:
            np.copyto(self.value, value)

    def weight(self) -> Array:
        """Return the live dense weight; a row table gets all its rows."""
        return self.value if self.table is None else self.table.hold_all()

    @contextmanager
    def scratch(self, name: str) -> Iterator[Array]:
        """Provide memory of the key's shape and type for a context; a nested call gets other memory."""
        memory = self.scratch_memory(name)
        try:
            yield memory
        finally:
            self.return_scratch(name, memory)

    def scratch_memory(self, name: str) -> Array:
        """Return memory of the key's shape and type, if possible that of the last `return_scratch`."""
        memory = self._spare.pop(name, None)
        return pages.empty(self.shape, self.dtype) if memory is None else memory

    def return_scratch(self, name: str, memory: Array) -> None:
        """Keep memory for the next `scratch_memory` of this name."""
        self._spare[name] = memory


def first_value(key: Key, values: list[Any], taken: bool) -> Array | RowSparseArray:
    """Return the first value of a key that is about to be initialised."""
    check_text(key)
    if taken:
        raise initialised_already(key)
    if len(values) > 1:
        raise DuplicateKeyError(f"key {key!r} occurs {len(values)} times in one init; give it one value")
    value = values[0]
    return (
        checked_rows(value)
        if isinstance(value, RowSparseArray)
        else readable_array(value, f"value of key {key!r}")
    )


def initialised_already(key: Key) -> DuplicateKeyError:
    """Return the error for a second init of a key."""
    return DuplicateKeyError(
        f"key {key!r} is initialised already; init and broadcast take a key once. Where a cell of a notebook "
        "runs again, close() the store and create a new one first; push and load change a value that is there"
    )


def check_shape(entry: KeyDescription, array: Array | RowSparseArray, what: str) -> None:
    """Raise ShapeError unless `array` has the key's shape."""
    if array.shape != entry.shape:
        raise ShapeError(f"{what} of key {entry.key!r} has shape {array.shape}, the key has {entry.shape}")


def check_same(
    key: KeyDescription, is_table: bool, value: Array | RowSparseArray, where: str, rank: int
) -> None:
    """Raise an error unless a value of worker `rank` has the form of the key `where` it was made."""
    if is_table != isinstance(value, RowSparseArray):
        there = "row-sparse" if is_table else "dense"
        raise ArrayError(f"key {key.key!r} is {there} {where} and something else on worker {rank}")
    if key.dtype != value.dtype:
        raise DTypeError(
            f"key {key.key!r} has element type {key.dtype} {where} and {value.dtype} on worker {rank}"
        )
    if key.shape != value.shape:
        raise ShapeError(f"key {key.key!r} has shape {key.shape} {where} and {value.shape} on worker {rank}")


def not_row_sparse(key: Key) -> ArrayError:
    """Return the error for rows of a dense key."""
    return ArrayError(f"key {key!r} holds a dense array; row_sparse_pull reads row-sparse keys only")


def check_dtype(entry: KeyDescription, dtype: np.dtype[Any]) -> None:
    """Raise DTypeError unless `dtype` is the key's, in any byte order."""
    if not same_type(dtype, entry.dtype):
        name = f"{'ml_dtypes' if entry.dtype.name == 'bfloat16' else 'np'}.{entry.dtype.name}"
        raise DTypeError(
            f"value of key {entry.key!r} has element type {dtype}, the key has {entry.dtype}: cast it, as "
            f"x.astype({name}) does, or x.to(torch.{entry.dtype.name})"
        )


def sparse_outs(
    entry: KeyDescription,
    is_table: bool,
    outs: list[Any],
    ignore_sparse: bool,
    told: set[Key],
    log: logging.Logger,
) -> list[RowSparseArray]:
    """Return the row-sparse outs of a pull, which are unchanged unless the caller asks for them.

    `told` holds the keys for which this was logged.
    """
    if ignore_sparse:
        if entry.key not in told:
            told.add(entry.key)
            log.info("pull of key %r leaves row-sparse outs alone; use row_sparse_pull", entry.key)
        return []
    if not is_table:
        raise ArrayError(f"key {entry.key!r} holds a dense array; pull it into a dense out")
    sparse = [out for out in outs if isinstance(out, RowSparseArray)]
    for out in sparse:
        check_shape(entry, out, "out")
    return sparse


def sparse_source(entry: KeyDescription, value: RowSparseArray) -> RowSparseArray:
    """Return `value` if it can be pushed to the key."""
    value = checked_rows(value)
    check_dtype(entry, value.dtype)
    check_shape(entry, value, "value")
    return value


def row_source(entry: KeyDescription, value: Any) -> RowSparseArray:
    """View or copy `value` as rows that can be pushed to a table; a dense one has all of them."""
    if isinstance(value, RowSparseArray):
        return sparse_source(entry, value)
    return with_all_rows(dense_source(entry, value))


def dense_source(entry: KeyDescription, value: Any) -> Array:
    """View or copy `value` as a plain array that can be pushed to the key."""
    if isinstance(value, RowSparseArray):
        return sparse_source(entry, value).todense()
    array = readable_array(value, f"value of key {entry.key!r}")
    check_dtype(entry, array.dtype)
    check_shape(entry, array, "value")
    return array


def dense_out(entry: KeyDescription, out: Any) -> tuple[Array, Deliver | None]:
    """Return `out` as a plain array for the key's value, and a function that copies it back, if needed."""
    array, deliver = writable_array(out, f"out of key {entry.key!r}")
    check_shape(entry, array, "out")
    return array, deliver


def copy_into(home: Array, array: Any, key: Key) -> None:
    """Copy an array to one of the key's shape."""
    source = readable_array(array, f"array for key {key!r}")
    if source.shape != home.shape:
        raise ShapeError(f"array for key {key!r} has shape {source.shape}, the key has {home.shape}")
    np.copyto(home, source, casting="same_kind")


def dense_of(entry: StoredKey) -> Array:
    """Return the value as a dense array: live memory, or a copy if a table lacks rows."""
    return entry.value if entry.table is None else entry.table.dense()


def out_conversion(entry: StoredKey, out: Array) -> Deliver:
    """Return a function that converts the stored value to the type of `out` when it is called."""
    return partial(copy_out, entry, out)


def copy_out(entry: StoredKey, out: Array) -> None:
    """Copy the stored value to an array of the key's shape, of any type."""
    if entry.table is not None:
        entry.table.copy_dense(out)
    else:
        np.copyto(out, entry.value, casting="unsafe")


def row_ids(entry: KeyDescription, ids: Any) -> Array:
    """Return sorted, unique, checked row ids; fractions are cut off as in MXNet."""
    what = f"row_ids of key {entry.key!r}"
    ids = _whole_numbers(ids, what)
    try:
        return cpu.unique_ids(ids, entry.shape[0])
    except IndexError:
        lowest, highest = ids.min(), ids.max()
        raise RowIndexError(
            f"{what} lie in [{lowest}, {highest}], the table has {entry.shape[0]} rows"
        ) from None


def _whole_numbers(ids: Any, what: str) -> Array:
    given = number_array(ids, what)
    if given.size and given.dtype.kind not in "iuf":
        raise DTypeError(f"{what} must be numbers that fit 64 bits, not {given.dtype}")
    if given.dtype.kind == "f" and given.itemsize < 8:
        given = given.astype(np.float64)  # 2**63 is beyond 16 bits
    if given.dtype.kind == "f" and not (np.abs(given) < 2.0**63).all():
        raise RowIndexError(f"{what} are not all finite, or beyond any table")
    if given.dtype.kind == "u" and given.size and given.max() >= 2**63:
        raise RowIndexError(f"{what} reach {given.max()}, beyond any table")
    return given.astype(np.int64).ravel()
