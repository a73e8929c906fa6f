"""Objects that workers send each other: what JSON can say, bytes, and arrays. Nothing of them is ever run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..arrays.host import DTYPES, dtype_named, is_array, readable
from ..errors import ArgumentError, KVStoreError

Array = npt.NDArray[Any]
#: Makes an array of a framework of one that has come.
Wrap = Callable[[Array], Any]

_NUMPY, _SCALAR, _OTHER = 1, 2, 3  # codes of MessagePack's extensions: whose array it was
_DEEPEST = 100  # lists and dicts within each other
_INT64 = 2**63


def packed(value: Any) -> bytes:
    """Write an object down.

    Raises
    ------
    ArgumentError
        A part of it is of no such type. The message names its place.
    """
    return msgspec.msgpack.encode(_plain(value, "value", 0))


def unpacked(data: bytes | memoryview, wrap: Wrap | None = None) -> Any:
    """Read what `packed` has written; what was an array of another library than NumPy is `wrap`ped."""
    return msgspec.msgpack.decode(data, ext_hook=lambda code, content: _array(code, content, wrap))


def _plain(value: Any, path: str, depth: int) -> Any:
    """Return the same in types that MessagePack has."""
    kind = type(value)
    if value is None or kind in (bool, float, bytes):
        return value
    if kind is int:
        return _checked_int(value, path)
    if kind is str:
        return _checked_text(value, path)
    if depth > _DEEPEST:
        raise ArgumentError(f"{path[:60]}... is more than {_DEEPEST} levels deep, or contains itself")
    if kind in (list, tuple):
        return [_plain(one, f"{path}[{at}]", depth + 1) for at, one in enumerate(value)]
    if kind is dict:
        return dict(_items(value, path, depth + 1))
    return _packed_array(value, path)


def _items(value: dict[Any, Any], path: str, depth: int) -> Iterator[tuple[str, Any]]:
    for key, one in value.items():
        if type(key) is not str:
            raise ArgumentError(
                f"{path} has the key {key!r} of type {_name(key)}: keys of a dict must be str"
            )
        yield _checked_text(key, f"a key of {path}"), _plain(one, f"{path}[{key!r}]", depth)


def _checked_int(value: int, path: str) -> int:
    if not -_INT64 <= value < 2 * _INT64:
        raise ArgumentError(f"{path} is an int of {value.bit_length()} bits; at most 64 can be sent")
    return value


def _checked_text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{path} is {value!r}, which has half of a surrogate pair") from None
    return value


def _packed_array(value: Any, path: str) -> msgspec.msgpack.Ext:
    code = _SCALAR if isinstance(value, np.generic) else _NUMPY if type(value) is np.ndarray else _OTHER
    plain = (
        isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc" and value.dtype.isnative
    )
    if not plain and not is_array(value):
        raise ArgumentError(
            f"{path} is of type {_name(value)}: what can be sent is None, bool, int, float, str, bytes, "
            "lists, dicts with str keys, and arrays"
        )
    try:
        array = np.ascontiguousarray(value) if plain else readable(value, path)
    except KVStoreError as error:
        raise ArgumentError(f"{path} cannot be sent: {error}") from error
    shape = (
        value.shape if plain else array.shape
    )  # an array of no dimensions has one more where it is contiguous
    head = msgspec.msgpack.encode((array.dtype.name, shape))
    return msgspec.msgpack.Ext(code, len(head).to_bytes(4, "little") + head + array.tobytes())


def _array(code: int, content: memoryview, wrap: Wrap | None) -> Any:
    length = int.from_bytes(content[:4], "little")
    name, shape = msgspec.msgpack.decode(content[4 : 4 + length], type=tuple[str, tuple[int, ...]])
    dtype = dtype_named(name) if name in DTYPES else np.dtype(name)
    array = np.frombuffer(content, dtype, math.prod(shape), 4 + length).reshape(shape).copy()
    if code == _SCALAR:
        return array[()]
    return wrap(array) if code == _OTHER and wrap is not None else array


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
