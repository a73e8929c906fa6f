"""The rounds of one slice: whose parts are there, who waits, and when a round is complete."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from typing import Any

from ..native._native import SliceState
from ..protocol.events import SliceRound
from ..protocol.messages import Failure, Record, RecordKind
from .worker_sessions import WorkerSession

#: Rounds after the complete one whose parts are accepted; a push into a later one waits.
OPEN = 2

#: Requests that set what a slice is, or drop it: done between rounds, in a broken store too.
WRITES = frozenset(
    (
        RecordKind.INIT,
        RecordKind.ASSIGN,
        RecordKind.PUT_STATE,
        RecordKind.FORGET,
        RecordKind.SEAL,
        RecordKind.UNSEAL,
    )
)

#: Failed rounds of a slice that are kept for workers which have not been told; the oldest are dropped.
_FAILED = 64

Frames = Sequence[Any]
#: A request that waits.
Waiting = tuple[WorkerSession, Record, Frames]


class SliceActivity(enum.IntEnum):
    """What is being done to a slice."""

    NOTHING = 0
    ROUND = 1
    WRITE = 2


class SliceRounds(SliceState):
    """One slice on its server; requests that take their usual way meet it in `native/rounds.h` only."""

    def __init__(self, store: int, id: int) -> None:
        self.current: tuple[WorkerSession, Record] | None = None  # whose request is being done, if one alone
        self.queue: deque[Waiting] = deque()  # wait until it is free
        #: Why rounds failed, and which of the workers that had pushed into them have not been told.
        self.failures: dict[int, tuple[Failure, set[int]]] = {}
        self.skip: dict[int, int] = {}  # ranks whose parts up to a round are lost
        self.sealed = False  # its key moves, or has moved, to other slices: it is only read
        #: Of workers that have joined: the last round that they are in, and the settings that hold after it.
        self.settled: dict[int, tuple[int, int]] = {}

    def note(self) -> None:
        """Tell `native/rounds.h` whether it can handle requests; after each change of what is kept here."""
        kept = self.queue or self.failures or self.skip or self.current or self.sealed or self.settled
        self.special = bool(kept)

    def enqueue(self, request: Waiting) -> None:
        """Let a request wait until the slice is free."""
        request[0].wait(request[1].sequence)
        self.queue.append(request)
        self.note()

    def seal(self, sealed: bool) -> None:
        """Take no more pushes, or take them again."""
        self.sealed = sealed
        self.note()

    def begin(self, activity: SliceActivity, session: WorkerSession, record: Record) -> None:
        """Do one request alone."""
        session.wait(record.sequence)
        self.busy, self.current = activity, (session, record)
        self.note()

    def end(self) -> tuple[WorkerSession, Record] | None:
        """Do nothing any more; return the request that alone was done, if it was one."""
        current, self.busy, self.current = self.current, SliceActivity.NOTHING, None
        self.note()
        return current

    def pass_over(self, rank: int, last: int) -> None:
        """Wait for this rank in no round up to `last`: what it had pushed is lost."""
        self.skip[rank] = last
        self.note()

    def settle(self, rank: int, version: int) -> None:
        """Use the settings that a worker which has joined knew, in rounds that it is not in."""
        if version:
            self.settled[rank] = self.last(rank), version
            self.note()

    def _settled_round(self) -> SliceRound:
        """Return the next round, with the settings of workers that have joined."""
        job = self.next_round()
        versions = [version for last, version in self.settled.values() if last < job.round]
        if not versions:
            return job
        self.settled = {rank: one for rank, one in self.settled.items() if one[0] >= job.round}
        self.note()
        return job._replace(version=max(job.version, *versions))

    def missing(self, round: int, needed: frozenset[int]) -> list[int]:
        """Ranks for which a round waits."""
        there = set(self.ranks(round))
        return sorted(rank for rank in needed if rank not in there and self.skip.get(rank, 0) < round)

    def due(self, needed: frozenset[int]) -> SliceRound | None:
        """Return the next round if it is complete.

        Rounds that are lost with a server's memory are passed over; the last one of several is returned,
        without parts, since other slices of the key may have parts of it.
        """
        while self.skip or len(self.ranks(self.round + 1)) >= max(1, len(needed)):
            if self.missing(self.round + 1, needed):
                return None
            if self.ranks(self.round + 1) or not self._is_lost(self.round + 2, needed):
                return self._settled_round()
            self.complete()
        return None

    def _is_lost(self, round: int, needed: frozenset[int]) -> bool:
        """Whether all parts of a round are lost with a server's memory."""
        lost = round <= max(self.skip.values(), default=0) and not self.ranks(round)
        return lost and not self.missing(round, needed)

    def complete(self) -> None:
        """One round more is complete."""
        super().complete()
        if self.skip:
            self.skip = {rank: last for rank, last in self.skip.items() if last > self.round}
            self.note()

    def fail(self, failure: Failure) -> None:
        """Keep why the next round failed, until all that have pushed into it are told."""
        untold = set(self.ranks(self.round + 1))
        if untold:
            self.failures[self.round + 1] = (failure, untold)
        if len(self.failures) > _FAILED:
            del self.failures[min(self.failures)]
        self.note()

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
            self.note()

    def lose(self, ranks: set[int], after: int = 0) -> None:
        """Drop what has come of these ranks for rounds that are not complete, and come after this one."""
        for number in self.open_rounds():
            if number > after and not (self.busy == SliceActivity.ROUND and number == self.round + 1):
                self.drop_parts(number, ranks)
        for rank in ranks:
            self.skip.pop(rank, None)
        self.note()

    def last(self, rank: int) -> int:
        """Return the last round that a worker is in, its part of it lost or not: all have waited for it."""
        there = [number for number in self.open_rounds() if rank in self.ranks(number)]
        return max([self.round, self.skip.get(rank, 0), *there])

    def abandon(self) -> list[tuple[WorkerSession, Record]]:
        """Drop all parts, since no round will be complete any more; return what waited for one.

        Writes are still to be done, and who asks for the last round is to be told.
        """
        waiting = self.take_push_waiters()
        for one in self.take_value_waiters():
            if one[1].kind == RecordKind.LAST_ROUND:
                self.wait_for_value(*one)
            else:
                waiting.append(one[:2])
        waiting += [one[:2] for one in self.queue if one[1].kind not in WRITES]
        self.queue = deque(one for one in self.queue if one[1].kind in WRITES)
        for number in self.open_rounds():
            self.drop_parts(number)
        self.note()
        return waiting

    def base(self) -> int:
        """Round after which a worker that comes now begins."""
        return self.round + (self.busy == SliceActivity.ROUND)
