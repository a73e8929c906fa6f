"""How a restarted worker rejoins the rounds of a store: the choice of the first rounds that wait for it.

When a worker returns, the other workers are in the middle of a pass over their keys, and the returned worker
begins a pass. It reports the slice into which it pushes first (`RejoinBeginNotice`): its join point. When
another worker is about to push into that slice again, it reports the rounds that it has pushed so far
(`JoinPointNotice`). When all other workers have reported, the returned worker joins after the largest
reported round of each slice. So all workers agree on the first round that waits for it, and until then no
round waits for it.

One worker joins at a time. If a member is lost, leaves, joins or returns before that, the epoch changes, and
the other workers report again: rounds may have been completed that counted a member which is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

Rounds = tuple[tuple[int, int], ...]


class JoinPoint(NamedTuple):
    """The rank of a worker that joins, and the last round of each slice that does not wait for it."""

    rank: int
    after: Rounds


class RejoinCoordinator:
    """The restarted workers of one store that no round waits for yet."""

    def __init__(self) -> None:
        self.rejoining: set[int] = set()
        self._queue: list[tuple[int, int]] = []  # rank, and the slice into which it pushes first
        self._reports: dict[int, tuple[int, Rounds]] = {}  # by rank: epoch, and rounds pushed

    @property
    def join_slice(self) -> int:
        """Return the slice into which the next worker to join pushes first; -1 if no worker waits."""
        return self._queue[0][1] if self._queue else -1

    def add_worker(self, rank: int) -> None:
        """Add a restarted worker."""
        self.rejoining.add(rank)

    def remove_worker(self, rank: int) -> None:
        """Forget a worker."""
        self.rejoining.discard(rank)
        self._queue = [queued for queued in self._queue if queued[0] != rank]

    def enqueue_join(self, rank: int, slice_: int) -> bool:
        """Record the join point of a restarted worker; return whether it is the next to join."""
        if rank not in self.rejoining or self.is_waiting(rank):
            return False
        self._queue.append((rank, slice_))
        return len(self._queue) == 1

    def note_report(self, rank: int, epoch: int, pushed: Rounds) -> None:
        """Record the rounds that another worker has pushed when it reached the join point."""
        self._reports[rank] = (epoch, pushed)

    def unreported_ranks(self, others: Iterable[int], epoch: int) -> list[int]:
        """Return the ranks that have not reported in this epoch."""
        return sorted(rank for rank in others if self._reports.get(rank, (-1, ()))[0] != epoch)

    def is_waiting(self, rank: int) -> bool:
        """Return whether this worker waits until the other workers have reached its join point."""
        return any(queued[0] == rank for queued in self._queue)

    def complete_next(self, others: frozenset[int], epoch: int) -> JoinPoint | None:
        """Let the next worker join, if all others have reported; None if not."""
        if not self._queue or self.unreported_ranks(others, epoch):
            return None
        rank, _ = self._queue.pop(0)
        self.rejoining.discard(rank)
        furthest: dict[int, int] = {}
        for other in others:
            for slice_, round_ in self._reports[other][1]:
                furthest[slice_] = max(round_, furthest.get(slice_, 0))
        self._reports.clear()
        return JoinPoint(rank, tuple(sorted(furthest.items())))
