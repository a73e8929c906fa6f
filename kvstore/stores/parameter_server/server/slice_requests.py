"""What requests do to the slices of one store: rounds, writes, and who waits for what."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..native._native import SliceTable, SliceValue, TableRows, applied_usual
from ..protocol.events import AbortJobs, ForgetSlices, SliceRound, SliceWrite, WithdrawJobs
from ..protocol.messages import (
    FLAGS,
    KIND,
    PROBE,
    ROUND,
    SEQUENCE,
    SLICE,
    Failure,
    LeftOutNotice,
    Record,
    RecordKind,
)
from .round_members import RoundMembers
from .slice_rounds import OPEN, WRITES, Frames, SliceActivity, SliceRounds
from .worker_sessions import StepEffects, StoreSessions, WorkerSession

_PUSH, _PULL, _PUSHPULL, _INIT = RecordKind.PUSH, RecordKind.PULL, RecordKind.PUSHPULL, RecordKind.INIT
_DONE, _VALUE, _UNKNOWN, _LAST_ROUND = (
    RecordKind.DONE,
    RecordKind.VALUE,
    RecordKind.UNKNOWN,
    RecordKind.LAST_ROUND,
)
_PUSHES = frozenset((_PUSH, _PUSHPULL))
_VALUE_READS = frozenset((_PULL, RecordKind.PULL_ROWS, RecordKind.FETCH_STATE))
_READS = _VALUE_READS | {_LAST_ROUND}
_VALUES = frozenset((_INIT, RecordKind.ASSIGN))
_ROUND, _WRITE = SliceActivity.ROUND, SliceActivity.WRITE

#: Rounds ahead of the complete one in which a worker that keeps to the rules can never push.
_TOO_FAR = 64


class SliceRequests:
    """The slices of one store, and the requests that are made of them.

    Rounds wait for `members`; `sessions` are told of one that goes on without somebody.
    """

    def __init__(
        self, store: int, members: RoundMembers, sessions: StoreSessions, effects: StepEffects
    ) -> None:
        self._store = store
        self._members = members
        self._sessions = sessions
        self._effects = effects
        self.slices: SliceTable[SliceRounds] = SliceTable()

    # ----------------------------------------------------------------------------------------------- requests

    def handle(self, session: WorkerSession, record: Record, frames: Frames) -> None:
        """Handle a request that has come for the first time, or whose slice is free now."""
        kind = record[KIND]
        rounds = self.slices.get(record[SLICE])
        if rounds is None or not rounds.ready:
            self._without_value(session, rounds, record, frames)
        elif kind in _PUSHES:
            if self._members.broken is not None:
                self._effects.fail_request(session, record, rounds.round, self._members.broken)
            elif rounds.sealed:
                self._effects.fail_request(session, record, rounds.round, self._moved(session, rounds))
            elif self._members.sync:
                self._push(session, rounds, record, frames)
            else:
                self._push_at_once(session, rounds, record, frames)
        elif kind in _READS:
            self._pull(session, rounds, record, frames if kind != _PULL else ())
        elif kind in WRITES:
            self._write(session, rounds, record, frames)
        else:
            self._refuse_unknown(session, record)

    def repeat(self, session: WorkerSession, record: Record, frames: Frames) -> None:
        """Answer a request again; never do it again."""
        kind, sequence = record[KIND], record[SEQUENCE]
        rounds = self.slices.get(record[SLICE])
        if session.waits(sequence):
            self._effects.report(session)
        elif sequence in session.failures:
            self._effects.fail_request(
                session, record, rounds.round if rounds else 0, session.failures[sequence]
            )
        elif kind == _PUSH or kind in WRITES:
            self._effects.answer(session, _DONE, record, rounds.round if rounds else 0)
        elif kind == RecordKind.BAD or rounds is None or not rounds.ready:
            self._without_value(session, rounds, record, frames)
        elif record[FLAGS] == PROBE and kind == RecordKind.PULL_ROWS:
            self._effects.answer(session, _UNKNOWN, record, 0)  # which rows, is in the payload
        else:
            self._pull(session, rounds, record, frames if kind != _PUSHPULL else ())

    def _push(self, session: WorkerSession, rounds: SliceRounds, record: Record, frames: Frames) -> None:
        number = record[ROUND]
        ahead = number - rounds.round
        if ahead <= 0 or (ahead == 1 and rounds.busy == _ROUND):
            # Sent again to a server that has come back: its round is complete without it.
            if record[KIND] == _PUSH:
                self._effects.answer(session, _DONE, record, rounds.round)
            else:
                self._pull(session, rounds, record, ())
            return
        if ahead <= _TOO_FAR and rounds.put(number, session.seat, record, frames):
            self._effects.note_arrival(rounds, session.seat, record)
        elif ahead > _TOO_FAR or not self._members.seats:
            why = f"push {record.round} is out of order: round {rounds.round} is complete"
            self._refuse(session, record, why)
            return  # else another worker of its host has sent this sum: it counts once, and both are answered
        if record[KIND] == _PUSHPULL:
            rounds.wait_for_value(session, record, ())
        elif ahead <= OPEN:
            self._effects.answer(session, _DONE, record, rounds.round)
        else:
            rounds.wait_to_push(session, record)
        if ahead == 1:
            self._advance(rounds)

    def _push_at_once(
        self, session: WorkerSession, rounds: SliceRounds, record: Record, frames: Frames
    ) -> None:
        if rounds.busy:
            rounds.enqueue((session, record, frames))
            return
        self._effects.note_arrival(rounds, session.rank, record)
        rounds.begin(_ROUND, session, record)
        parts = [(session.rank, record, frames)]
        job = SliceRound(rounds.id, rounds.round + 1, parts, record.version, record.clock)
        self._effects.job(self._store, job)

    def _write(self, session: WorkerSession, rounds: SliceRounds, record: Record, frames: Frames) -> None:
        if rounds.busy:
            rounds.enqueue((session, record, frames))
        elif record.kind == _INIT and rounds.ready:
            self._effects.answer(session, _DONE, record, rounds.round)
        elif record.kind == RecordKind.FORGET:
            self.forget((rounds.id,))
            self._effects.answer(session, _DONE, record, 0)
        elif record.kind in (RecordKind.SEAL, RecordKind.UNSEAL):
            self._seal(session, rounds, record)
        else:
            rounds.begin(_WRITE, session, record)
            self._effects.write_slice(self._store, SliceWrite(rounds.id, record, frames))

    def _seal(self, session: WorkerSession, rounds: SliceRounds, record: Record) -> None:
        """Refuse pushes from now on, or take them again; a part that waits for its round would be lost."""
        ahead = rounds.open_rounds()
        if record.kind == RecordKind.SEAL and ahead:
            rank = rounds.ranks(ahead[0])[0]
            self._effects.fail_request(session, record, rounds.round, self._moved(session, rounds, rank))
            return
        rounds.seal(record.kind == RecordKind.SEAL)
        self._effects.answer(session, _DONE, record, rounds.round)

    def _without_value(
        self, session: WorkerSession, rounds: SliceRounds | None, record: Record, frames: Frames
    ) -> None:
        if record.kind == RecordKind.FORGET:
            self._effects.answer(session, _DONE, record, 0)
        elif record.kind == RecordKind.BAD:
            self._refuse_unknown(session, record)
        elif record.kind not in _VALUES:
            self._effects.fail_request(session, record, 0, self._no_value(record.slice))
        elif rounds is None or not rounds.defined:
            # The scheduler's word of this slice is still on its way.
            self._slice(record.slice).enqueue((session, record, frames))
        else:
            self._write(session, rounds, record, frames)

    def _slice(self, number: int) -> SliceRounds:
        """Return what is known of a slice, made when first needed."""
        rounds = self.slices.get(number)
        if rounds is None:
            rounds = self.slices[number] = SliceRounds(self._store, number)
        return rounds

    # ------------------------------------------------------------------------------------------------- reads

    def _pull(self, session: WorkerSession, rounds: SliceRounds, record: Record, frames: Frames) -> None:
        """Answer now, or note that the request waits."""
        broken = self._members.broken
        if broken is not None and not self._readable(rounds, record):
            # whoever knows of the loss asks for whatever there is
            self._effects.fail_request(session, record, rounds.round, broken)
        elif rounds.sealed and not self._readable(rounds, record):
            self._effects.fail_request(session, record, rounds.round, self._moved(session, rounds))
        elif rounds.busy or not self._readable(rounds, record):
            self._wait_to_read(session, rounds, record, frames)
        else:
            self._answer_read(session, rounds, record, frames)

    def _wait_to_read(
        self, session: WorkerSession, rounds: SliceRounds, record: Record, frames: Frames
    ) -> None:
        """Let a read wait; without rounds for the pushes that have come before it and wait, too."""
        if self._members.sync or record[KIND] not in _VALUE_READS:
            rounds.wait_for_value(session, record, frames)
        else:
            rounds.enqueue((session, record, frames))

    def _readable(self, rounds: SliceRounds, record: Record) -> bool:
        """Whether the round that a request wants is complete."""
        if record[KIND] == _LAST_ROUND:
            return self._members.broken is not None
        return record[ROUND] <= rounds.round or not self._members.sync

    def _answer_read(
        self, session: WorkerSession, rounds: SliceRounds, record: Record, frames: Frames
    ) -> None:
        """Answer with the value, the last round, or a failure that the worker has to be told of."""
        if record[KIND] == _LAST_ROUND:
            self._effects.answer(session, _DONE, record, rounds.round)
        elif not rounds.failures or not self._tell_failure(session, rounds, record):
            self._effects.answer(session, _VALUE, record, rounds.round, frames)

    def _tell_failure(self, session: WorkerSession, rounds: SliceRounds, record: Record) -> bool:
        """Answer that a round failed, of each once to each worker that pushed into it; then it may read."""
        told = rounds.tell(session.seat, record[ROUND]) if record[KIND] != RecordKind.FETCH_STATE else None
        if told is None:
            return False
        number, failure = told
        if number < record[ROUND]:
            failure = msgspec.structs.replace(failure, text=f"{failure.text}; that was in round {number}")
        self._effects.fail_request(session, record, rounds.round, failure)
        return True

    # ----------------------------------------------------------------------------------------------- progress

    def applied(self, results: Iterable[tuple[int, Failure | None]]) -> None:
        """Take what became of jobs and writes."""
        for slice_, failure in results:
            rounds = self.slices.get(slice_)
            if rounds is None or not rounds.busy:
                continue
            if failure is None and applied_usual(self._effects, self._members.of_rounds, rounds):
                continue
            activity, current = rounds.busy, rounds.end()
            if activity == _ROUND:
                if failure is not None and self._members.sync:
                    rounds.fail(failure)
                self._effects.count_round(rounds)
                rounds.complete()
            if current is not None:
                self._answer_current(*current, rounds, failure)
            self._settle(rounds)
            self._advance(rounds)

    def given_up(self, slices: Iterable[int]) -> None:
        """Take back rounds that were not done: the store is broken, or their worker is gone."""
        for slice_ in slices:
            rounds = self.slices.get(slice_)
            if rounds is not None and rounds.busy == _ROUND:
                rounds.end()
                self._settle(rounds)

    def advance_all(self) -> None:
        """Begin the rounds that wait for nobody any more."""
        for rounds in list(self.slices.values()):
            self._advance(rounds)

    def _answer_current(
        self, session: WorkerSession, record: Record, rounds: SliceRounds, failure: Failure | None
    ) -> None:
        """Answer the request that alone has been done."""
        valued = failure is None and record.kind in _VALUES
        rounds.ready = rounds.ready or valued
        if failure is not None:
            self._effects.fail_request(session, record, rounds.round, failure)
        elif record.kind == _PUSHPULL:
            self._effects.answer(session, _VALUE, record, rounds.round, ())
        elif valued and not rounds.kept and self._effects.unsaved is not None:
            self._effects.unsaved.append((session, record))
        else:
            self._effects.answer(session, _DONE, record, rounds.round)

    def _settle(self, rounds: SliceRounds) -> None:
        """Answer whoever waited for what the slice is now."""
        for session, record in rounds.take_push_waiters():
            if record.round <= rounds.round + OPEN:
                self._effects.answer(session, _DONE, record, rounds.round)
            else:
                rounds.wait_to_push(session, record)
        for one in rounds.take_value_waiters() if not rounds.busy else ():
            if self._readable(rounds, one[1]):
                self._answer_read(one[0], rounds, one[1], one[2])
            else:
                rounds.wait_for_value(*one)
        while rounds.queue and rounds.defined and not rounds.busy and rounds.id in self.slices:
            session, record, frames = rounds.queue.popleft()
            rounds.note()
            if not session.gone:
                self.handle(session, record, frames)

    def _advance(self, rounds: SliceRounds) -> None:
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
        if job is not None:
            rounds.busy = _ROUND  # so that nobody reads what other slices of the key may still change
        if rounds.round != before:
            self._settle(rounds)
        if job is not None:
            for rank, last in members.left_out(job.slice, job.round) if members.left else ():
                self._sessions.send_all(LeftOutNotice(self._store, job.slice, rank, last))
            self._effects.job(self._store, job)

    # --------------------------------------------------------------------------------------------- who waits

    def leave(self, session: WorkerSession) -> None:
        """Let a worker that is gone wait no more."""
        for rounds in self.slices.values():
            rounds.leave(session)
        if not self._members.sync:
            self._effects.work.append(WithdrawJobs(self._store, session.rank))

    def fail_waiting(self, failure: Failure) -> None:
        """Let nobody wait for a round any more, since the store is broken.

        Writes are still done, and who asks for the last round is answered.
        """
        for rounds in list(self.slices.values()):
            for session, record in rounds.abandon():
                self._effects.fail_request(session, record, rounds.round, failure)
            self._settle(rounds)
        self._effects.work.append(AbortJobs(self._store))

    def define(self, slices: Iterable[int]) -> None:
        """Slices of this server that will come, or have come back from a snapshot."""
        for slice_ in slices:
            rounds = self._slice(slice_)
            rounds.defined = True
            self._settle(rounds)

    def hold(self, slice_: int, value: SliceValue | TableRows) -> None:
        """Know where a slice has its value."""
        rounds = self.slices.get(slice_)
        if rounds is not None:
            rounds.hold(value)

    def forget(self, slices: Iterable[int]) -> None:
        """Drop slices, and whoever waits for them."""
        dropped = []
        for slice_ in slices:
            rounds = self.slices.pop(slice_, None)
            if rounds is None:
                continue
            dropped.append(slice_)
            waiting = [one[:2] for one in (*rounds.take_value_waiters(), *rounds.queue)]
            for session, record in [*waiting, *rounds.take_push_waiters()]:
                self._effects.fail_request(session, record, 0, self._no_value(slice_))
        if dropped:
            self._effects.work.append(ForgetSlices(self._store, tuple(dropped)))

    # ---------------------------------------------------------------------------------------------- refusals

    def _no_value(self, slice_: int) -> Failure:
        """Make the error of a request for a slice without value, perhaps since the server was restarted."""
        what = f"slice {slice_} of store {self._store}"
        if self._members.restarted:
            text = f"{what} is lost: its server was started again, and there is no snapshot of it"
            return Failure("StateFileError", f"{text}; start the job again from what was saved last")
        return Failure("KeyNotFoundError", f"{what} has no value on this server; init its key first")

    def _moved(self, session: WorkerSession, rounds: SliceRounds, rank: int = -1) -> Failure:
        """Make the error of a push into a slice whose key moves, by this worker or by `rank`."""
        text = (
            f"worker {session.rank if rank < 0 else rank} has pushed into slice {rounds.id} of store "
            f"{self._store} after round {rounds.round}, and its key moves to one server then, for an "
            "optimizer that needs whole tensors: set the optimizer after the same push on all workers"
        )
        return Failure("ConfigError", text)

    def _refuse_unknown(self, session: WorkerSession, record: Record) -> None:
        """Answer a request that the protocol does not know."""
        bad = record.kind == RecordKind.BAD
        why = "numbers of a request do not fit together" if bad else f"no request has kind {int(record.kind)}"
        self._refuse(session, record, f"{why}; the request was not carried out")

    def _refuse(self, session: WorkerSession, record: Record, why: str) -> None:
        text = f"worker {session.rank}, slice {record.slice} of store {self._store}: {why}"
        self._effects.fail_request(session, record, 0, Failure("ProtocolError", text))
