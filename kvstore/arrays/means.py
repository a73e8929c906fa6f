"""Means over workers: each value is divided before the sum, so that no sum is larger than the largest value.

The sum of two float16 values of 40000 is infinite, and their mean is 40000.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DTypeError

Array = npt.NDArray[Any]


def check_mean(dtype: np.dtype[Any], what: str) -> None:
    """Raise DTypeError for integers, whose mean is no integer."""
    if dtype.kind in "iub":
        raise DTypeError(
            f"{what} holds {dtype}, and the mean of integers is no integer: sum them (average=False), or "
            "pass floating-point numbers"
        )


def divide(array: Array, workers: int) -> Array:
    """Divide an array in place by the number of workers; each quotient is rounded once. Returns it."""
    if workers > 1:
        with np.errstate(all="ignore"):
            np.divide(array, workers, out=array)
    return array
