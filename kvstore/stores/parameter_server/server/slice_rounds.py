"""The rounds of one slice: whose parts are there, who waits, and when a round is complete."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..protocol.events import SliceRound
from ..protocol.messages import Failure, Kind, Record
from .sessions import WorkerSession

#: Rounds after the complete one whose parts are accepted; a push into a later one waits.
OPEN = 2

#: Requests that set what a slice is, or drop it: done between rounds, in a broken store too.
WRITES = frozenset((Kind.INIT, Kind.ASSIGN, Kind.PUT_STATE, Kind.FORGET))

#: Failed rounds of a slice that are kept for workers which have not been told; the oldest are dropped.
_FAILED = 64

Frames = Sequence[Any]
#: A request that waits.
Waiting = tuple[WorkerSession, Record, Frames]
_PartOf = tuple[int, Record, Frames]


class SliceActivity(enum.IntEnum):
    """What is being done to a slice."""

    NOTHING = 0
    ROUND = 1
    WRITE = 2


@dataclass(slots=True, eq=False)
class SliceRounds:
    """One slice on its server."""

    id: int
    defined: bool = False
    ready: bool = False  # has a value
    kept: bool = False  # has been in a snapshot
    round: int = 0  # the last one that is complete
    busy: SliceActivity = SliceActivity.NOTHING
    current: tuple[WorkerSession, Record] | None = None  # whose request is being done, if one alone
    parts: dict[int, dict[int, _PartOf]] = field(default_factory=dict)  # of open rounds, by rank
    pulls: list[Waiting] = field(default_factory=list)  # wait for a round, or until it is free
    held: list[tuple[WorkerSession, Record]] = field(default_factory=list)  # pushes ahead of the rounds
    queue: deque[Waiting] = field(default_factory=deque)  # wait until it is free
    #: Why rounds failed, and which of the workers that had pushed into them have not been told.
    failures: dict[int, tuple[Failure, set[int]]] = field(default_factory=dict)
    skip: dict[int, int] = field(default_factory=dict)  # ranks whose parts up to a round are lost

    def put(self, round: int, part: _PartOf) -> bool:
        """Keep a part; False if there is one of that rank."""
        parts = self.parts.get(round)
        if parts is None:
            parts = self.parts[round] = {}
        if part[0] in parts:
            return False
        parts[part[0]] = part
        return True

    def missing(self, round: int, needed: frozenset[int]) -> list[int]:
        """Ranks for which a round waits."""
        there = self.parts.get(round, {})
        return sorted(rank for rank in needed if rank not in there and self.skip.get(rank, 0) < round)

    def due(self, needed: frozenset[int]) -> SliceRound | None:
        """Return the next round if it is complete; rounds lost with a server's memory are passed over."""
        while True:
            number = self.round + 1
            parts = self.parts.get(number)
            if parts is None and not self.skip:
                return None
            if parts is not None and not self.skip:
                return self._job(number, parts) if needed <= parts.keys() else None
            if self.missing(number, needed):
                return None
            if parts:
                return self._job(number, parts)
            self.complete()

    def complete(self) -> None:
        """One round more is complete."""
        self.round += 1
        self.parts.pop(self.round, None)
        if self.skip:
            self.skip = {rank: last for rank, last in self.skip.items() if last > self.round}

    def fail(self, failure: Failure) -> None:
        """Keep why the next round failed, until all that have pushed into it are told."""
        untold = set(self.parts.get(self.round + 1, ()))
        if untold:
            self.failures[self.round + 1] = (failure, untold)
        if len(self.failures) > _FAILED:
            del self.failures[min(self.failures)]

    def tell(self, rank: int, round: int) -> tuple[int, Failure] | None:
        """Return the first failed round up to this one of which a worker has to be told; now it has been."""
        for number in sorted(self.failures):
            failure, untold = self.failures[number]
            if number <= round and rank in untold:
                self._told(number, {rank})
                return number, failure
        return None

    def forget(self, ranks: set[int]) -> None:
        """Have nothing to tell to these any more: they are gone."""
        for number in list(self.failures):
            self._told(number, ranks)

    def _told(self, number: int, ranks: set[int]) -> None:
        untold = self.failures[number][1]
        untold -= ranks
        if not untold:
            del self.failures[number]

    def lose(self, ranks: set[int], after: int = 0) -> None:
        """Drop what has come of these ranks for rounds that are not complete, and come after this one."""
        for number, parts in list(self.parts.items()):
            if number <= after or (self.busy == SliceActivity.ROUND and number == self.round + 1):
                continue
            for rank in ranks & parts.keys():
                del parts[rank]
            if not parts:
                del self.parts[number]
        for rank in ranks:
            self.skip.pop(rank, None)

    def last(self, rank: int) -> int:
        """Return the last round that a worker is in, its part of it lost or not: all have waited for it."""
        there = [number for number, parts in self.parts.items() if rank in parts]
        return max([self.round, self.skip.get(rank, 0), *there])

    def leave(self, session: WorkerSession) -> None:
        """Let a worker that is gone wait no more; what failed is told to the next who has its rank."""
        self.pulls = [one for one in self.pulls if one[0] is not session]
        self.held = [one for one in self.held if one[0] is not session]

    def abandon(self) -> list[tuple[WorkerSession, Record]]:
        """Drop all parts, since no round will be complete any more; return what waited for one.

        Writes are still to be done, and who asks for the last round is to be told.
        """
        waiting = [*self.held]
        waiting += [(one[0], one[1]) for one in self.pulls if one[1].kind != Kind.LAST_ROUND]
        waiting += [(one[0], one[1]) for one in self.queue if one[1].kind not in WRITES]
        self.held.clear()
        self.pulls = [one for one in self.pulls if one[1].kind == Kind.LAST_ROUND]
        self.queue = deque(one for one in self.queue if one[1].kind in WRITES)
        self.parts.clear()
        return waiting

    def base(self) -> int:
        """Round after which a worker that comes now begins."""
        return self.round + (self.busy == SliceActivity.ROUND)

    def _job(self, number: int, parts: dict[int, _PartOf]) -> SliceRound:
        ordered = [parts[rank] for rank in sorted(parts)]
        version = max(part[1][4] for part in ordered)
        clock = max(part[1][5] for part in ordered)
        return SliceRound(self.id, number, ordered, version, clock)
