"""Encoding of objects that workers exchange: JSON's types, bytes and arrays. No code is encoded or run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ..arrays.element_types import DTYPES, dtype_named
from ..arrays.host import is_array, readable_array
from ..errors import ArgumentError, KVStoreError

Array = npt.NDArray[Any]


class ArrayKind(NamedTuple):
    """The arrays of a framework: a function that views one on the host, and a constructor."""

    view: Callable[[Any], Array | None]
    make: Callable[[Array], Any]


#: Arrays of all libraries with an array protocol are decoded as NumPy's.
NUMPY = ArrayKind(lambda _: None, lambda array: array)

_NUMPY, _SCALAR, _OTHER = 1, 2, 3  # codes of MessagePack's extensions: the library of the array
_DEEPEST = 100  # largest depth of nested lists and dicts
_INT64 = 2**63


def pack_object(value: Any, kind: ArrayKind = NUMPY) -> bytes:
    """Encode an object.

    Raises
    ------
    ArgumentError
        A part of the object has another type. The message has the place of that part.
    """
    return msgspec.msgpack.encode(_plain_value(value, "value", 0, kind))


def unpack_object(data: bytes | memoryview, kind: ArrayKind = NUMPY) -> Any:
    """Decode the result of `pack_object`; arrays of other libraries than NumPy become arrays of `kind`."""
    return msgspec.msgpack.decode(data, ext_hook=partial(_decode_array, kind))


def _plain_value(value: Any, path: str, depth: int, kind: ArrayKind) -> Any:
    """Convert an object to the types of MessagePack."""
    of = type(value)
    if value is None or of in (bool, float, bytes):
        return value
    if of is int:
        return _checked_int(value, path)
    if of is str:
        return _checked_text(value, path)
    if depth > _DEEPEST:
        raise ArgumentError(f"{path[:60]}... is more than {_DEEPEST} levels deep, or contains itself")
    if of in (list, tuple):
        return [_plain_value(one, f"{path}[{at}]", depth + 1, kind) for at, one in enumerate(value)]
    if of is dict:
        return dict(_plain_items(value, path, depth + 1, kind))
    return _packed_array(value, path, kind)


def _plain_items(value: dict[Any, Any], path: str, depth: int, kind: ArrayKind) -> Iterator[tuple[str, Any]]:
    for key, one in value.items():
        if type(key) is not str:
            raise ArgumentError(
                f"{path} has the key {key!r} of type {_type_name(key)}: the keys of a dict must be str"
            )
        yield _checked_text(key, f"a key of {path}"), _plain_value(one, f"{path}[{key!r}]", depth, kind)


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


def _packed_array(value: Any, path: str, kind: ArrayKind) -> msgspec.msgpack.Ext:
    code = _SCALAR if isinstance(value, np.generic) else _NUMPY if isinstance(value, np.ndarray) else _OTHER
    array = _host_array(value, path, kind)
    head = msgspec.msgpack.encode((array.dtype.name, array.shape))
    return msgspec.msgpack.Ext(code, len(head).to_bytes(4, "little") + head + array.tobytes())


def _host_array(value: Any, path: str, kind: ArrayKind) -> Array:
    """View an array of any library on the host."""
    try:
        plain = type(value) is np.ndarray or isinstance(value, np.generic)
        found = np.asarray(value) if plain else kind.view(value)
        if found is not None and found.dtype.kind in "biufc":
            return found.astype(found.dtype.newbyteorder("="), copy=False)
        if found is not None or is_array(value):
            return readable_array(value if found is None else found, path)
    except (KVStoreError, TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"{path} cannot be sent: {error}") from error
    raise ArgumentError(
        f"{path} is of type {_type_name(value)}: objects can have None, bool, int, float, str, bytes, "
        "lists, dicts with str keys, and arrays"
    )


def _decode_array(kind: ArrayKind, code: int, content: memoryview) -> Any:
    """Decode an array of `_packed_array`."""
    length = int.from_bytes(content[:4], "little")
    name, shape = msgspec.msgpack.decode(content[4 : 4 + length], type=tuple[str, tuple[int, ...]])
    dtype = dtype_named(name) if name in DTYPES else np.dtype(name)
    array = np.frombuffer(content, dtype, math.prod(shape), 4 + length).reshape(shape).copy()
    if code == _SCALAR:
        return array[()]
    return kind.make(array) if code == _OTHER else array


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
