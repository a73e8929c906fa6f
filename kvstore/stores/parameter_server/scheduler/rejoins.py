"""Workers that took the place of lost ones, until the others have reached where they join.

The others are somewhere in a pass over their keys when one comes back, and it begins one. It says into which
slice it pushes first. Each of the others, when it is about to push into that slice the next time, says what
it has pushed so far. What the furthest of them had pushed by then is, in every slice, where the one who came
back joins in: so all agree on the first round that waits for it, as if it had been at that point of the
program all the time, and until then nobody waits for it.

One joins at a time. Whatever else changes meanwhile (somebody is lost, leaves, joins or comes back) makes
the others say once more where they are: rounds may have gone on by the word of one who is not there any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

Rounds = tuple[tuple[int, int], ...]


class JoinPoint(NamedTuple):
    """Who joins, and after which round of each slice."""

    rank: int
    after: Rounds


class RejoinCoordinator:
    """Those of one store who came back and for whom no round waits yet."""

    def __init__(self) -> None:
        self.rejoining: set[int] = set()
        self._queue: list[tuple[int, int]] = []  # rank, and the slice that it pushes into first
        self._told: dict[int, tuple[int, Rounds]] = {}  # by rank: epoch, and what it had pushed

    @property
    def join_slice(self) -> int:
        """Slice into which the next one pushes first; -1: nobody has asked."""
        return self._queue[0][1] if self._queue else -1

    def enter(self, rank: int) -> None:
        """Note who came."""
        self.rejoining.add(rank)

    def leave(self, rank: int) -> None:
        """Forget a worker."""
        self.rejoining.discard(rank)
        self._queue = [one for one in self._queue if one[0] != rank]

    def ask(self, rank: int, slice_: int) -> bool:
        """Note that a worker that came back is about to push; whether it is the next one to join."""
        if rank not in self.rejoining or any(one[0] == rank for one in self._queue):
            return False
        self._queue.append((rank, slice_))
        return len(self._queue) == 1

    def reached(self, rank: int, epoch: int, pushed: Rounds) -> None:
        """Note what another worker has pushed before the slice."""
        self._told[rank] = (epoch, pushed)

    def missing(self, others: Iterable[int], epoch: int) -> list[int]:
        """Ranks that have not said so in this epoch."""
        return sorted(rank for rank in others if self._told.get(rank, (-1, ()))[0] != epoch)

    def waits(self, rank: int) -> bool:
        """Whether this worker waits for the others."""
        return any(one[0] == rank for one in self._queue)

    def due(self, others: frozenset[int], epoch: int) -> JoinPoint | None:
        """Let the next one join, if all others have said where they are."""
        if not self._queue or self.missing(others, epoch):
            return None
        rank, _ = self._queue.pop(0)
        self.rejoining.discard(rank)
        furthest: dict[int, int] = {}
        for other in others:
            for slice_, round_ in self._told[other][1]:
                furthest[slice_] = max(round_, furthest.get(slice_, 0))
        self._told.clear()
        return JoinPoint(rank, tuple(sorted(furthest.items())))
