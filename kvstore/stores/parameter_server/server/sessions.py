"""One worker at a server: what has come of it, what it waits for, and what a step tells it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ..protocol.duplicate_filter import DuplicateFilter
from ..protocol.events import Action, Apply, Reply, SliceRound
from ..protocol.messages import Batch, Failure, Kind, Record

_FAILURES = 1024  # failed requests that are remembered for one worker


class WorkerSession:
    """A worker that has attached."""

    __slots__ = (
        "answers",
        "attached",
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
        "window",
    )

    def __init__(
        self, store: int, rank: int, incarnation: int, peer: Hashable, window: DuplicateFilter
    ) -> None:
        self.store = store
        self.rank = rank
        self.incarnation = incarnation
        self.peer = peer
        self.window = window
        #: Requests up to here may be in the window since before the server was restarted.
        self.replayed = max(window.above, default=window.low)
        self.attached = False
        self.epoch = 0  # of a view that it knew, and whose `begin` it had reached if there is one
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


class StepEffects:
    """What one step of a server comes to: replies first, since work may change what they read."""

    __slots__ = ("actions", "jobs", "touched", "work")

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.touched: list[WorkerSession] = []
        self.jobs: dict[int, list[SliceRound]] = {}
        self.work: list[Action] = []

    def answer(self, seat: WorkerSession, kind: Kind, record: Record, round: int, detail: Any = None) -> None:
        """Answer one request."""
        if seat.gone:
            return
        seat.waiting.discard(record[2])
        if not seat.answers and not seat.report:
            self.touched.append(seat)
        seat.answers.append((kind, record, round, detail))

    def fail(self, seat: WorkerSession, record: Record, round: int, failure: Failure) -> None:
        """Answer that a request has failed."""
        self.answer(seat, Kind.FAILED, record, round, failure)

    def report(self, seat: WorkerSession) -> None:
        """Tell the worker at least how much has come."""
        if not seat.answers and not seat.report:
            self.touched.append(seat)
        seat.report = True

    def job(self, store: int, job: SliceRound) -> None:
        """Have a round summed."""
        jobs = self.jobs.get(store)
        if jobs is None:
            jobs = self.jobs[store] = []
        jobs.append(job)

    def end(self) -> list[Action]:
        """All actions, in order."""
        for seat in self.touched:
            head = Batch(seat.store, seat.rank, seat.incarnation, 0, [], (), seat.received)
            self.actions.append(Reply(seat.peer, head, seat.answers))
            seat.answers = []
            seat.report = False
            seat.reported = seat.received
        self.actions.extend(self.work)
        self.actions.extend(Apply(store, jobs) for store, jobs in self.jobs.items())
        return self.actions
