"""Values whose sums are known: whole numbers that repeat, so that NumPy has the sum of all workers at once.

The sums are exact in every element type and in every order of the workers. The period is a prime, so that
data which ends up at another place of the array is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_PERIOD = 65_537
_STEP = 7_919  # between the beginnings of two keys


def expected(
    workers: int, dtype: np.dtype[Any], params: dict[str, Any] | None = None, summed: bool = True
) -> list[Array]:
    """Make what may come back, one period of it; each element is of one of these.

    Parameters
    ----------
    workers : int
        Each has pushed its pattern once.
    dtype : dtype
        Element type of the key.
    params : dict, optional
        Gradient compression that the pushes went through, for the first time.
    summed : bool
        The store sums; else each push replaces the value.
    """
    parts = [_packed(_pattern(rank).astype(dtype), params) for rank in range(workers)]
    if not summed:
        return parts
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return [total]


def write(value: Array, index: int, rank: int) -> None:
    """Fill what a worker pushes for the key of that index."""
    _fill(value.reshape(-1), _turned(_pattern(rank).astype(value.dtype), index))


def is_one_of(value: Array, index: int, periods: Sequence[Array]) -> bool:
    """Whether each element is that of one of the periods."""
    flat, turned = value.reshape(-1), [_turned(period, index) for period in periods]
    for at in range(0, flat.size, _PERIOD):
        piece = flat[at : at + _PERIOD]
        if not np.logical_or.reduce([piece == period[: piece.size] for period in turned]).all():
            return False
    return True


def _pattern(rank: int) -> Array:
    return np.random.default_rng(rank).integers(-2, 3, _PERIOD)


def _packed(values: Array, params: dict[str, Any] | None) -> Array:
    """Return what a codec makes of whole numbers; those of 16 bits hold them."""
    kind = (params or {}).get("type")
    if kind not in ("2bit", "1bit"):
        return values
    threshold = np.float32((params or {}).get("threshold", 0.5))
    if kind == "1bit":
        return np.where(values > threshold, np.float32(1), np.float32(-1))
    sent = np.where(values >= threshold, threshold, np.float32(0))
    return np.where(values <= -threshold, -threshold, sent)


def _turned(period: Array, index: int) -> Array:
    return np.roll(period, -(index * _STEP % _PERIOD))


def _fill(flat: Array, period: Array) -> None:
    for at in range(0, flat.size, _PERIOD):
        flat[at : at + _PERIOD] = period[: flat.size - at]
