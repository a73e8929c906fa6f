"""The arrays of one worker, and values whose sums NumPy knows: whole numbers, exact in every element type.

The values repeat with a prime period, so that data which ends up at another place of an array is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.arrays.element_types import dtype_named

from .key_lists import BenchKey

Array = npt.NDArray[Any]

_LINE = 64  # bytes of a cache line: each array begins on one
_PERIOD = 65_537


class KeyArrays:
    """Arrays by key, cut out of one memory for each element type, as the buckets of DDP are."""

    def __init__(self, keys: Sequence[BenchKey]) -> None:
        self.names = [key.name for key in keys]
        self.flat: list[Array] = []
        values: dict[str, Array] = {}
        for dtype in dict.fromkeys(key.dtype for key in keys):
            mine = [key for key in keys if key.dtype == dtype]
            line = _LINE // dtype_named(dtype).itemsize
            places = list(accumulate((-(-key.size // line) * line for key in mine), initial=0))
            flat = np.zeros(places[-1], dtype_named(dtype))
            self.flat.append(flat)
            for key, at in zip(mine, places, strict=False):
                values[key.name] = flat[at : at + key.size].reshape(key.shape)
        self.values = [values[name] for name in self.names]

    def write_pattern(self, rank: int) -> None:
        """Write the values that a worker pushes in the call that is checked."""
        for flat in self.flat:
            _repeat(_pattern(rank, flat.dtype), flat)

    def refill(self) -> None:
        """Write every gradient anew, as a backward pass does; sums in place would grow without end."""
        for flat in self.flat:
            flat.fill(1 if flat.dtype.kind in "iu" else 0.01)

    def wrong(
        self, spare: KeyArrays, workers: int, codec: dict[str, Any] | None = None, summed: bool = True
    ) -> str | None:
        """Return the first key whose value is not the sum of the patterns; `spare` is overwritten.

        `codec` is the compression that the patterns went through. Without `summed` each element is that of
        one worker.
        """
        ranks = [range(workers)] if summed else [range(rank, rank + 1) for rank in range(workers)]
        right: list[Any] = [False] * len(self.names)
        for some in ranks:
            for flat in spare.flat:
                _repeat(sum(_packed(_pattern(rank, flat.dtype), codec) for rank in some), flat)
            pairs = zip(right, self.values, spare.values, strict=True)
            right = [known | (mine == theirs) for known, mine, theirs in pairs]
        return next((name for name, all_ in zip(self.names, right, strict=True) if not np.all(all_)), None)


def _pattern(rank: int, dtype: np.dtype[Any]) -> Array:
    return np.random.default_rng(rank).integers(-2, 3, _PERIOD).astype(dtype)


def _packed(values: Array, codec: dict[str, Any] | None) -> Array:
    """Return the whole numbers after a codec without a residual; types of 16 bits hold them exactly."""
    kind = (codec or {}).get("type")
    threshold = np.float32((codec or {}).get("threshold", 0.5))
    if kind == "1bit":
        return np.where(values > threshold, np.float32(1), np.float32(-1))
    if kind == "2bit":
        return threshold * np.sign(np.where(np.abs(values) >= threshold, values, np.float32(0)))
    return values


def _repeat(period: Any, flat: Array) -> None:
    for at in range(0, flat.size, _PERIOD):
        flat[at : at + _PERIOD] = period[: flat.size - at]
