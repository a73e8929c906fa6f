"""The requests and replies of a store's workers at a server. Fencing is in `store_machine`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from ..native._native import Effects, Session
from ..protocol.events import Action, SendMessage, SliceWrite, WorkerAttachment, WriteSlices
from ..protocol.messages import AttachReply, AttachRequest, Failure, LeftOutNotice, Record, RecordKind

_FAILURES = 1024  # failed requests that are stored for one worker


class WorkerSession(Session):
    """The session of a worker that has attached."""

    def __init__(self, store: int, rank: int, incarnation: int, peer: Hashable) -> None:
        self.peer = peer
        self.failures: dict[int, Failure] = {}
        self.early: dict[int, tuple[Record, Sequence[Any]]] = {}  # requests that wait for earlier ones
        self.report_after = 1 << 20  # bytes of its requests that are acknowledged if no reply does
        self.replayed = 0  # requests up to this number may have arrived before the restart

    def restore(self, low: int, above: Iterable[int]) -> None:
        """Set the requests that had arrived before the server's restart: all up to `low`, and some above."""
        super().restore(low, above)
        self.replayed = max(self.above, default=self.low)


class StepEffects(Effects):
    """The effects of one step of a server: replies first, because jobs may change the values they read."""

    def __init__(self, saves: bool) -> None:
        #: Answers that wait for a snapshot; None: there are no snapshots.
        self.unsaved: list[tuple[WorkerSession, Record]] | None = [] if saves else None
        self.actions: list[Action] = []
        self.work: list[Action] = []

    def fail_request(self, session: WorkerSession, record: Record, round: int, failure: Failure) -> None:
        """Answer that a request has failed, now and whenever the worker repeats it."""
        session.failures[record.sequence] = failure
        if len(session.failures) > _FAILURES:
            del session.failures[next(iter(session.failures))]
        self.answer(session, RecordKind.FAILED, record, round, failure)

    def write_slice(self, store: int, write: SliceWrite) -> None:
        """Write a slice, together with the other writes of this step: one answer for all costs least."""
        last = self.work[-1] if self.work else None
        if isinstance(last, WriteSlices) and last.store == store:
            last.writes.append(write)
        else:
            self.work.append(WriteSlices(store, [write]))

    def end_step(self) -> list[Action]:
        """Return all actions, in order; later effects belong to the next step."""
        actions = [*self.actions, *self.replies(), *self.work, *self.rounds()]
        self.actions, self.work = [], []
        return actions


class StoreSessions:
    """The sessions of the workers that have attached to one store."""

    def __init__(self, store: int, incarnation: int, effects: StepEffects) -> None:
        self._store, self._effects = store, effects
        self._incarnation = incarnation  # of the server
        self.by_rank: dict[int, WorkerSession] = {}
        #: Of a restarted server, by rank: incarnation, and the requests that had arrived.
        self.restored: dict[int, tuple[int, int, list[int]]] = {}

    def open_session(self, peer: Hashable, attach: AttachRequest, seat: int | None = None) -> WorkerSession:
        """Return the session of a worker, a new one if it has none; with a seat, it pushes for a host."""
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
                WorkerAttachment(self._store, attach.rank, attach.incarnation, attach.memory, attach.host)
            )
        session.resume(attach.next, attach.unanswered)
        session.peer = peer
        session.report_after = max(1, attach.report)
        session.epoch = max(session.epoch, attach.epoch)
        return session

    def send_attached(self, session: WorkerSession, join_point: tuple[tuple[int, int], ...]) -> None:
        """Inform a worker that its requests are accepted from now on."""
        attached = AttachReply(self._incarnation, "", session.epoch, join_point)
        self._effects.actions.append(SendMessage(session.peer, attached))

    def close_session(self, rank: int) -> WorkerSession:
        """Remove a worker's session; its waiting requests are not answered."""
        session = self.by_rank.pop(rank)
        session.gone = True
        self._effects.actions.append(WorkerAttachment(self._store, rank, session.incarnation, None))
        return session

    def send_all(self, message: LeftOutNotice) -> None:
        """Send a message to all workers."""
        self._effects.actions.extend(SendMessage(session.peer, message) for session in self.by_rank.values())

    def have_reached(self, ranks: Iterable[int], epoch: int) -> bool:
        """Return whether all of these know the view of this epoch, and have reached its join point."""
        sessions = (self.by_rank.get(rank) for rank in ranks)
        return all(session is not None and session.epoch >= epoch for session in sessions)
