"""Decisions by a seed: each is a function of the seed, the process, the point, and how often it was passed.

So a run is named by its seed. A process does not affect the draws of another one, and a new point does not
affect the existing points. `interposer.c` decides in the same way.
"""

from __future__ import annotations

import zlib
from collections import Counter

_MASK = (1 << 64) - 1
_ON = 0.5  # of the points of a process: a run in which all fire is like every other


def _mixed(value: int) -> int:
    """Mix 64 bits (SplitMix64's finalizer)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def drawn(seed: int, process: str, point: str, count: int) -> float:
    """Return a number from 0 to 1, without 1."""
    value = _mixed(seed & _MASK)
    for name in (process, point):
        value = _mixed(value ^ zlib.crc32(name.encode()))
    return (_mixed(value ^ count) >> 11) / (1 << 53)


class Points:
    """The points of one run; off, none fires."""

    def __init__(self, seed: int, on: bool = True) -> None:
        self._seed, self._on = seed, on
        self._passed: Counter[tuple[str, str]] = Counter()

    def draw(self, process: str, point: str) -> float:
        """Return the next number of a point."""
        self._passed[process, point] += 1
        return drawn(self._seed, process, point, self._passed[process, point])

    def fires(self, process: str, point: str, chance: float) -> bool:
        """Whether something happens here now."""
        if not self._on or drawn(self._seed, process, point, 0) >= _ON:
            return False
        return self.draw(process, point) < chance

    def seconds(self, process: str, point: str, chance: float, most: float) -> float:
        """How long something lasts here now; 0 if it does not happen."""
        return self.draw(process, point) * most if self.fires(process, point, chance) else 0.0
