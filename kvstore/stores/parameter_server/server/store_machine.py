"""One store on one server: attachment and fencing of workers, views, and the state of a restart."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from ..native._native import Link, Sums, take_usual
from ..protocol import messages as m
from ..protocol.events import SendMessage
from ..protocol.losses import loss_failure
from ..protocol.messages import (
    FLAGS,
    NBYTES,
    PLACE,
    PROBE,
    SEQUENCE,
    Batch,
    PayloadLocation,
    Record,
    RecordKind,
)
from .round_members import RoundMembers
from .slice_requests import SliceRequests
from .slice_rounds import Frames, SliceRounds
from .worker_sessions import StepEffects, StoreSessions, WorkerSession

_FRAME = PayloadLocation.FRAME
_EARLY = 64  # stored requests of one worker that wait for earlier ones


class StoreMachine:
    """The state of one store in a server's machine.

    The arrival of `report` bytes of requests, or fewer if the worker asks for it, is acknowledged if no reply
    does.
    """

    def __init__(self, number: int, hello: m.HelloRequest, report: int, effects: StepEffects) -> None:
        self.number = number
        self.version = 0  # of the scheduler's last `InstallRequest`
        self.settled: dict[int, int] = {}  # as in `ViewNotice.settled`
        self.members = RoundMembers(hello.restarted)
        self.sessions = StoreSessions(number, hello.incarnation, effects)
        self.requests = SliceRequests(number, self.members, self.sessions, effects)
        self.ahead: list[tuple[Hashable, Batch]] = []  # batches of an epoch that is not known yet
        self._effects, self._report = effects, report
        self._early: dict[int, tuple[Hashable, m.AttachRequest]] = {}

    # --------------------------------------------------------------------------------------------- membership

    def attach_worker(self, peer: Hashable, attach: m.AttachRequest) -> None:
        """Open a worker's session, if it is a member; else fence it."""
        members, rank = self.members, attach.rank
        if attach.epoch > members.epoch:
            self._early[rank] = (peer, attach)
            return
        if members.incarnations.get(rank) != attach.incarnation:
            self._effects.actions.append(SendMessage(peer, self.fence_notice(rank)))
            return
        session = self.sessions.open_session(peer, attach, members.seats.get(rank))
        if members.returning is None:
            self.sessions.send_attached(session, members.join_point(rank))
        elif not attach.late or rank in members.rejoining:
            members.returning[rank] = attach
            self._resume_when_attached()

    def fence_notice(self, rank: int) -> m.FenceNotice:
        """Return the message for a process that is no member."""
        text = (
            f"worker {rank} is no longer a member of store {self.number}: it was lost, replaced or has left"
        )
        return m.FenceNotice(self.members.epoch, text)

    def apply_view(self, view: m.ViewNotice) -> None:
        """Apply a newer view."""
        members, slices = self.members, self.requests.slices
        if view.epoch <= members.epoch:
            return
        lost_parts = members.apply_view(view, slices.values())
        sessions = self.sessions.by_rank.items()
        gone = {rank for rank, one in sessions if members.incarnations.get(rank) != one.incarnation}
        for rank in gone:
            self.requests.leave(self.sessions.close_session(rank))
            if members.returning is not None:
                members.returning.pop(rank, None)
        for rank, version in view.settled:
            if self.settled.get(rank) != version:
                self.settled[rank] = version
                self._settle_versions({rank: version}, slices)
        for rounds in slices.values():
            rounds.lose(lost_parts)
            rounds.forget(members.without_members(gone))
        if view.broken and members.broken is None:
            failure = loss_failure(view.losses, len(view.servers))
            members.break_off(failure)
            self.requests.fail_waiting(failure)
        if view.begun >= 0:
            members.set_join_point(view.begun, dict(view.bases), slices.values())
        self._resume_when_attached()
        self.requests.advance_all()
        for peer, attach in [self._early.pop(rank) for rank in list(self._early)]:
            self.attach_worker(peer, attach)

    def define_slices(self, slices: Iterable[int]) -> None:
        """Add slices of this server."""
        slices = list(slices)
        self.requests.define(slices)
        self._settle_versions(self.settled, slices)

    def _settle_versions(self, settled: Mapping[int, int], slices: Iterable[int]) -> None:
        for rank, version in settled.items():
            for slice_ in slices:
                self.requests.slices[slice_].settle(self.members.seat(rank), version)

    def _resume_when_attached(self) -> None:
        """Continue, once all members have attached to a restarted server."""
        if not self.members.all_returned(self.requests.slices):
            return
        for rank, session in self.sessions.by_rank.items():
            self.sessions.send_attached(session, self.members.join_point(rank))
        self.requests.advance_all()

    def missing_reply(self, slice_: int, round_: int) -> m.MissingReply:
        """Return the ranks that a round of a slice waits for."""
        ranks = self.members.missing_ranks(self.requests.slices.get(slice_), round_)
        return m.MissingReply(self.number, slice_, round_, tuple(ranks))

    # ----------------------------------------------------------------------------------------------- requests

    def handle_requests(self, session: WorkerSession, batch: Batch) -> None:
        """Handle the requests of one message."""
        session.epoch = max(session.epoch, batch.epoch)
        members, slices = self.members.of_rounds, self.requests.slices
        for record in take_usual(self._effects, members, session, slices, batch):
            self._handle_request(session, record, batch.frames)
        if session.early:
            self._take_early(session)
        if session.received - session.reported >= min(self._report, session.report_after):
            self._effects.report(session)

    def _handle_request(self, session: WorkerSession, record: Record, frames: Frames) -> None:
        """Handle a request that may be a repetition."""
        sequence = record[SEQUENCE]
        nbytes = record[NBYTES] if record[PLACE] == _FRAME else 0
        if session.has_come(sequence):
            if sequence <= session.replayed:
                session.received += nbytes
            self.requests.repeat(session, record, frames)
        elif record[FLAGS] == PROBE:
            self._effects.answer(session, RecordKind.UNKNOWN, record, 0)
        elif self._must_wait(session, sequence):
            if len(session.early) < _EARLY:  # else the worker repeats it
                session.early[sequence] = record, frames
                session.overtaken = True
        elif session.take(sequence):
            session.received += nbytes
            self.requests.handle(session, record, frames)

    def _must_wait(self, session: WorkerSession, sequence: int) -> bool:
        """Return whether a request has to wait for an earlier one that has not arrived.

        Without rounds the order of two pushes is that of their numbers only, and a message that is lost, or
        sent by another connection than the next one, arrives after it. A restarted server must not wait: the
        requests that it had answered since its snapshot are never repeated.
        """
        members = self.members
        return not (members.sync or members.restarted) and sequence > session.low + 1

    def _take_early(self, session: WorkerSession) -> None:
        """Handle the stored requests for which all earlier ones have arrived."""
        while session.early:
            sequence = min(session.early)
            if sequence > session.low + 1:
                return
            self._handle_request(session, *session.early.pop(sequence))
        session.overtaken = False

    def worker_link(self, rank: int, sums: Sums, job: int) -> Link | None:
        """Return a link that handles a worker's usual requests in C; None: the worker has not attached."""
        session = self.sessions.by_rank.get(rank)
        if session is None:
            return None
        members, slices = self.members.of_rounds, self.requests.slices
        report = min(self._report, session.report_after)
        return Link(self._effects, members, session, slices, sums, report, m.PROTOCOL, job)

    # ---------------------------------------------------------------------------------------------- snapshots

    def is_quiet(self) -> bool:
        """Return whether no slice has a job in progress."""
        return not any(rounds.busy for rounds in self.requests.slices.values())

    def mark_kept(self, slice_: int) -> None:
        """Record that a slice, if it still exists, is in a snapshot."""
        rounds = self.requests.slices.get(slice_)
        if rounds is not None:
            rounds.kept = True

    def snapshot_state(self) -> dict[str, Any]:
        """Return the state that a restarted server needs besides the values; only while it `is_quiet`.

        The numbers of arrived requests are needed where pushes are applied at once. With rounds the last
        round is enough: parts of incomplete rounds are lost with the server, and have to be sent again.
        """
        sessions = () if self.members.sync else self.sessions.by_rank.values()
        windows = [[one.rank, one.incarnation, *one.answered()] for one in sessions]
        rounds = [[one.id, one.round] for one in self.requests.slices.values() if one.ready]
        return {"store": self.number, "version": self.version, "rounds": rounds, "windows": windows}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Set the state that `snapshot_state` returned."""
        self.version = state["version"]
        self.members.await_all()
        for slice_, round_ in state["rounds"]:
            rounds = self.requests.slices[slice_] = SliceRounds(self.number, slice_)
            rounds.ready, rounds.kept, rounds.round = True, True, round_
        for rank, incarnation, low, above in state["windows"]:
            self.sessions.restored[rank] = (incarnation, low, above)
