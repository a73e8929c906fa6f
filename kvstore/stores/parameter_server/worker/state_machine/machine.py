"""The worker's state machine: one store of one worker process, with its operations.

`member.py` has the membership, `server_links.py` the requests to servers, `scheduler_link.py` those to the
scheduler; this file distributes events to the three.

`TRANSITIONS` lists the states of the worker in its store, of its link to a server, and of a request to a
server; a test compares it with random jobs, and `docs/reference/states.md` shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

from ...protocol import events
from ...protocol import messages as m
from ...protocol.events import ECHO, Action, MessageReceived, OperationDone, SendMessage, SubmitRequests
from ...protocol.messages import Failure, MemberReply, Record, RecordKind, ViewNotice
from ...protocol.transitions import transitions
from .member import StoreMember
from .options import WorkerOptions
from .request_table import RequestTable
from .scheduler_link import SchedulerLink
from .server_links import ServerLinks

_PUSHES = frozenset((RecordKind.PUSH, RecordKind.PUSHPULL))

#: `pump` runs at the end of each step in which a request may have become free to be sent.
TRANSITIONS: Final = transitions(
    ("worker", "outside", "member", "WelcomeNotice", "the scheduler has admitted it"),
    ("worker", "outside", "rejoining", "WelcomeNotice",
     "it has the rank of a lost worker; no round waits for it"),
    ("worker", "outside", "failed", "RefusalNotice FenceNotice TickEvent SchedulerLost",
     "refused, or no scheduler answers"),
    ("worker", "rejoining", "member", "ViewNotice", "the other workers have reached its join point"),
    ("worker", "rejoining", "broken", "ViewNotice", "a process is lost for good (`on_peer_loss`)"),
    ("worker", "rejoining", "left", "LeaveNotice", "it closes the store"),
    ("worker", "rejoining", "failed", "FenceNotice TickEvent SchedulerLost",
     "fenced, or the scheduler is lost"),
    ("worker", "member", "broken", "ViewNotice", "a process is lost for good (`on_peer_loss`)"),
    ("worker", "member", "left", "LeaveNotice", "it closes the store"),
    ("worker", "member", "failed", "FenceNotice TickEvent SchedulerLost", "fenced, or the scheduler is lost"),
    ("worker", "broken", "left", "LeaveNotice", "it closes the store"),
    ("worker", "broken", "failed", "FenceNotice TickEvent SchedulerLost", "fenced, or the scheduler is lost"),
    ("worker", "left", "failed", "FenceNotice SchedulerLost",
     "so, before the scheduler has acknowledged `LeaveNotice`"),
    ("link", "new", "connecting", "WelcomeNotice",
     "a server of the job: the worker connects, and sends `AttachRequest`"),
    ("link", "connecting", "attached", "AttachReply", "the server accepts requests"),
    ("link", "attached", "connecting", "ViewNotice", "the server was restarted"),
    ("link", "attached", "joining", "ViewNotice", "the worker rejoins: it asks for its first rounds"),
    ("link", "joining", "attached", "AttachReply", "the server has sent the first rounds"),
    ("link", "joining", "connecting", "ViewNotice", "the server was restarted"),
    ("link", "connecting", "lost", "ViewNotice LeaveNotice",
     "the server is lost for good, or the store is closed"),
    ("link", "attached", "lost", "ViewNotice LeaveNotice", "so"),
    ("link", "joining", "lost", "ViewNotice LeaveNotice", "so"),
    ("request", "new", "queued", "SubmitRequests RetrySlice ViewNotice adopt",
     "View: it was held for the join point"),
    ("request", "new", "sent", "adopt", "the exchange in C has sent it"),
    ("request", "queued", "sent", "pump", "the link is attached, and the credit and the window allow it"),
    ("request", "queued", "held", "pump", "a push into a slice with an unanswered read, or with many pushes"),
    ("request", "held", "sent", "pump", "a request before it was sent, and it may follow"),
    ("request", "held", "queued", "pump Batch ReadsCopied ViewNotice forget_reads", "no longer to be held"),
    ("request", "sent", "queued", "ViewNotice", "the server was restarted: it is sent again"),
    ("request", "sent", "abandoned", "ViewNotice", "the store is broken; the server still answers"),
    ("request", "queued", "abandoned", "ViewNotice",
     "so; it was sent to the process that the server replaces"),
    ("request", "sent", "gone", "Batch", "it is answered"),
    ("request", "sent", "gone", "ViewNotice LeaveNotice FenceNotice TickEvent SchedulerLost",
     "the call fails: see above"),
    ("request", "queued", "gone", "ViewNotice LeaveNotice FenceNotice TickEvent SchedulerLost", "so"),
    ("request", "held", "gone", "ViewNotice LeaveNotice FenceNotice TickEvent SchedulerLost", "so"),
    ("request", "abandoned", "gone", "Batch ViewNotice LeaveNotice FenceNotice SchedulerLost",
     "it is answered, or dropped"),
)  # fmt: skip


class WorkerMachine:
    """One store of a worker; all events enter by `step`."""

    def __init__(self, hello: m.HelloRequest, options: WorkerOptions | None = None, memory: str = "") -> None:
        self._hello, options = hello, options or WorkerOptions()
        self.member = StoreMember()
        self.failure: Failure | None = None
        self.missing: m.MissingReply | None = None
        #: Waits that need the scheduler but have no operation in progress.
        self.listeners: set[object] = set()
        self._scheduler = SchedulerLink(options)
        self._servers = ServerLinks(self.member, hello, options, memory)
        self._held: list[
            SubmitRequests
        ] = []  # pushes that wait until the others have reached this join point
        self._left = False
        self._shrunk: set[int] = set()  # ranks that rounds proceed without
        self._handlers: dict[type, Callable[[Any, float, list[Action]], None]] = {
            m.HelloReply: self._met_scheduler,
            m.WelcomeNotice: self._note_welcome,
            ViewNotice: self._apply_view,
            MemberReply: self._scheduler.end_answered,
            m.RefusalNotice: self._note_refusal,
            m.FenceNotice: self._note_fence,
            m.PingRequest: self._answer_ping,
            m.MissingReply: self._is_missing,
        }

    @property
    def is_busy(self) -> bool:
        """Whether a request has no reply yet, or a caller waits otherwise."""
        return self._servers.busy or self._scheduler.is_busy or bool(self._held or self.listeners)

    @property
    def has_met_scheduler(self) -> bool:
        """Whether a message of the scheduler has arrived."""
        return self._scheduler.met

    def step(self, event: events.Event, now: float) -> list[Action]:
        """Handle one event; return the actions."""
        actions: list[Action] = []
        self._scheduler.silence.note_running(now)
        kind = type(event)
        if kind is MessageReceived:
            self._receive_message(event.peer, event.message, now, actions)  # type: ignore[union-attr]
        elif kind is SubmitRequests:
            self._submit_requests(event, now, actions)  # type: ignore[arg-type]
        elif kind is events.TickEvent:
            self._tick(now, actions)
        elif kind is events.SchedulerLost:
            self._fail_all(event.failure, actions)  # type: ignore[union-attr]
        elif kind is events.StoodStill:
            self._scheduler.stood_still(event.seconds, now)  # type: ignore[union-attr]
        elif kind is events.SchedulerRequest:
            self._request_scheduler(event, now, actions)  # type: ignore[arg-type]
        elif kind is events.StreamLost:
            self._servers.suspect(event.server)  # type: ignore[union-attr]
        elif kind is events.RetrySlice:
            self._servers.retry(event, now, actions)  # type: ignore[arg-type]
        elif kind is events.ReadsCopied:
            self._servers.taken(event, now, actions)  # type: ignore[arg-type]
        elif kind is events.StartEvent:
            self._scheduler.write(self._hello, now, actions)
        return actions

    # --------------------------------------------------------------------------------------- for the driver

    def pending(self, op: Hashable) -> list[tuple[int, Record]]:
        """Return server and request of each request that an operation still waits for."""
        return self._servers.pending(op)

    def suspect(self) -> None:
        """Probe all servers at the next tick for all unanswered requests: some may be lost."""
        self._servers.suspect_all()

    def oldest(self) -> tuple[int, int, int] | None:
        """Return server, slice and round of a request that has waited long; None: there is none."""
        return self._servers.oldest()

    def keep(self, op: Hashable) -> bool:
        """Copy an operation's payloads, so that it can continue without them; False: that is impossible."""
        return self._servers.keep(op)

    def forget_reads(self) -> None:
        """Let pushes be sent before values that were requested, and that no caller reads any more."""
        self._servers.forget_reads()

    def complete_pushes(self, server: int, slice: int) -> int:
        """Return how many of this worker's pushes into a slice are in rounds known to be complete."""
        requests = self._servers[server].requests
        return requests.complete.get(slice, 0) - requests.first_rounds.get(slice, 0)

    def answered_pushes(self, server: int, slice: int) -> int:
        """Return how many of this worker's pushes into a slice are answered, if replies are in order."""
        requests = self._servers[server].requests
        first = requests.first_rounds.get(slice, 0)
        return requests.accepted.get(slice, first) - first

    def base_round(self, server: int, slice: int) -> int:
        """Return the round of a slice after which this worker's own begin."""
        return self._servers[server].requests.first_rounds.get(slice, 0)

    def request_missing(self, server: int | None, slice: int = -1, round: int = 0) -> SendMessage:
        """Request the ranks that a round waits for; with None the scheduler's, for start, barrier or init.

        `missing` will have the answer.
        """
        self.missing = None
        welcome = self.member.welcome
        question = m.MissingRequest(welcome.store if welcome else -1, slice, round)
        return (
            SendMessage(server, question)
            if server is not None
            else self._scheduler.unreliable_message(question)
        )

    # --------------------------------------------------------------------------------------------- exchanges

    def allows_exchange(self, servers: Iterable[int]) -> bool:
        """Return whether membership is as usual, and no request to these servers is in progress."""
        view, member = self.member.view, self.member
        if self.failure is not None or self._left or member.rejoining or view is None:
            return False
        usual = not view.broken and view.epoch == member.epoch
        return usual and all(map(self._servers.is_idle, servers))

    def begin_exchange(self, server: int, slices: list[int], pushes: bool) -> tuple[int, int, list[int]]:
        """Count one request for each slice of a server, after `allows_exchange`; the caller sends them.

        Returns the first sequence; the bytes sent before; and rounds, as the server counts. Before any other
        event, the caller must pass the answered requests to `end_exchange`, and the others to `adopt`.
        """
        return self._servers[server].requests.begin_exchange(slices, pushes)

    def requests_to(self, server: int) -> RequestTable:
        """Return the table of requests to a server, for a caller with many small exchanges."""
        return self._servers[server].requests

    def end_exchange(
        self,
        server: int,
        slices: list[int],
        rounds: list[int],
        last: list[int],
        nbytes: int,
        received: int,
    ) -> int:
        """Record which requests of an exchange are answered, as `RequestTable.end_exchange`."""
        return self._servers[server].requests.end_exchange(slices, rounds, last, nbytes, received)

    def adopt(
        self,
        op: Hashable,
        parts: Sequence[tuple[int, events.SliceRequest]],
        ends: Mapping[int, int],
        now: float,
        priority: int | None = None,
    ) -> list[Action]:
        """Continue the rest of an exchange as an operation.

        `ends` are by server: requests from this sequence on are not sent yet. They are sent first, unless
        there is a `priority`: then all exchanges with later sequences must be adopted afterwards.
        """
        return self._servers.adopt(op, parts, ends, now, priority)

    # -------------------------------------------------------------------------------------------- operations

    def _submit_requests(self, event: SubmitRequests, now: float, actions: list[Action]) -> None:
        error = self.failure or self._servers.refusal(event.parts)
        if error or not event.parts:
            actions.append(OperationDone(event.op, error))
            return
        member = self.member
        if member.rejoining and self._awaits_join(event.parts):
            self._hold_submission(event, now, actions)
            return
        if member.view is not None and member.epoch != member.view.epoch and not member.rejoining:
            self._look_for_join_point(member.view, event.parts, now, actions)
        self._servers.submit(event, now, actions)

    def _awaits_join(self, parts: Iterable[events.SliceRequest]) -> bool:
        """Return whether these requests are, or follow, the first push of a restarted worker."""
        held = {part.record.slice for event in self._held for part in event.parts}
        return any(part.record.kind in _PUSHES or part.record.slice in held for part in parts)

    def _hold_submission(self, event: SubmitRequests, now: float, actions: list[Action]) -> None:
        """Hold a submission until the others have reached this worker's join point."""
        if not self._held and self.member.welcome is not None:
            first = next(part.record.slice for part in event.parts if part.record.kind in _PUSHES)
            self._scheduler.write(m.RejoinBeginNotice(self.member.welcome.store, first), now, actions)
        self._held.append(event)

    def _look_for_join_point(
        self, view: ViewNotice, parts: Iterable[events.SliceRequest], now: float, actions: list[Action]
    ) -> None:
        """Report the pushes so far, if this is another worker's join point."""
        if any(link.join_epoch < self.member.join_epoch for link in self._servers.all()):
            return  # it has just begun itself, and knows no rounds yet: it reports at the next push
        if any(part.record.slice == view.begin and part.record.kind in _PUSHES for part in parts):
            self.member.epoch = view.epoch
            pushed = tuple(one for link in self._servers.all() for one in link.requests.pushed())
            self._scheduler.write(m.JoinPointNotice(view.store, view.epoch, pushed), now, actions)

    def _drop_held(self, failure: Failure, actions: list[Action]) -> None:
        held, self._held = self._held, []
        actions.extend(OperationDone(event.op, failure) for event in held)

    def _request_scheduler(self, event: events.SchedulerRequest, now: float, actions: list[Action]) -> None:
        welcome = self.member.welcome
        if self.failure is not None or welcome is None:
            error = self.failure or Failure("KVStoreError", "the scheduler has not answered yet")
            actions.append(OperationDone(event.op, error))
            return
        if type(event.message) is m.LeaveNotice:
            self._leave_store(actions)
        self._scheduler.send_request(event, welcome.store, now, actions)

    def _leave_store(self, actions: list[Action]) -> None:
        """Close: requests without a reply will never have one."""
        self._left = True
        closed = Failure("ClosedError", "the store is closed")
        self._servers.leave(closed, actions)
        self._drop_held(closed, actions)

    # ---------------------------------------------------------------------------------------------- messages

    def _receive_message(self, peer: Hashable, message: Any, now: float, actions: list[Action]) -> None:
        if type(message) is m.Batch:
            self._servers.replies(peer, message, now, actions)  # type: ignore[arg-type]
        elif peer == ECHO:
            self._scheduler.silence.note_heartbeat(now)
        elif type(message) is m.ReliableMessage:
            self._read_reliable(message, now, actions)
        elif type(message) is m.AttachReply:
            self._servers.attached(peer, message, now, actions)  # type: ignore[arg-type]
        elif type(message) is m.FenceNotice:
            if not self._left:
                self._note_fence(message, now, actions)
        elif type(message) is m.MissingReply:
            self._is_missing(message, now, actions)
        elif type(message) is m.LeftOutNotice:
            self._left_out(peer, message, actions)  # type: ignore[arg-type]

    def _read_reliable(self, message: m.ReliableMessage, now: float, actions: list[Action]) -> None:
        for body in self._scheduler.read(message, now):
            handler = self._handlers.get(type(body))
            if handler is not None:
                handler(body, now, actions)
        self._scheduler.acknowledge(actions)

    def _left_out(self, server: int, message: m.LeftOutNotice, actions: list[Action]) -> None:
        welcome = self.member.welcome
        known = welcome is not None and message.store == welcome.store
        if known and server in self._servers and message.rank not in self._shrunk:
            self._shrunk.add(message.rank)
            own = message.round - self.base_round(server, message.slice)
            actions.append(events.RoundsShrunk(message.rank, message.slice, own))

    def _answer_ping(self, message: m.PingRequest, now: float, actions: list[Action]) -> None:
        actions.append(self._scheduler.unreliable_message(m.PingReply(message.number)))

    def _is_missing(self, message: m.MissingReply, now: float, actions: list[Action]) -> None:
        self.missing = message

    # -------------------------------------------------------------------------------------------- membership

    def _met_scheduler(self, message: m.HelloReply, now: float, actions: list[Action]) -> None:
        self._scheduler.echoes = True
        self._scheduler.absence = message.absence
        actions.append(message)

    def _note_welcome(self, message: m.WelcomeNotice, now: float, actions: list[Action]) -> None:
        if self.member.welcome is None:
            self.member.enter_store(message)
            actions.append(message)
            self._servers.meet(message.servers, now, actions)

    def _apply_view(self, view: ViewNotice, now: float, actions: list[Action]) -> None:
        member = self.member
        if member.welcome is None or member.view is None or view.epoch <= member.view.epoch or self.failure:
            return
        was_broken = member.is_broken
        member.apply_view(view)
        actions.append(view)
        self._servers.meet(view.servers, now, actions)
        if member.rejoining and view.begun == member.welcome.rank:
            self._start_pushing(view, now, actions)
        for loss in view.losses:
            if loss.role == "server":
                self._servers.lose(loss, actions)
        if view.broken and not was_broken:
            failure = member.loss_failure()
            self._servers.give_up(failure, actions)
            self._drop_held(failure, actions)

    def _start_pushing(self, view: ViewNotice, now: float, actions: list[Action]) -> None:
        """Begin to push: all others have reached the join point; ask the servers for the first rounds."""
        self.member.begin_pushes(view)
        self._servers.attach_again(now, actions)
        held, self._held = self._held, []
        for event in held:
            self._submit_requests(event, now, actions)

    # -------------------------------------------------------------------------------------------------- ends

    def _note_refusal(self, message: m.RefusalNotice, now: float, actions: list[Action]) -> None:
        why = Failure(message.error, message.text, message.role, message.rank, message.silent)
        self._fail_all(why, actions)

    def _note_fence(self, message: m.FenceNotice, now: float, actions: list[Action]) -> None:
        self._fail_all(self._removal_failure(Failure("FencedError", message.text)), actions)

    def _removal_failure(self, why: Failure) -> Failure:
        welcome = self.member.welcome
        return self._scheduler.removal_failure(why, f"worker {welcome.rank}" if welcome else "this worker")

    def _fail_all(self, failure: Failure, actions: list[Action]) -> None:
        """End with a failure: all operations fail, also later ones."""
        if self.failure is not None:
            return
        self.failure = failure
        self._servers.drop(failure, actions)
        self._drop_held(failure, actions)
        self._servers.end_all(failure, actions)
        self._scheduler.fail_requests(failure, actions)
        actions.append(events.ProcessFailed(failure))

    def _tick(self, now: float, actions: list[Action]) -> None:
        if self.failure is not None:
            return
        self._look_for_scheduler(now, actions)
        self._scheduler.repeat_overdue(now, actions)
        self._servers.tick(now, actions)

    def _look_for_scheduler(self, now: float, actions: list[Action]) -> None:
        """Check that the scheduler is alive, while an operation waits."""
        if not self.is_busy and self.member.welcome is not None:
            self._scheduler.silence.note_heartbeat(now)
            return
        failure = self._scheduler.check_scheduler(now, actions)
        if failure is not None and self._left:
            self._scheduler.end_delivered(actions)
        elif failure is not None:
            self._fail_all(self._removal_failure(failure), actions)
