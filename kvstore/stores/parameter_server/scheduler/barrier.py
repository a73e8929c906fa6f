"""Workers that wait for each other."""

from __future__ import annotations


class Barrier:
    """The requests of those that have arrived."""

    def __init__(self) -> None:
        self.waiting: dict[int, int] = {}  # request by rank

    def arrive(self, rank: int, request: int) -> None:
        """Note that a worker is there."""
        self.waiting[rank] = request

    def leave(self, rank: int) -> None:
        """Forget a worker that is lost or closes."""
        self.waiting.pop(rank, None)

    def missing(self, needed: frozenset[int]) -> list[int]:
        """Ranks that it waits for."""
        return sorted(needed - self.waiting.keys())

    def open(self, needed: frozenset[int]) -> list[tuple[int, int]]:
        """Rank and request of all that may go on now; they are forgotten."""
        if not self.waiting or self.missing(needed):
            return []
        return self.clear()

    def clear(self) -> list[tuple[int, int]]:
        """Rank and request of all that wait; they are forgotten."""
        gone = sorted(self.waiting.items())
        self.waiting.clear()
        return gone
