"""The workers of a store at a server: what has come of each, what it waits for, and what a step tells it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from ..native._native import Effects, Session
from ..protocol.events import Action, Attachment, Send, SliceWrite, Write
from ..protocol.messages import Attach, Attached, Failure, Kind, LeftOut, Record

_FAILURES = 1024  # failed requests that are remembered for one worker


class WorkerSession(Session):
    """A worker that has attached."""

    def __init__(self, store: int, rank: int, incarnation: int, peer: Hashable) -> None:
        self.peer = peer
        self.failures: dict[int, Failure] = {}
        self.early: dict[int, tuple[Record, Sequence[Any]]] = {}  # have overtaken others, and wait for these
        self.report_after = 1 << 20  # bytes of its requests, of which it is told if no answer does
        self.replayed = 0  # requests up to here may have come before the server was restarted

    def restore(self, low: int, above: Iterable[int]) -> None:
        """Take up which requests had come before the server was restarted: all up to `low`, and some."""
        super().restore(low, above)
        self.replayed = max(self.above, default=self.low)


class StepEffects(Effects):
    """What one step of a server comes to: replies first, since work may change what they read."""

    def __init__(self, saves: bool) -> None:
        #: Answers that wait for a snapshot; None: none does.
        self.unsaved: list[tuple[WorkerSession, Record]] | None = [] if saves else None
        self.actions: list[Action] = []
        self.work: list[Action] = []

    def fail(self, session: WorkerSession, record: Record, round: int, failure: Failure) -> None:
        """Answer that a request has failed, now and whenever it is repeated."""
        session.failures[record.sequence] = failure
        if len(session.failures) > _FAILURES:
            del session.failures[next(iter(session.failures))]
        self.answer(session, Kind.FAILED, record, round, failure)

    def write(self, store: int, write: SliceWrite) -> None:
        """Have a slice written, together with the others of this step: one answer for all takes least."""
        last = self.work[-1] if self.work else None
        if isinstance(last, Write) and last.store == store:
            last.writes.append(write)
        else:
            self.work.append(Write(store, [write]))

    def end(self) -> list[Action]:
        """Return all actions, in order; what comes now belongs to the next step."""
        actions = [*self.actions, *self.replies(), *self.work, *self.rounds()]
        self.actions, self.work = [], []
        return actions


class StoreSessions:
    """The workers that have attached to one store."""

    def __init__(self, store: int, incarnation: int, effects: StepEffects) -> None:
        self._store, self._effects = store, effects
        self._incarnation = incarnation  # of the server
        self.by_rank: dict[int, WorkerSession] = {}
        #: Of a server that has come back, by rank: incarnation, and which of its requests had come.
        self.restored: dict[int, tuple[int, int, list[int]]] = {}

    def open(self, peer: Hashable, attach: Attach, seat: int | None = None) -> WorkerSession:
        """Return the session of a worker, made if it has none; with a seat, it pushes for a host."""
        session = self.by_rank.get(attach.rank)
        if session is None:
            session = WorkerSession(self._store, attach.rank, attach.incarnation, peer)
            incarnation, low, above = self.restored.pop(attach.rank, (-1, 0, []))
            if incarnation == attach.incarnation:
                session.restore(low, above)
            if seat is not None:
                session.push_for_host(seat)
            self.by_rank[attach.rank] = session
            self._effects.actions.append(
                Attachment(self._store, attach.rank, attach.incarnation, attach.memory, attach.host)
            )
        session.resume(attach.next, attach.unanswered)
        session.peer = peer
        session.report_after = max(1, attach.report)
        session.epoch = max(session.epoch, attach.epoch)
        return session

    def welcome(self, session: WorkerSession, join_point: tuple[tuple[int, int], ...]) -> None:
        """Tell a worker that its requests are taken from now on."""
        attached = Attached(self._incarnation, "", session.epoch, join_point)
        self._effects.actions.append(Send(session.peer, attached))

    def close(self, rank: int) -> WorkerSession:
        """Forget a worker; what still waits for it has nobody to answer."""
        session = self.by_rank.pop(rank)
        session.gone = True
        self._effects.actions.append(Attachment(self._store, rank, session.incarnation, None))
        return session

    def send(self, message: LeftOut) -> None:
        """Tell all workers."""
        self._effects.actions.extend(Send(session.peer, message) for session in self.by_rank.values())

    def have_reached(self, ranks: Iterable[int], epoch: int) -> bool:
        """Whether all of these know the view of this epoch, and have reached its join point."""
        sessions = (self.by_rank.get(rank) for rank in ranks)
        return all(session is not None and session.epoch >= epoch for session in sessions)
