"""What requests do to the slices of one store: rounds, writes, and who waits for what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..protocol.events import Abort, Forget, SliceRound, Write
from ..protocol.messages import FLAGS, KIND, PROBE, ROUND, SEQUENCE, SLICE, Failure, Kind, LeftOut, Record
from .refusals import no_value, not_in_protocol, out_of_order
from .round_members import RoundMembers
from .sessions import StepEffects, StoreSessions, WorkerSession
from .slice_reads import SliceReads
from .slice_rounds import OPEN, WRITES, SliceActivity, SliceRounds

_PUSH, _PULL, _PUSHPULL, _INIT = Kind.PUSH, Kind.PULL, Kind.PUSHPULL, Kind.INIT
_DONE, _VALUE, _UNKNOWN, _LAST_ROUND = Kind.DONE, Kind.VALUE, Kind.UNKNOWN, Kind.LAST_ROUND
_PUSHES = frozenset((_PUSH, _PUSHPULL))
_READS = frozenset((_PULL, Kind.PULL_ROWS, Kind.FETCH_STATE, _LAST_ROUND))
_VALUES = frozenset((_INIT, Kind.ASSIGN))
_FREE, _ROUND, _WRITE = SliceActivity.NOTHING, SliceActivity.ROUND, SliceActivity.WRITE

#: Rounds ahead of the complete one in which a worker that keeps to the rules can never push.
_TOO_FAR = 64


class SliceRequests:
    """The slices of one store, and the requests that are made of them.

    Parameters
    ----------
    store : int
        The store's number.
    members : RoundMembers
        For whom rounds wait.
    sessions : StoreSessions
        Whom to tell of a round that goes on without somebody.
    keep : callable, optional
        Called with the answers that wait for a snapshot, where there are any.
    """

    def __init__(
        self,
        store: int,
        members: RoundMembers,
        sessions: StoreSessions,
        keep: Callable[[WorkerSession, Record], None] | None = None,
    ) -> None:
        self._store = store
        self._members = members
        self._sessions = sessions
        self._keep = keep
        self._reads = SliceReads(members)
        self.slices: dict[int, SliceRounds] = {}

    # ----------------------------------------------------------------------------------------------- requests

    def handle(
        self, session: WorkerSession, record: Record, frames: Sequence[Any], effects: StepEffects
    ) -> None:
        """Handle a request that has come for the first time, or whose slice is free now."""
        kind = record[KIND]
        rounds = self.slices.get(record[SLICE])
        if rounds is None or not rounds.ready:
            self._without_value(session, rounds, record, frames, effects)
        elif kind in _PUSHES:
            if self._members.broken is not None:
                effects.fail(session, record, rounds.round, self._members.broken)
            elif self._members.sync:
                self._push(session, rounds, record, frames, effects)
            else:
                self._push_at_once(session, rounds, record, frames, effects)
        elif kind in _READS:
            self._reads.pull(session, rounds, record, frames if kind != _PULL else (), effects)
        elif kind in WRITES:
            self._write(session, rounds, record, frames, effects)
        else:
            effects.fail(session, record, 0, not_in_protocol(self._store, session.rank, record))

    def repeat(
        self, session: WorkerSession, record: Record, frames: Sequence[Any], effects: StepEffects
    ) -> None:
        """Answer a request again; never do it again."""
        kind, sequence = record[KIND], record[SEQUENCE]
        rounds = self.slices.get(record[SLICE])
        if sequence in session.waiting:
            effects.report(session)
        elif sequence in session.failures:
            effects.fail(session, record, rounds.round if rounds else 0, session.failures[sequence])
        elif kind == _PUSH or kind in WRITES:
            effects.answer(session, _DONE, record, rounds.round if rounds else 0)
        elif kind == Kind.BAD or rounds is None or not rounds.ready:
            self._without_value(session, rounds, record, frames, effects)
        elif record[FLAGS] == PROBE and kind == Kind.PULL_ROWS:
            effects.answer(session, _UNKNOWN, record, 0)  # which rows, is in the payload
        else:
            self._reads.pull(session, rounds, record, frames if kind != _PUSHPULL else (), effects)

    def _push(
        self,
        session: WorkerSession,
        rounds: SliceRounds,
        record: Record,
        frames: Sequence[Any],
        effects: StepEffects,
    ) -> None:
        number = record[ROUND]
        ahead = number - rounds.round
        if ahead <= 0 or (ahead == 1 and rounds.busy == _ROUND):
            # Sent again to a server that has come back: its round is complete without it.
            if record[KIND] == _PUSH:
                effects.answer(session, _DONE, record, rounds.round)
            else:
                self._reads.pull(session, rounds, record, (), effects)
            return
        if ahead > _TOO_FAR or not rounds.put(number, (session.rank, record, frames)):
            effects.fail(session, record, 0, out_of_order(self._store, session.rank, record, rounds.round))
            return
        if record[KIND] == _PUSHPULL:
            session.waiting.add(record[SEQUENCE])
            rounds.pulls.append((session, record, ()))
        elif ahead <= OPEN:
            effects.answer(session, _DONE, record, rounds.round)
        else:
            session.waiting.add(record[SEQUENCE])
            rounds.held.append((session, record))
        if ahead == 1 and len(rounds.parts[number]) + len(rounds.skip) >= len(self._members.needed):
            self._advance(rounds, effects)

    def _push_at_once(
        self,
        session: WorkerSession,
        rounds: SliceRounds,
        record: Record,
        frames: Sequence[Any],
        effects: StepEffects,
    ) -> None:
        session.waiting.add(record[SEQUENCE])
        if rounds.busy:
            rounds.queue.append((session, record, frames))
            return
        rounds.busy = _ROUND
        rounds.current = (session, record)
        parts = [(session.rank, record, frames)]
        job = SliceRound(rounds.id, rounds.round + 1, parts, record.version, record.clock)
        effects.job(self._store, job)

    def _write(
        self,
        session: WorkerSession,
        rounds: SliceRounds,
        record: Record,
        frames: Sequence[Any],
        effects: StepEffects,
    ) -> None:
        if rounds.busy:
            session.waiting.add(record[SEQUENCE])
            rounds.queue.append((session, record, frames))
        elif record.kind == _INIT and rounds.ready:
            effects.answer(session, _DONE, record, rounds.round)
        elif record.kind == Kind.FORGET:
            self.forget((rounds.id,), effects)
            effects.answer(session, _DONE, record, 0)
        else:
            session.waiting.add(record[SEQUENCE])
            rounds.busy = _WRITE
            rounds.current = (session, record)
            effects.work.append(Write(self._store, rounds.id, session.rank, record, frames))

    def _without_value(
        self,
        session: WorkerSession,
        rounds: SliceRounds | None,
        record: Record,
        frames: Sequence[Any],
        effects: StepEffects,
    ) -> None:
        if record.kind == Kind.FORGET:
            effects.answer(session, _DONE, record, 0)
        elif record.kind == Kind.BAD:
            effects.fail(session, record, 0, not_in_protocol(self._store, session.rank, record))
        elif record.kind not in _VALUES:
            effects.fail(session, record, 0, no_value(self._store, record.slice, self._members.restarted))
        elif rounds is None or not rounds.defined:
            # The scheduler's word of this slice is still on its way.
            rounds = self.slices.setdefault(record.slice, SliceRounds(record.slice))
            session.waiting.add(record[SEQUENCE])
            rounds.queue.append((session, record, frames))
        else:
            self._write(session, rounds, record, frames, effects)

    # ----------------------------------------------------------------------------------------------- progress

    def applied(self, results: Iterable[tuple[int, Failure | None]], effects: StepEffects) -> None:
        """Take what became of jobs and writes."""
        for slice_, failure in results:
            rounds = self.slices.get(slice_)
            if rounds is None or not rounds.busy:
                continue
            activity, rounds.busy = rounds.busy, _FREE
            current, rounds.current = rounds.current, None
            if activity == _ROUND:
                if failure is not None and self._members.sync:
                    rounds.fail(failure)
                rounds.complete()
            if current is not None:
                self._answer_current(*current, rounds, failure, effects)
            self._settle(rounds, effects)
            self._advance(rounds, effects)

    def given_up(self, slices: Iterable[int], effects: StepEffects) -> None:
        """Take back rounds that were not done, since the store is broken."""
        for slice_ in slices:
            rounds = self.slices.get(slice_)
            if rounds is not None and rounds.busy == _ROUND:
                rounds.busy = _FREE
                self._settle(rounds, effects)

    def advance_all(self, effects: StepEffects) -> None:
        """Begin the rounds that wait for nobody any more."""
        for rounds in list(self.slices.values()):
            self._advance(rounds, effects)

    def _answer_current(
        self,
        session: WorkerSession,
        record: Record,
        rounds: SliceRounds,
        failure: Failure | None,
        effects: StepEffects,
    ) -> None:
        """Answer the request that alone has been done."""
        valued = failure is None and record.kind in _VALUES
        rounds.ready = rounds.ready or valued
        if failure is not None:
            effects.fail(session, record, rounds.round, failure)
        elif record.kind == _PUSHPULL:
            effects.answer(session, _VALUE, record, rounds.round, ())
        elif valued and not rounds.kept and self._keep is not None:
            self._keep(session, record)
        else:
            effects.answer(session, _DONE, record, rounds.round)

    def _settle(self, rounds: SliceRounds, effects: StepEffects) -> None:
        """Answer whoever waited for what the slice is now."""
        if rounds.held:
            waiting, rounds.held = rounds.held, []
            for session, record in waiting:
                if record.round <= rounds.round + OPEN:
                    effects.answer(session, _DONE, record, rounds.round)
                else:
                    rounds.held.append((session, record))
        if rounds.pulls and not rounds.busy:
            pulls, rounds.pulls = rounds.pulls, []
            for one in pulls:
                if self._reads.readable(rounds, one[1]):
                    self._reads.answer(one[0], rounds, one[1], one[2], effects)
                else:
                    rounds.pulls.append(one)
        while rounds.queue and rounds.defined and not rounds.busy and rounds.id in self.slices:
            session, record, frames = rounds.queue.popleft()
            if not session.gone:
                self.handle(session, record, frames, effects)

    def _advance(self, rounds: SliceRounds, effects: StepEffects) -> None:
        """Begin the next round of the slice, if it is complete."""
        members = self._members
        if rounds.busy or not members.sync or members.returning is not None or not rounds.ready:
            return
        if members.broken is not None:
            return
        # While one of the others has not reached the join point, every round that it has pushed into is one
        # of those that go on without who came back. When all have, the scheduler's word of it is on its way.
        if members.collecting_join_point and self._sessions.have_reached(members.needed, members.epoch):
            return
        before = rounds.round
        job = rounds.due(members.needed)
        if rounds.round != before:
            self._settle(rounds, effects)
        if job is not None and not rounds.busy:
            rounds.busy = _ROUND
            for rank, last in members.left_out(job.slice, job.round) if members.left else ():
                self._sessions.send(LeftOut(self._store, job.slice, rank, last), effects)
            effects.job(self._store, job)

    # --------------------------------------------------------------------------------------------- who waits

    def leave(self, session: WorkerSession) -> None:
        """Let a worker that is gone wait no more."""
        for rounds in self.slices.values():
            rounds.leave(session)

    def fail_waiting(self, failure: Failure, effects: StepEffects) -> None:
        """Let nobody wait for a round any more, since the store is broken.

        Writes are still done, and who asks for the last round is answered.
        """
        for rounds in list(self.slices.values()):
            for session, record in rounds.abandon():
                effects.fail(session, record, rounds.round, failure)
            self._settle(rounds, effects)
        effects.work.append(Abort(self._store))

    def define(self, slices: Iterable[int], effects: StepEffects) -> None:
        """Slices of this server that will come, or have come back from a snapshot."""
        for slice_ in slices:
            rounds = self.slices.setdefault(slice_, SliceRounds(slice_))
            rounds.defined = True
            self._settle(rounds, effects)

    def forget(self, slices: Iterable[int], effects: StepEffects) -> None:
        """Drop slices, and whoever waits for them."""
        dropped = []
        for slice_ in slices:
            rounds = self.slices.pop(slice_, None)
            if rounds is None:
                continue
            dropped.append(slice_)
            waiting = [(one[0], one[1]) for one in (*rounds.pulls, *rounds.queue)] + rounds.held
            for session, record in waiting:
                effects.fail(session, record, 0, no_value(self._store, slice_, self._members.restarted))
        if dropped:
            effects.work.append(Forget(self._store, tuple(dropped)))
