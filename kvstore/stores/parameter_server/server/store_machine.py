"""One store on one server: its slices, who takes part, and what each request does."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import msgspec

from ..protocol.duplicate_filter import DuplicateFilter
from ..protocol.events import Abort, Attachment, Forget, Send, SliceRound, Write
from ..protocol.losses import lost
from ..protocol.messages import (
    PROBE,
    Attach,
    Attached,
    Batch,
    Failure,
    Fenced,
    Kind,
    LeftOut,
    Missing,
    Record,
    View,
)
from .sessions import StepEffects, WorkerSession
from .slice_rounds import OPEN, SliceActivity, SliceRounds

_PUSH, _PULL, _PUSHPULL, _INIT = Kind.PUSH, Kind.PULL, Kind.PUSHPULL, Kind.INIT
_DONE, _VALUE, _FAILED, _UNKNOWN = Kind.DONE, Kind.VALUE, Kind.FAILED, Kind.UNKNOWN
_PUSHES = frozenset((Kind.PUSH, Kind.PUSHPULL))
_LAST_ROUND = Kind.LAST_ROUND
_READS = frozenset((Kind.PULL, Kind.PULL_ROWS, Kind.FETCH_STATE, _LAST_ROUND))
_WRITES = frozenset((Kind.INIT, Kind.ASSIGN, Kind.PUT_STATE, Kind.FORGET))
_FREE, _ROUND, _WRITE = SliceActivity.NOTHING, SliceActivity.ROUND, SliceActivity.WRITE

#: Rounds ahead of the complete one in which a worker that keeps to the rules can never push.
_TOO_FAR = 64


class StoreMachine:
    """What the machine of a server knows of one store."""

    def __init__(self, number: int, incarnation: int, report: int) -> None:
        self.number = number
        self.incarnation = incarnation  # of the server
        self.report = report
        self.epoch = 0
        self.sync = True
        self.members: dict[int, int] = {}  # incarnations by rank
        self.needed: frozenset[int] = frozenset()  # members for whose pushes rounds wait
        self.late: frozenset[int] = frozenset()  # members that came back, and have not begun
        self.gathering = False  # one of them is about to begin: `View.begin`
        self.broken: Failure | None = None
        self.seats: dict[int, WorkerSession] = {}
        self.slots: dict[int, SliceRounds] = {}
        self.version = 0
        #: Of a server that has come back: what the members said of themselves, until all have.
        self.returning: dict[int, Attach] | None = None
        #: Whether this server has taken the place of one that ended.
        self.restarted = False
        self.windows: dict[int, tuple[int, DuplicateFilter]] = {}
        #: Called with the answers that wait for a snapshot, where there are any.
        self.keep: Callable[[WorkerSession, Record], None] | None = None
        self.ahead: list[tuple[Hashable, Batch]] = []  # of an epoch that is not known yet
        #: Who has left without having joined: the last round of each slice that it was in.
        self._left: dict[int, dict[int, int]] = {}
        self._early: dict[int, tuple[Hashable, Attach]] = {}
        self._bases: dict[int, tuple[tuple[int, int], ...]] = {}

    # --------------------------------------------------------------------------------------------- attachment

    def attach(self, peer: Hashable, attach: Attach, turn: StepEffects) -> None:
        """Let a worker in, if it is a member."""
        if attach.epoch > self.epoch:
            self._early[attach.rank] = (peer, attach)
            return
        if self.members.get(attach.rank) != attach.incarnation:
            turn.actions.append(Send(peer, self.fence(attach.rank)))
            return
        seat = self.seats.get(attach.rank)
        if seat is None:
            seat = self._seat(peer, attach, turn)
        seat.peer = peer
        seat.epoch = max(seat.epoch, attach.epoch)
        if seat.attached:
            self._welcome(seat, turn)
        elif self.returning is not None and (not attach.late or attach.rank in self.late):
            self.returning[attach.rank] = attach
            self._return(turn)

    def fence(self, rank: int) -> Fenced:
        """Say that somebody is no member."""
        text = (
            f"worker {rank} is no longer a member of store {self.number}: it was lost, replaced or has left"
        )
        return Fenced(self.epoch, text)

    def _seat(self, peer: Hashable, attach: Attach, turn: StepEffects) -> WorkerSession:
        known = self.windows.pop(attach.rank, None)
        window = known[1] if known is not None and known[0] == attach.incarnation else DuplicateFilter()
        seat = self.seats[attach.rank] = WorkerSession(
            self.number, attach.rank, attach.incarnation, peer, window
        )
        seat.attached = self.returning is None
        turn.actions.append(Attachment(self.number, attach.rank, attach.incarnation, attach.memory))
        return seat

    def _welcome(self, seat: WorkerSession, turn: StepEffects) -> None:
        bases = self._bases.get(seat.rank, ())
        turn.actions.append(Send(seat.peer, Attached(self.incarnation, "", seat.epoch, bases)))

    def _return(self, turn: StepEffects) -> None:
        """Once all members have attached to a server that has come back, go on where they are."""
        if self.returning is None or not self.members.keys() <= self.returning.keys():
            return
        attaches, self.returning = self.returning, None
        for rank, attach in attaches.items():
            if not attach.met and self.sync and rank not in self.late and rank not in self._bases:
                self._let_begin(rank, dict(attach.accepted))
                continue
            for slice_, round_ in attach.accepted:
                slot = self.slots.get(slice_)
                if slot is not None and round_ > slot.round:
                    slot.skip[rank] = round_
        for seat in self.seats.values():
            seat.attached = True
            self._welcome(seat, turn)
        self._go_on(turn)

    def _let_begin(self, rank: int, bases: dict[int, int]) -> None:
        """Say in which rounds a worker begins that came back; nobody waits for it in those before."""
        own = {slot.id: max(bases.get(slot.id, 0), slot.base()) for slot in self.slots.values()}
        self._bases[rank] = tuple((slice_, round_) for slice_, round_ in own.items() if round_)
        for slot in self.slots.values():
            slot.lose({rank}, own[slot.id])  # what the one before it had pushed, ahead of all others
            if own[slot.id] > slot.round:
                slot.skip[rank] = own[slot.id]

    def _gathered(self) -> bool:
        """Whether one may be about to begin whom the next rounds wait for.

        While one of the others has not reached where it begins, every round that it has pushed into is one of
        those that go on without. When all have, the scheduler's word of it is on its way.
        """
        seats = (self.seats.get(rank) for rank in self.needed)
        return self.gathering and all(seat is not None and seat.epoch >= self.epoch for seat in seats)

    def _go_on(self, turn: StepEffects) -> None:
        for slot in list(self.slots.values()):
            self._advance(slot, turn)

    # --------------------------------------------------------------------------------------------- membership

    def view(self, view: View, turn: StepEffects) -> None:
        """Take a newer view."""
        if view.epoch <= self.epoch:
            return
        self.epoch, self.sync = view.epoch, view.mode == "sync"
        members = {member.rank: member.incarnation for member in view.members}
        gone = {rank for rank, seat in self.seats.items() if members.get(rank) != seat.incarnation}
        dead = {loss.rank for loss in view.losses if loss.role == "worker"}
        replaced = {rank for rank, old in self.members.items() if members.get(rank, old) != old}
        if self.sync:
            self._note_left(members.keys() | dead)
        for rank in [rank for rank in self._bases if self.members.get(rank) != members.get(rank)]:
            del self._bases[rank]
        self.members, self.late = members, frozenset(view.late)
        self.needed = frozenset(members.keys() - set(view.resting) - self.late)
        self.gathering = view.begin >= 0
        for rank in gone:
            self._unseat(rank, turn)
        for slot in self.slots.values():
            slot.lose(dead | replaced)
            slot.forget(gone)
        if view.broken and self.broken is None:
            self.broken = lost(view.losses, len(view.servers))
            self._break(turn)
        if view.begun >= 0:
            self._let_begin(view.begun, dict(view.bases))
        self._return(turn)
        self._go_on(turn)
        for peer, attach in [self._early.pop(rank) for rank in list(self._early)]:
            self.attach(peer, attach, turn)

    def _note_left(self, others: Iterable[int]) -> None:
        """Note who of those that rounds have waited for is gone, and is none of these."""
        for rank in self.needed.difference(others):
            bases = dict(self._bases.get(rank, ()))
            last = ((slot.id, slot.last(rank)) for slot in self.slots.values())
            self._left[rank] = {slice_: round_ for slice_, round_ in last if round_ > bases.get(slice_, 0)}

    def _tell_left(self, job: SliceRound, turn: StepEffects) -> None:
        """Tell all, once, that rounds go on without somebody who was in them."""
        for rank, rounds in list(self._left.items()):
            last = rounds.get(job.slice)
            if last is not None and last < job.round:
                del self._left[rank]
                word = LeftOut(self.number, job.slice, rank, last)
                turn.actions.extend(Send(seat.peer, word) for seat in self.seats.values())

    def _unseat(self, rank: int, turn: StepEffects) -> None:
        seat = self.seats.pop(rank)
        seat.gone = True
        for slot in self.slots.values():
            slot.leave(seat)
        if self.returning is not None:
            self.returning.pop(rank, None)
        turn.actions.append(Attachment(self.number, rank, seat.incarnation, None))

    def _break(self, turn: StepEffects) -> None:
        """Nobody waits for a round any more."""
        for slot in list(self.slots.values()):
            for seat, record in slot.held:
                self._fail(seat, record, slot, turn)
            asked = [one for one in slot.pulls if one[1].kind == _LAST_ROUND]
            for seat, record, _ in slot.pulls:
                if record.kind != _LAST_ROUND:
                    self._fail(seat, record, slot, turn)
            waiting = list(slot.queue)
            slot.queue.clear()
            for seat, record, frames in waiting:
                if record.kind in _WRITES:
                    slot.queue.append((seat, record, frames))
                else:
                    self._fail(seat, record, slot, turn)
            slot.held.clear()
            slot.pulls = asked
            slot.parts.clear()
            self._settle(slot, turn)
        turn.work.append(Abort(self.number))

    def _fail(self, seat: WorkerSession, record: Record, slot: SliceRounds, turn: StepEffects) -> None:
        if self.broken is not None:
            seat.remember(record.sequence, self.broken)
            turn.fail(seat, record, slot.round, self.broken)

    # ----------------------------------------------------------------------------------------------- requests

    def take(self, seat: WorkerSession, batch: Batch, turn: StepEffects) -> None:
        """Handle the requests of one message."""
        seat.epoch = max(seat.epoch, batch.epoch)
        window = seat.window
        frames = batch.frames
        for record in batch.records:
            sequence = record[2]
            if record[13] == PROBE and sequence not in window:
                turn.answer(seat, _UNKNOWN, record, 0)
            elif sequence == window.low + 1 and not window.above:
                window.low = sequence
                if record[9] == 1:
                    seat.received += record[12]
                self.handle(seat, record, frames, turn)
            elif not window.fits(sequence):
                continue
            elif window.take(sequence):
                if record[9] == 1:
                    seat.received += record[12]
                self.handle(seat, record, frames, turn)
            else:
                if record[9] == 1 and sequence <= seat.replayed:
                    seat.received += record[12]
                self._repeated(seat, record, frames, turn)
        if seat.received - seat.reported >= self.report:
            turn.report(seat)

    def handle(self, seat: WorkerSession, record: Record, frames: Sequence[Any], turn: StepEffects) -> None:
        """Handle a request that has come for the first time, or whose slice is free now."""
        kind = record[0]
        slot = self.slots.get(record[1])
        if slot is None or not slot.ready:
            self._without_value(seat, slot, record, frames, turn)
        elif kind in _PUSHES:
            if self.broken is not None:
                self._fail(seat, record, slot, turn)
            elif self.sync:
                self._push(seat, slot, record, frames, turn)
            else:
                self._push_at_once(seat, slot, record, frames, turn)
        elif kind in _READS:
            self._pull(seat, slot, record, frames if kind != _PULL else (), turn)
        elif kind in _WRITES:
            self._write(seat, slot, record, frames, turn)
        else:
            self._refuse(seat, record, turn)

    def _push(
        self, seat: WorkerSession, slot: SliceRounds, record: Record, frames: Sequence[Any], turn: StepEffects
    ) -> None:
        number = record[3]
        ahead = number - slot.round
        if ahead <= 0 or (ahead == 1 and slot.busy == _ROUND):
            # Sent again to a server that has come back: its round is complete without it.
            if record[0] == _PUSH:
                turn.answer(seat, _DONE, record, slot.round)
            else:
                self._pull(seat, slot, record, (), turn)
            return
        if ahead > _TOO_FAR or not slot.put(number, (seat.rank, record, frames)):
            self._reject(seat, record, f"push {number} is out of order: round {slot.round} is complete", turn)
            return
        if record[0] == _PUSHPULL:
            seat.waiting.add(record[2])
            slot.pulls.append((seat, record, ()))
        elif ahead <= OPEN:
            turn.answer(seat, _DONE, record, slot.round)
        else:
            seat.waiting.add(record[2])
            slot.held.append((seat, record))
        if ahead == 1 and len(slot.parts[number]) + len(slot.skip) >= len(self.needed):
            self._advance(slot, turn)

    def _push_at_once(
        self, seat: WorkerSession, slot: SliceRounds, record: Record, frames: Sequence[Any], turn: StepEffects
    ) -> None:
        seat.waiting.add(record[2])
        if slot.busy:
            slot.queue.append((seat, record, frames))
            return
        slot.busy = _ROUND
        slot.current = (seat, record)
        parts = [(seat.rank, record, frames)]
        turn.job(self.number, SliceRound(slot.id, slot.round + 1, parts, record.version, record.clock))

    def _pull(
        self, seat: WorkerSession, slot: SliceRounds, record: Record, frames: Sequence[Any], turn: StepEffects
    ) -> None:
        if self.broken is not None and not self._readable(slot, record):
            self._fail(seat, record, slot, turn)  # whoever knows of the loss asks for whatever there is
        elif slot.busy or not self._readable(slot, record):
            seat.waiting.add(record[2])
            slot.pulls.append((seat, record, frames))
        else:
            self._value(seat, slot, record, frames, turn)

    def _readable(self, slot: SliceRounds, record: Record) -> bool:
        if record[0] == _LAST_ROUND:
            return self.broken is not None
        return record[3] <= slot.round or not self.sync

    def _value(
        self, seat: WorkerSession, slot: SliceRounds, record: Record, frames: Sequence[Any], turn: StepEffects
    ) -> None:
        if record[0] == _LAST_ROUND:
            turn.answer(seat, _DONE, record, slot.round)
        elif not slot.failures or not self._tell_failure(seat, slot, record, turn):
            turn.answer(seat, _VALUE, record, slot.round, frames)

    def _tell_failure(
        self, seat: WorkerSession, slot: SliceRounds, record: Record, turn: StepEffects
    ) -> bool:
        """Answer that a round failed, of each once to each worker that pushed into it; then it may read."""
        told = slot.tell(seat.rank, record[3]) if record[0] != Kind.FETCH_STATE else None
        if told is None:
            return False
        number, failure = told
        if number < record[3]:
            failure = msgspec.structs.replace(failure, text=f"{failure.text}; that was in round {number}")
        seat.remember(record[2], failure)
        turn.fail(seat, record, slot.round, failure)
        return True

    def _write(
        self, seat: WorkerSession, slot: SliceRounds, record: Record, frames: Sequence[Any], turn: StepEffects
    ) -> None:
        if slot.busy:
            seat.waiting.add(record[2])
            slot.queue.append((seat, record, frames))
        elif record.kind == _INIT and slot.ready:
            turn.answer(seat, _DONE, record, slot.round)
        elif record.kind == Kind.FORGET:
            self.forget((slot.id,), turn)
            turn.answer(seat, _DONE, record, 0)
        else:
            seat.waiting.add(record[2])
            slot.busy = _WRITE
            slot.current = (seat, record)
            turn.work.append(Write(self.number, slot.id, seat.rank, record, frames))

    def _without_value(
        self,
        seat: WorkerSession,
        slot: SliceRounds | None,
        record: Record,
        frames: Sequence[Any],
        turn: StepEffects,
    ) -> None:
        if record.kind == Kind.FORGET:
            turn.answer(seat, _DONE, record, 0)
        elif record.kind == Kind.BAD:
            self._refuse(seat, record, turn)
        elif record.kind not in (_INIT, Kind.ASSIGN):
            self._lacking(seat, record, self._no_value(record.slice), turn)
        elif slot is None or not slot.defined:
            # The scheduler's word of this slice is still on its way.
            slot = self.slots.setdefault(record.slice, SliceRounds(record.slice))
            seat.waiting.add(record[2])
            slot.queue.append((seat, record, frames))
        else:
            self._write(seat, slot, record, frames, turn)

    def _no_value(self, slice_: int) -> Failure:
        what = f"slice {slice_} of store {self.number}"
        if self.restarted:
            text = f"{what} is lost: its server was started again, and there is no snapshot of it"
            return Failure("StateFileError", f"{text}; start the job again from what was saved last")
        return Failure("KeyNotFoundError", f"{what} has no value on this server; init its key first")

    def _lacking(self, seat: WorkerSession, record: Record, failure: Failure, turn: StepEffects) -> None:
        seat.remember(record.sequence, failure)
        turn.fail(seat, record, 0, failure)

    def _refuse(self, seat: WorkerSession, record: Record, turn: StepEffects) -> None:
        bad = record.kind == Kind.BAD
        why = "numbers of a request do not fit together" if bad else f"no request has kind {int(record.kind)}"
        self._reject(seat, record, f"{why}; the request was not carried out", turn)

    def _reject(self, seat: WorkerSession, record: Record, why: str, turn: StepEffects) -> None:
        text = f"worker {seat.rank}, slice {record.slice} of store {self.number}: {why}"
        self._lacking(seat, record, Failure("ProtocolError", text), turn)

    def _repeated(
        self, seat: WorkerSession, record: Record, frames: Sequence[Any], turn: StepEffects
    ) -> None:
        """Answer again; never do it again."""
        kind, sequence = record[0], record[2]
        slot = self.slots.get(record[1])
        if sequence in seat.waiting:
            turn.report(seat)
        elif sequence in seat.failures:
            turn.fail(seat, record, slot.round if slot else 0, seat.failures[sequence])
        elif kind == _PUSH or kind in _WRITES:
            turn.answer(seat, _DONE, record, slot.round if slot else 0)
        elif kind == Kind.BAD:
            self._refuse(seat, record, turn)
        elif slot is None or not slot.ready:
            self._without_value(seat, slot, record, frames, turn)
        elif record[13] == PROBE and kind == Kind.PULL_ROWS:
            turn.answer(seat, _UNKNOWN, record, 0)  # which rows, is in the payload
        else:
            self._pull(seat, slot, record, frames if kind != _PUSHPULL else (), turn)

    # ----------------------------------------------------------------------------------------------- progress

    def given_up(self, slices: Iterable[int], turn: StepEffects) -> None:
        """Take back rounds that were not done, since the store is broken."""
        for slice_ in slices:
            slot = self.slots.get(slice_)
            if slot is not None and slot.busy == _ROUND:
                slot.busy = _FREE
                self._settle(slot, turn)

    def applied(self, results: Iterable[tuple[int, Failure | None]], turn: StepEffects) -> None:
        """Take what became of jobs and writes."""
        for slice_, failure in results:
            slot = self.slots.get(slice_)
            if slot is None or not slot.busy:
                continue
            doing, slot.busy = slot.busy, _FREE
            if doing == _ROUND:
                self._rounded(slot, failure, turn)
            else:
                self._written(slot, failure, turn)
            self._settle(slot, turn)
            self._advance(slot, turn)

    def _rounded(self, slot: SliceRounds, failure: Failure | None, turn: StepEffects) -> None:
        if failure is not None and self.sync:
            slot.fail(failure)
        slot.complete()
        current, slot.current = slot.current, None
        if current is None:
            return
        seat, record = current
        if failure is not None:
            seat.remember(record.sequence, failure)
            turn.fail(seat, record, slot.round, failure)
        elif record.kind == _PUSHPULL:
            turn.answer(seat, _VALUE, record, slot.round, ())
        else:
            turn.answer(seat, _DONE, record, slot.round)

    def _written(self, slot: SliceRounds, failure: Failure | None, turn: StepEffects) -> None:
        current, slot.current = slot.current, None
        if current is None:
            return
        seat, record = current
        if failure is not None:
            seat.remember(record.sequence, failure)
            turn.fail(seat, record, slot.round, failure)
            return
        valued = record.kind in (_INIT, Kind.ASSIGN)
        slot.ready = slot.ready or valued
        if valued and not slot.kept and self.keep is not None:
            self.keep(seat, record)
        else:
            turn.answer(seat, _DONE, record, slot.round)

    def _settle(self, slot: SliceRounds, turn: StepEffects) -> None:
        """Answer whoever waited for what the slice is now."""
        if slot.held:
            waiting, slot.held = slot.held, []
            for seat, record in waiting:
                if record.round <= slot.round + OPEN:
                    turn.answer(seat, _DONE, record, slot.round)
                else:
                    slot.held.append((seat, record))
        if slot.pulls and not slot.busy:
            pulls, slot.pulls = slot.pulls, []
            for one in pulls:
                if self._readable(slot, one[1]):
                    self._value(one[0], slot, one[1], one[2], turn)
                else:
                    slot.pulls.append(one)
        while slot.queue and slot.defined and not slot.busy and slot.id in self.slots:
            seat, record, frames = slot.queue.popleft()
            if not seat.gone:
                self.handle(seat, record, frames, turn)

    def _advance(self, slot: SliceRounds, turn: StepEffects) -> None:
        """Begin the next round of the slice, if it is complete."""
        if slot.busy or not self.sync or self.returning is not None or not slot.ready:
            return
        if self.broken is not None or self._gathered():
            return
        before = slot.round
        job = slot.due(self.needed)
        if slot.round != before:
            self._settle(slot, turn)
        if job is not None and not slot.busy:
            slot.busy = _ROUND
            if self._left:
                self._tell_left(job, turn)
            turn.job(self.number, job)

    # ------------------------------------------------------------------------------------------ the scheduler

    def define(self, slices: Iterable[int], turn: StepEffects) -> None:
        """Slices of this server that will come, or have come back from a snapshot."""
        for slice_ in slices:
            slot = self.slots.get(slice_)
            if slot is None:
                slot = self.slots[slice_] = SliceRounds(slice_)
            slot.defined = True
            self._settle(slot, turn)

    def forget(self, slices: Iterable[int], turn: StepEffects) -> None:
        """Drop slices, and whoever waits for them."""
        dropped = []
        for slice_ in slices:
            slot = self.slots.pop(slice_, None)
            if slot is None:
                continue
            dropped.append(slice_)
            waiting = [(one[0], one[1]) for one in (*slot.pulls, *slot.queue)] + slot.held
            for seat, record in waiting:
                self._without_value(seat, None, record._replace(kind=_PULL), (), turn)
        if dropped:
            turn.work.append(Forget(self.number, tuple(dropped)))

    def missing(self, slice_: int, round_: int) -> Missing:
        """Whom a round of a slice waits for."""
        slot = self.slots.get(slice_)
        if self.returning is not None:
            ranks = sorted(self.members.keys() - self.returning.keys())
        else:
            ranks = slot.missing(round_, self.needed) if slot is not None and round_ > slot.round else []
        return Missing(self.number, slice_, round_, tuple(ranks))

    # ---------------------------------------------------------------------------------------------- snapshots

    def quiet(self) -> bool:
        """Whether nothing is being done to any slice."""
        return not any(slot.busy for slot in self.slots.values())

    def snapshot(self) -> dict[str, Any]:
        """Return what a server that comes back needs besides the values; only while it is `quiet`.

        Which requests have come is of use where pushes are applied at once. In rounds the round tells, and
        parts of rounds that are not complete are lost with the server: they have to come again.
        """
        seats = () if self.sync else self.seats.values()
        windows = [[one.rank, one.incarnation, *one.window.without(one.waiting)] for one in seats]
        rounds = [[slot.id, slot.round] for slot in self.slots.values() if slot.ready]
        return {"store": self.number, "version": self.version, "rounds": rounds, "windows": windows}

    def restore(self, state: dict[str, Any]) -> None:
        """Take what `snapshot` returned."""
        self.version = state["version"]
        self.returning = {}
        for slice_, round_ in state["rounds"]:
            slot = self.slots[slice_] = SliceRounds(slice_)
            slot.ready, slot.kept, slot.round = True, True, round_
        for rank, incarnation, low, above in state["windows"]:
            self.windows[rank] = (incarnation, DuplicateFilter(low, above))
