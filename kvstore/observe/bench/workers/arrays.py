"""The arrays of one worker: the gradients of all keys, cut out of flat memory as buckets of DDP are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.arrays.element_types import dtype_named

from ..key_lists import BenchKey
from . import patterns

Array = npt.NDArray[Any]

_LINE = 64  # bytes of a cache line: each array begins on one


class WorkerArrays:
    """Arrays by key.

    Parameters
    ----------
    keys : sequence of BenchKey
        Their shapes and element types.

    Attributes
    ----------
    names : list of str
        Keys.
    values : list of ndarray
        One for each key.
    flat : list of ndarray
        The memory of the values, one array for each element type.
    """

    def __init__(self, keys: Sequence[BenchKey]) -> None:
        self.names = [key.name for key in keys]
        types = [dtype_named(key.dtype) for key in keys]
        self.values: list[Array] = [np.empty(0)] * len(keys)
        self.flat: list[Array] = []
        for dtype in dict.fromkeys(types):
            mine = [place for place, one in enumerate(types) if one == dtype]
            self._cut(dtype, mine, keys)

    def write_patterns(self, rank: int) -> None:
        """Fill all with what the sums are checked with."""
        for index, value in enumerate(self.values):
            patterns.write(value, index, rank)

    def refill(self) -> None:
        """Write every gradient anew, as a backward pass does; sums in place would grow without end."""
        for flat in self.flat:
            flat.fill(1 if flat.dtype.kind in "iu" else 0.01)

    def wrong(self, workers: int, params: dict[str, Any] | None = None, summed: bool = True) -> str | None:
        """Name the first key whose value is not what must come back; None if all are right."""
        periods = {flat.dtype: patterns.expected(workers, flat.dtype, params, summed) for flat in self.flat}
        for index, (name, value) in enumerate(zip(self.names, self.values, strict=True)):
            if not patterns.is_one_of(value, index, periods[value.dtype]):
                return name
        return None

    def _cut(self, dtype: np.dtype[Any], places: Sequence[int], keys: Sequence[BenchKey]) -> None:
        line = _LINE // dtype.itemsize
        sizes = [-(-keys[place].size // line) * line for place in places]
        flat = np.zeros(sum(sizes), dtype)
        at = 0
        for place, size in zip(places, sizes, strict=True):
            self.values[place] = flat[at : at + keys[place].size].reshape(keys[place].shape)
            at += size
        self.flat.append(flat)
