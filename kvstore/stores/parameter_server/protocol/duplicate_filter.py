"""Which of a peer's numbered requests have come, in bounded memory."""

from __future__ import annotations

#: How far ahead of the oldest request that has not come others are taken.
SPAN = 65536


class DuplicateFilter:
    """All numbers up to `low` have come, and those in `above`."""

    __slots__ = ("above", "low")

    def __init__(self, low: int = 0, above: list[int] | None = None) -> None:
        self.low = low
        self.above: set[int] = set(above or ())

    def __contains__(self, number: int) -> bool:
        return number <= self.low or number in self.above

    def fits(self, number: int) -> bool:
        """Whether the number may be taken: if not, it has to come again when older ones have come."""
        return number <= self.low + SPAN

    def take(self, number: int) -> bool:
        """Note a number that `fits`; False: it has come before."""
        if number in self:
            return False
        self.above.add(number)
        while self.low + 1 in self.above:
            self.low += 1
            self.above.remove(self.low)
        return True

    def without(self, numbers: set[int]) -> tuple[int, list[int]]:
        """`low` and `above` of a window into which these numbers have not come."""
        low = min(self.low, min(numbers, default=self.low + 1) - 1)
        return low, [
            one for one in (*range(low + 1, self.low + 1), *sorted(self.above)) if one not in numbers
        ]
