"""The workers of a store at a server: what has come of each, what it waits for, and what a step tells it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from ..protocol.duplicate_filter import DuplicateFilter
from ..protocol.events import Action, Apply, Attachment, Reply, Send, SliceRound
from ..protocol.messages import SEQUENCE, Attach, Attached, Batch, Failure, Kind, LeftOut, Record

_FAILURES = 1024  # failed requests that are remembered for one worker


class WorkerSession:
    """A worker that has attached."""

    __slots__ = (
        "answers",
        "duplicates",
        "epoch",
        "failures",
        "gone",
        "incarnation",
        "peer",
        "rank",
        "received",
        "replayed",
        "report",
        "reported",
        "store",
        "waiting",
    )

    def __init__(
        self, store: int, rank: int, incarnation: int, peer: Hashable, duplicates: DuplicateFilter
    ) -> None:
        self.store = store
        self.rank = rank
        self.incarnation = incarnation
        self.peer = peer
        self.duplicates = duplicates
        #: Requests up to here may have come before the server was restarted.
        self.replayed = max(duplicates.above, default=duplicates.low)
        self.epoch = 0  # of a view that it knew, and whose join point it had reached if there is one
        self.gone = False
        self.received = 0
        self.reported = 0
        self.report = False
        self.waiting: set[int] = set()  # sequences without an answer
        self.failures: dict[int, Failure] = {}
        self.answers: list[tuple[Kind, Record, int, Any]] = []

    def remember(self, sequence: int, failure: Failure) -> None:
        """Keep why a request failed, should its answer be lost."""
        self.failures[sequence] = failure
        if len(self.failures) > _FAILURES:
            del self.failures[next(iter(self.failures))]


class StoreSessions:
    """The workers that have attached to one store."""

    def __init__(self, store: int, incarnation: int) -> None:
        self._store = store
        self._incarnation = incarnation  # of the server
        self.by_rank: dict[int, WorkerSession] = {}
        #: Of a server that has come back, by rank: incarnation, and which of its requests had come.
        self.restored: dict[int, tuple[int, DuplicateFilter]] = {}

    def open(self, peer: Hashable, attach: Attach, effects: StepEffects) -> WorkerSession:
        """Return the session of a worker, made if it has none."""
        session = self.by_rank.get(attach.rank)
        if session is None:
            incarnation, duplicates = self.restored.pop(attach.rank, (-1, DuplicateFilter()))
            if incarnation != attach.incarnation:
                duplicates = DuplicateFilter()
            session = WorkerSession(self._store, attach.rank, attach.incarnation, peer, duplicates)
            self.by_rank[attach.rank] = session
            effects.actions.append(Attachment(self._store, attach.rank, attach.incarnation, attach.memory))
        session.peer = peer
        session.epoch = max(session.epoch, attach.epoch)
        return session

    def welcome(
        self, session: WorkerSession, join_point: tuple[tuple[int, int], ...], effects: StepEffects
    ) -> None:
        """Tell a worker that its requests are taken from now on."""
        attached = Attached(self._incarnation, "", session.epoch, join_point)
        effects.actions.append(Send(session.peer, attached))

    def close(self, rank: int, effects: StepEffects) -> WorkerSession:
        """Forget a worker; what still waits for it has nobody to answer."""
        session = self.by_rank.pop(rank)
        session.gone = True
        effects.actions.append(Attachment(self._store, rank, session.incarnation, None))
        return session

    def send(self, message: LeftOut, effects: StepEffects) -> None:
        """Tell all workers."""
        effects.actions.extend(Send(session.peer, message) for session in self.by_rank.values())

    def have_reached(self, ranks: Iterable[int], epoch: int) -> bool:
        """Whether all of these know the view of this epoch, and have reached its join point."""
        sessions = (self.by_rank.get(rank) for rank in ranks)
        return all(session is not None and session.epoch >= epoch for session in sessions)


class StepEffects:
    """What one step of a server comes to: replies first, since work may change what they read."""

    __slots__ = ("actions", "jobs", "touched", "work")

    def __init__(self) -> None:
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
        session.remember(record.sequence, failure)
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
        """All actions, in order."""
        for session in self.touched:
            head = Batch(session.store, session.rank, session.incarnation, 0, [], (), session.received)
            self.actions.append(Reply(session.peer, head, session.answers))
            session.answers = []
            session.report = False
            session.reported = session.received
        self.actions.extend(self.work)
        self.actions.extend(Apply(store, jobs) for store, jobs in self.jobs.items())
        return self.actions
