"""The workers of a store at a server: what has come of each, what it waits for, and what a step tells it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..protocol.duplicate_filter import DuplicateFilter
from ..protocol.events import Action, Apply, Attachment, Reply, Send, SliceRound
from ..protocol.messages import SEQUENCE, Attach, Attached, Batch, Failure, Kind, LeftOut, Record

_FAILURES = 1024  # failed requests that are remembered for one worker


@dataclass(slots=True, eq=False)
class WorkerSession:
    """A worker that has attached."""

    store: int
    rank: int
    incarnation: int
    peer: Hashable
    duplicates: DuplicateFilter
    epoch: int = 0  # of a view that it knew, and whose join point it had reached if there is one
    gone: bool = False
    received: int = 0
    reported: int = 0
    report: bool = False
    waiting: set[int] = field(default_factory=set)  # sequences without an answer
    failures: dict[int, Failure] = field(default_factory=dict)
    answers: list[tuple[Kind, Record, int, Any]] = field(default_factory=list)
    replayed: int = 0  # requests up to here may have come before the server was restarted

    def __post_init__(self) -> None:
        self.replayed = max(self.duplicates.above, default=self.duplicates.low)


class StepEffects:
    """What one step of a server comes to: replies first, since work may change what they read."""

    __slots__ = ("actions", "jobs", "touched", "unsaved", "work")

    def __init__(self, saves: bool) -> None:
        #: Answers that wait for a snapshot; None: none does.
        self.unsaved: list[tuple[WorkerSession, Record]] | None = [] if saves else None
        self.actions: list[Action] = []
        self.touched: list[WorkerSession] = []
        self.jobs: dict[int, list[SliceRound]] = {}
        self.work: list[Action] = []

    def answer(
        self, session: WorkerSession, kind: Kind, record: Record, round: int, detail: Any = None
    ) -> None:
        """Answer one request."""
        if session.gone:
            return
        session.waiting.discard(record[SEQUENCE])
        if not session.answers and not session.report:
            self.touched.append(session)
        session.answers.append((kind, record, round, detail))

    def fail(self, session: WorkerSession, record: Record, round: int, failure: Failure) -> None:
        """Answer that a request has failed, now and whenever it is repeated."""
        session.failures[record.sequence] = failure
        if len(session.failures) > _FAILURES:
            del session.failures[next(iter(session.failures))]
        self.answer(session, Kind.FAILED, record, round, failure)

    def report(self, session: WorkerSession) -> None:
        """Tell the worker at least how much has come."""
        if not session.answers and not session.report:
            self.touched.append(session)
        session.report = True

    def job(self, store: int, job: SliceRound) -> None:
        """Have a round summed."""
        jobs = self.jobs.get(store)
        if jobs is None:
            jobs = self.jobs[store] = []
        jobs.append(job)

    def end(self) -> list[Action]:
        """Return all actions, in order; what comes now belongs to the next step."""
        for session in self.touched:
            head = Batch(session.store, session.rank, session.incarnation, 0, [], (), session.received)
            self.actions.append(Reply(session.peer, head, session.answers))
            session.answers = []
            session.report = False
            session.reported = session.received
        self.actions.extend(self.work)
        self.actions.extend(Apply(store, jobs) for store, jobs in self.jobs.items())
        actions, self.actions, self.touched, self.jobs, self.work = self.actions, [], [], {}, []
        return actions


class StoreSessions:
    """The workers that have attached to one store."""

    def __init__(self, store: int, incarnation: int, effects: StepEffects) -> None:
        self._store, self._effects = store, effects
        self._incarnation = incarnation  # of the server
        self.by_rank: dict[int, WorkerSession] = {}
        #: Of a server that has come back, by rank: incarnation, and which of its requests had come.
        self.restored: dict[int, tuple[int, DuplicateFilter]] = {}

    def open(self, peer: Hashable, attach: Attach) -> WorkerSession:
        """Return the session of a worker, made if it has none."""
        session = self.by_rank.get(attach.rank)
        if session is None:
            incarnation, duplicates = self.restored.pop(attach.rank, (-1, DuplicateFilter()))
            if incarnation != attach.incarnation:
                duplicates = DuplicateFilter()
            session = WorkerSession(self._store, attach.rank, attach.incarnation, peer, duplicates)
            self.by_rank[attach.rank] = session
            self._effects.actions.append(
                Attachment(self._store, attach.rank, attach.incarnation, attach.memory)
            )
        session.peer = peer
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
