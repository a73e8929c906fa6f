"""Element types of values: their names, and NumPy's dtypes for them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import DTypeError, MissingBackendError
from ..kernels import cpu

_by_size = sorted(cpu.dtypes().items(), key=lambda item: item[1])
FLOATS = tuple(name for name, (_, is_float) in _by_size if is_float)
HALVES = tuple(name for name, (size, is_float) in _by_size if is_float and size == 2)
#: Element types that the local, device, shared and dist stores support.
DTYPES = (*FLOATS, *(name for name, _ in _by_size if name not in FLOATS))


def same_type(a: np.dtype[Any], b: np.dtype[Any]) -> bool:
    """Return whether two element types are equal except for byte order."""
    return a == b or a.newbyteorder("=") == b.newbyteorder("=")


@lru_cache(maxsize=64)
def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of an element type; NumPy computes it at each access, in microseconds."""
    return dtype.name


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the element type of a name in `DTYPES`. Raises DTypeError for any other name."""
    if name not in DTYPES:
        raise DTypeError(f"unknown element type {name!r}; supported are {', '.join(DTYPES)}")
    return native_dtype(bfloat16("array"), "array") if name == "bfloat16" else np.dtype(name)


class _NoBfloat16(DTypeError, MissingBackendError):
    """NumPy supports bfloat16 with ml_dtypes only, which is not installed."""


def bfloat16(what: str) -> np.dtype[Any]:
    """Return NumPy's dtype of bfloat16, which is that of ml_dtypes.

    Raises
    ------
    DTypeError
        ml_dtypes is not installed; the error is also a MissingBackendError.
    """
    try:
        import ml_dtypes
    except ImportError:
        raise _NoBfloat16(
            f"{what} is bfloat16, which NumPy knows through ml_dtypes: pip install 'kvstore-train[bfloat16]'"
        ) from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def native_dtype(dtype: np.dtype[Any], what: str) -> np.dtype[Any]:
    """Return an element type in the byte order of this machine.

    Raises DTypeError if it is not in `DTYPES`.
    """
    found = dtype.newbyteorder("=")
    if cpu.supported(found):
        return found
    if found.name == "bfloat16" and found.itemsize == 2:
        cpu.accept_bfloat16(found)
        return found
    raise unsupported_error(what, dtype)


def unsupported_error(what: str, dtype: object, hint: str = "") -> DTypeError:
    """Make the error for an element type that is not in `DTYPES`."""
    return DTypeError(f"{what} has element type {dtype}; supported are {', '.join(DTYPES)}{hint}")
