"""Memory at an address: the extent of an array in memory, and NumPy views of memory."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArrayError

if TYPE_CHECKING:
    import numpy.typing as npt

Strides = tuple[int, ...] | None

_LAST = 2**63  # addresses from here on belong to the kernel
_FROM_HERE = ctypes.c_char * 2**62  # one type for memory of any size: ctypes creates types slowly


def describe_object(obj: Any) -> str:
    """Return type and shape of an object, for messages."""
    kind = type(obj)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        return f"{name} of shape {tuple(obj.shape)}"
    except Exception:  # an object of another library can lack a shape, or raise any exception
        return name


def unusable_array_error(obj: Any, what: str, error: Exception) -> ArrayError:
    """Make the error for an object that has an array protocol and no valid array."""
    return ArrayError(
        f"{what} is not a usable array: {describe_object(obj)} ({type(error).__name__}: {error}); "
        "pass a NumPy array"
    )


def is_contiguous(shape: tuple[int, ...], strides: Strides, itemsize: int) -> bool:
    """Return whether strides (in bytes) are those of a C-contiguous array."""
    if strides is None or 0 in shape:
        return True
    step = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def byte_extent(shape: tuple[int, ...], strides: Strides, itemsize: int) -> tuple[int, int]:
    """Return the offsets of the first byte of an array and of its end, from its first element."""
    if 0 in shape:
        return 0, 0
    if strides is None:
        return 0, math.prod(shape) * itemsize
    steps = [stride * (size - 1) for stride, size in zip(strides, shape, strict=True)]
    return sum(step for step in steps if step < 0), sum(step for step in steps if step > 0) + itemsize


def is_possible(address: int, begin: int, end: int) -> bool:
    """Return whether a process can have memory from `begin` to `end`, relative to an address."""
    return begin == end or (address != 0 and 0 < address + begin < address + end <= _LAST)


def overlaps_itself(shape: tuple[int, ...], strides: Strides, itemsize: int) -> bool:
    """Return whether elements overlap: a stride is less than the extent of the axes with smaller strides."""
    if strides is None or 0 in shape:
        return False
    reach = itemsize
    for stride, count in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < reach:
            return True
        reach += stride * (count - 1)
    return False


def array_at(
    address: int, shape: tuple[int, ...], dtype: np.dtype[Any], strides: Strides, owner: Any, readonly: bool
) -> npt.NDArray[Any]:
    """View memory as a NumPy array; `owner` lives as long as the view.

    The caller has checked that the memory exists.
    """
    if 0 in shape:
        return np.empty(shape, dtype)
    begin = 0 if strides is None else byte_extent(shape, strides, dtype.itemsize)[0]
    memory: Any = _FROM_HERE.from_address(address + begin)
    memory.owner = owner
    view: npt.NDArray[Any] = np.ndarray(shape, dtype, memory, -begin, strides)
    if readonly:
        view.flags.writeable = False
    return view
