"""The arrays of one worker, and values whose sums NumPy knows: whole numbers, exact in every element type.

The values repeat with a prime period, so that data at a wrong place of an array is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
            ends = np.cumsum([-(-key.size // line) * line for key in mine])
            self.flat.append(np.zeros(ends[-1], dtype_named(dtype)))
            for key, part in zip(mine, np.split(self.flat[-1], ends[:-1]), strict=True):
                values[key.name] = part[: key.size].reshape(key.shape)
        self.values = [values[name] for name in self.names]

    def write_pattern(self, rank: int) -> None:
        """Write the values that a worker pushes in the call that is checked."""
        self._repeat_values(lambda dtype: _rank_pattern(rank, dtype, None))

    def refill(self) -> None:
        """Write every gradient anew, as a backward pass does; sums in place would grow without end."""
        for flat in self.flat:
            flat.fill(1 if flat.dtype.kind in "iu" else 0.01)

    def wrong_key(
        self, spare: KeyArrays, workers: int, codec: dict[str, Any] | None = None, summed: bool = True
    ) -> str | None:
        """Return the first key whose value is not the sum of the patterns; `spare` is overwritten.

        `codec` is the compression of the patterns. Without `summed` each element is that of one worker.
        """
        right: list[Any] = [False] * len(self.names)
        for ranks in [range(workers)] if summed else [[rank] for rank in range(workers)]:
            spare._repeat_values(
                lambda dtype, ranks=ranks: sum(_rank_pattern(rank, dtype, codec) for rank in ranks)
            )
            pairs = zip(right, self.values, spare.values, strict=True)
            right = [known | (mine == theirs) for known, mine, theirs in pairs]
        return next((name for name, all_ in zip(self.names, right, strict=True) if not np.all(all_)), None)

    def _repeat_values(self, period: Callable[..., Any]) -> None:
        for flat in self.flat:
            values = period(flat.dtype)
            for at in range(0, flat.size, _PERIOD):
                flat[at : at + _PERIOD] = values[: flat.size - at]


def _rank_pattern(rank: int, dtype: np.dtype[Any], codec: dict[str, Any] | None) -> Any:
    """Return a worker's values after a codec without a residual; types of 16 bits hold them exactly."""
    values = np.random.default_rng(rank).integers(-2, 3, _PERIOD).astype(dtype)
    codec = codec or {"type": None}
    threshold = np.float32(codec.get("threshold", 0.5))
    if codec["type"] == "1bit":
        return np.where(values > threshold, np.float32(1), np.float32(-1))
    return threshold * np.sign(values) * (np.abs(values) >= threshold) if codec["type"] == "2bit" else values
