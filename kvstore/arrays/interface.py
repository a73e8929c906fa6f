"""`__array_interface__` and `__cuda_array_interface__`, read with every field checked.

NumPy itself reads past the end of a buffer, ignores a mask, and accepts any number as an address.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArrayError, DTypeError
from .addresses import Strides, byte_extent, is_possible, unusable_array_error
from .element_types import bfloat16, unsupported_error


class ArrayInterface(NamedTuple):
    """The fields of an array in one of the two protocols.

    Attributes
    ----------
    address : int
        0 for an array without elements.
    buffer : object or None
        If ``__array_interface__`` refers to an object with the buffer protocol, that object; `address` is
        then the offset in it.
    readonly : bool
    dtype : numpy.dtype
    shape, strides : tuple of int
        Strides are in bytes, and None if the protocol has none.
    stream : int or None
        The stream that writes the content; ``__cuda_array_interface__`` only.
    """

    address: int
    buffer: Any
    readonly: bool
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: Strides
    stream: int | None


def read_interface(interface: Any, obj: Any, what: str) -> ArrayInterface:
    """Read the interface of an object.

    Raises
    ------
    ArrayError
        A field is missing or wrong, the array is masked, or its elements have no memory.
    DTypeError
        NumPy does not support the element type.
    """
    try:
        return _parse_interface(interface, what)
    except (ArrayError, DTypeError):
        raise
    except Exception as error:  # an object of another library can have any values in these fields
        raise unusable_array_error(obj, what, error) from error


def _parse_interface(interface: Any, what: str) -> ArrayInterface:
    if not isinstance(interface, Mapping):
        raise TypeError(f"its array interface is {type(interface).__name__}, not a dict")
    if interface.get("mask") is not None:
        raise ArrayError(f"{what} is a masked array, whose mask would be lost; fill it first")
    shape = _integer_tuple(interface["shape"], "shape")
    if min(shape, default=0) < 0:
        raise ValueError(f"its shape is {shape}")
    dtype = _element_type(interface["typestr"], what)
    strides = interface.get("strides")
    strides = None if strides is None else _integer_tuple(strides, "strides")
    if strides is not None and len(strides) != len(shape):
        raise ValueError(f"it has strides {strides} with shape {shape}")
    begin, end = byte_extent(shape, strides, dtype.itemsize)
    buffer = None if isinstance(interface["data"], tuple) else interface["data"]
    address, readonly = _memory_start(interface, begin, end)
    return ArrayInterface(address, buffer, readonly, dtype, shape, strides, interface.get("stream"))


def _integer_tuple(given: Any, name: str) -> tuple[int, ...]:
    if not isinstance(given, tuple):
        raise TypeError(f"its {name} is {given!r}, not a tuple")
    return tuple(operator.index(one) for one in given)


def _element_type(typestr: Any, what: str) -> np.dtype[Any]:
    if not isinstance(typestr, str):
        raise TypeError(f"its typestr is {typestr!r}")
    if typestr.endswith("V2"):
        return bfloat16(what)
    try:
        found = np.dtype(typestr)
    except TypeError:
        raise DTypeError(f"{what} has the element type {typestr!r}, which NumPy does not know") from None
    if found.hasobject:
        raise unsupported_error(what, found)
    return found


def _memory_start(interface: Mapping[str, Any], begin: int, end: int) -> tuple[int, bool]:
    """Return the address or offset, and whether it is read-only.

    The bytes `begin` to `end` there are valid.
    """
    data = interface["data"]
    if not isinstance(data, tuple):
        return _in_buffer(data, interface, begin, end)
    address = 0 if data[0] is None else operator.index(data[0])
    if not is_possible(address, begin, end):
        raise ValueError(f"its data is at address {address}, where {end - begin} bytes cannot be")
    return address, bool(data[1])


def _in_buffer(data: Any, interface: Mapping[str, Any], begin: int, end: int) -> tuple[int, bool]:
    offset = operator.index(interface.get("offset", 0))
    with memoryview(data) as buffer:
        if begin < end and (offset + begin < 0 or offset + end > buffer.nbytes):
            raise ValueError(
                f"its elements lie in bytes {offset + begin} to {offset + end} of a buffer of {buffer.nbytes}"
            )
        return offset, buffer.readonly
