"""The payloads of requests on a server, and their form for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ....arrays.grouping import Key
from ....arrays.sparse import RowSparseArray, trusted_rows
from ....errors import DTypeError, KVStoreError, ProtocolError, RowIndexError, ShapeError
from ....kernels import cpu
from ...entry import Array


class SlicePayload(NamedTuple):
    """An array that a worker has sent for a slice.

    Plain elements in native byte order, to be divided by `threshold` if `coding` is `cpu.DIVIDED`; packed
    elements (`coding` and `threshold` as in `kernels.cpu.Coded`); or rows of a table. The memory is only
    read, and not used after the call.
    """

    #: A buffer; for rows one with the int64 ids and then the rows, or a pair of buffers. An exception where
    #: it cannot be read: the job then fails with it.
    data: Any
    coding: int = 0
    threshold: float = 0.0
    #: Number of rows; their ids are row numbers of the whole table, ascending and distinct. -1: not rows.
    rows: int = -1


class SliceValueWrite(NamedTuple):
    """A value that is assigned; with `first`, of INIT, only where the slice has none."""

    slice: int
    payload: SlicePayload
    first: bool


class SliceUpdate(NamedTuple):
    """One round of one slice, as `events.SliceRound`, with payloads."""

    slice: int
    round: int
    #: In rank order: (rank, payload). A round without any changes nothing.
    parts: list[tuple[int, SlicePayload]]
    version: int = 0
    clock: int = 0
    #: Buffers of the slice's size to which the value is written too. Some may be sources.
    outs: tuple[Any, ...] = ()


class SharedLocation(NamedTuple):
    """The place of a value in the server's shared memory, and its seqlock; see `transport.shared_buffers`."""

    segment: int
    offset: int
    nbytes: int
    seqlock: int


def not_kept(key: Key, round: int) -> KVStoreError:
    """Return the error of a read of an earlier value that is not stored."""
    return KVStoreError(f"the value that key {key!r} had after round {round} is not kept")


def plain_elements(payload: SlicePayload, dtype: np.dtype[Any], size: int) -> Array:
    """View a payload as `size` elements, copied where it is not aligned; ShapeError: it has another size."""
    if payload.coding == cpu.DIVIDED:
        return _divided_elements(payload, dtype, size)
    if payload.coding:
        _check_packed(dtype)
        restored = np.empty(size, np.float32)
        cpu.decode(payload.coding, payload.threshold, [_packed_words(payload, size)], restored)
        return restored
    return _typed_elements(_byte_array(payload.data), dtype, size)


def usual_summands(
    parts: list[tuple[int, SlicePayload]], dtype: np.dtype[Any], size: int
) -> list[Array] | None:
    """Return parts in the form of the kernels, where all are plain and fit; None: use `kernel_sources`."""
    nbytes = size * dtype.itemsize
    arrays = []
    for _, (data, coding, _, rows) in parts:
        if coding or rows >= 0 or isinstance(data, Exception):
            return None
        array = np.frombuffer(data, np.uint8)
        if array.size != nbytes:
            return None
        typed = array.view(dtype)
        if not typed.flags.aligned:
            return None
        arrays.append(typed)
    return arrays


def kernel_sources(
    parts: Sequence[tuple[int, SlicePayload]], dtype: np.dtype[Any], size: int
) -> list[Array] | cpu.Coded:
    """Return the parts of a dense slice in the form of the kernels, in their order.

    Raises ShapeError or DTypeError where a part does not fit this type and size.
    """
    codes = {(payload.coding, payload.threshold) for _, payload in parts}
    coding, threshold = codes.pop()
    if codes or coding in (0, cpu.DIVIDED):  # plain, or workers with different codecs
        return [plain_elements(payload, dtype, size) for _, payload in parts]
    _check_packed(dtype)
    return cpu.Coded(
        coding, threshold, size, [_packed_words(payload, size) for _, payload in parts], packed=True
    )


def some_rows(
    payload: SlicePayload, dtype: np.dtype[Any], start: int, shape: tuple[int, ...]
) -> RowSparseArray:
    """View a row-sparse payload as rows of a slice that begins with row `start`; `shape` is the slice's.

    Returned ids are relative to the slice. Raises ShapeError where the number of bytes is wrong, and
    RowIndexError for ids that do not ascend, or of rows of other slices.
    """
    n, width = payload.rows, int(np.prod(shape[1:], dtype=np.int64))
    if isinstance(payload.data, tuple):
        ids_bytes, data_bytes = (_byte_array(part) for part in payload.data)
    else:
        both = _byte_array(payload.data)
        ids_bytes, data_bytes = both[: 8 * n], both[8 * n :]
    ids = _typed_elements(ids_bytes, np.dtype(np.int64), n) - start
    if not cpu.ascending_ids(ids, shape[0]):
        raise RowIndexError(
            f"row ids of a push must ascend within [{start}, {start + shape[0]}), the rows of its slice"
        )
    data = _typed_elements(data_bytes, dtype, n * width)
    return trusted_rows(data.reshape(n, *shape[1:]), ids, shape)


def opaque_bytes(payload: SlicePayload) -> bytes:
    """Return the bytes of a payload that is no array; ProtocolError: it has rows, or cannot be read."""
    if payload.rows >= 0:
        raise ProtocolError(f"{payload.rows} rows where there can be none; the request was not carried out")
    return _byte_array(payload.data).tobytes()


def _byte_array(data: Any) -> Array:
    if isinstance(data, Exception):
        raise data
    return np.frombuffer(data, np.uint8)


def _typed_elements(data: Array, dtype: np.dtype[Any], size: int) -> Array:
    if data.nbytes != size * dtype.itemsize:
        raise ShapeError(
            f"a payload of {data.nbytes} bytes where {size} elements of {dtype} take {size * dtype.itemsize}"
        )
    typed = data.view(dtype)
    return typed if typed.flags.aligned else data.copy().view(dtype)


def _divided_elements(payload: SlicePayload, dtype: np.dtype[Any], size: int) -> Array:
    if dtype != np.float32 or not payload.threshold > 0:
        raise DTypeError(f"elements of {dtype} cannot count divided by {payload.threshold}")
    elements = _typed_elements(_byte_array(payload.data), dtype, size)
    with np.errstate(all="ignore"):  # a signalling NaN is a value like any other
        return np.divide(elements, np.float32(payload.threshold), out=np.empty_like(elements))


def _check_packed(dtype: np.dtype[Any]) -> None:
    if dtype != np.float32:
        raise DTypeError(f"a packed gradient is float32, the key holds {dtype}")


def _packed_words(payload: SlicePayload, size: int) -> Array:
    data = _byte_array(payload.data)
    try:
        needed = cpu.encoded_bytes(payload.coding, size)
    except ValueError as error:
        raise DTypeError(f"a push is packed in a way that this server does not know: {error}") from error
    if data.nbytes != needed:
        raise ShapeError(f"a payload of {data.nbytes} bytes where {size} packed elements take {needed}")
    return data if data.ctypes.data % 4 == 0 else data.copy()  # words of 32 bits
