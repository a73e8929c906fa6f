"""Means over workers: each value is divided before the sum, so that no sum exceeds the largest value.

The sum of two float16 values of 40000 is infinite, and their mean is 40000.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DTypeError
from .element_types import HALVES, name_of

Array = npt.NDArray[Any]


def check_mean(dtype: np.dtype[Any], what: str) -> None:
    """Raise DTypeError for integer types, which cannot represent means."""
    if dtype.kind in "iub":
        raise DTypeError(
            f"{what} holds {dtype}, and the mean of integers is no integer: sum them (average=False), or "
            "pass floating-point numbers"
        )


def divided_array(array: Array, workers: int) -> Array:
    """Return an array divided by the number of workers; each element is rounded once, to its type."""
    if workers == 1:
        return array
    out = np.empty_like(array)
    with np.errstate(all="ignore"):
        if name_of(array.dtype) in HALVES:  # integers of the type cannot represent every count of workers
            out[...] = array.astype(np.float32) / np.float32(workers)
        else:
            np.divide(array, array.dtype.type(workers), out=out)
    return out
