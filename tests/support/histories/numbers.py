"""Values that prove which pushes are in them.

A key is a repetition of one cell. Element 0 of a cell is 1 in the first value and 0 in every push. Each
process has some more elements, its words.

* keeps "all" (an optimizer adds pushes up): push n adds 4**d to one word, with a digit d of its own for
  each n. A digit counts how often that push is in the value: 0, 1, 2 or 3 times. A float64 holds 26 digits
  exactly, a float32 12.
* keeps "last" (sums replace the value): the first word of a push is 1, the second its number. So a sum
  shows how many pushes of each process are in it, and which.

All is exact in every order of sums. Cells have a power of two of elements, and so slices have whole
ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .events import Contents, Push, Read

Array = npt.NDArray[Any]
_DIGITS = {"float64": 26, "float32": 12}


class Numbers(NamedTuple):
    """How the values of a key are made and understood."""

    slots: int
    keeps: str = "all"
    cells: int = 1
    words: int = 7
    dtype: str = "float64"

    @property
    def cell(self) -> int:
        """Elements of a cell."""
        return int(1 << (self.slots * self.words).bit_length())

    @property
    def pushes(self) -> int:
        """How many pushes of one process can be distinguished."""
        return self.words * _DIGITS[self.dtype] if self.keeps == "all" else 1 << 20

    def start(self) -> Array:
        """First value of the key."""
        return self._repeat({0: 1})

    def push(self, slot: int, number: int) -> Array:
        """Value to push."""
        first = 1 + slot * self.words
        if number > self.pushes:
            raise ValueError(f"push {number} of slot {slot}: there are digits for {self.pushes}")
        if self.keeps == "last":
            return self._repeat({first: 1, first + 1: number})
        word, digit = divmod(number - 1, _DIGITS[self.dtype])
        return self._repeat({first + word: 4**digit})

    def empty(self) -> Array:
        """Return an array to pull into, filled with a number that no value has."""
        return np.full(self.cells * self.cell, np.nan, self.dtype)

    def _repeat(self, elements: dict[int, int]) -> Array:
        cell = np.zeros(self.cell, self.dtype)
        for at, value in elements.items():
            cell[at] = value
        return np.tile(cell, self.cells)

    def read(self, value: Array) -> Read:
        """Understand a value."""
        cells = value.reshape(self.cells, self.cell)
        new = np.flatnonzero([True, *(cells[1:] != cells[:-1]).any(axis=1)])
        return Read(tuple((int(at), self._contents(cells[at])) for at in new))

    def _contents(self, cell: Array) -> Contents:
        if not np.isfinite(cell).all() or (cell < 0).any() or (cell != np.floor(cell)).any():
            return None
        words = cell[1 : 1 + self.slots * self.words].reshape(self.slots, self.words).astype(np.int64)
        found = [push for slot in range(self.slots) for push in self._pushes(slot, words[slot].tolist())]
        first = 1 if self.keeps == "all" or not found else 0
        whole = cell[0] == first and not cell[1 + self.slots * self.words :].any()
        return tuple(found) if whole and None not in found else None  # type: ignore[arg-type]

    def _pushes(self, slot: int, words: list[int]) -> list[Push | None]:
        if self.keeps == "last":
            return self._one_sum(slot, *words[:2])
        digits = [
            (1 + at * _DIGITS[self.dtype] + digit, word >> 2 * digit & 3)
            for at, word in enumerate(words)
            for digit in range(word.bit_length() // 2 + 1)
        ]
        return [Push(slot, number) for number, times in digits for _ in range(times)]

    def _one_sum(self, slot: int, times: int, total: int) -> list[Push | None]:
        """Return the pushes whose numbers sum up to this; more than one push of a process is always wrong."""
        if times == 0:
            return [None] if total else []
        return [Push(slot, total // times)] * times if times < 100 else [None]
