"""The scheduler's state machine: `step(event, now)` returns actions.

`TRANSITIONS` lists the states of a process, of a store and of the job, and the events that change them; a
test compares it with random jobs, and `docs/reference/states.md` shows it.

Each of these modules has a part of the machine, and uses only the modules before it:

- `peers`: processes, their connections, and the actions of one step
- `store_membership`: the members, the barrier and the epoch of one store
- `rank_assignment`: the rank of each process
- `stores`: which workers enter a store, when it starts, the views and answers that are sent
- `failure_detector`: when a process is lost, and how long a server can be restarted
- `admission`: which processes are admitted
- `shutdown`: how workers leave, and when the job ends
- `member_requests`: the requests of members

`journaled_scheduler` writes the events of the machine to a journal, from which a scheduler can be restarted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ....settings.definitions import DEFAULTS
from ..protocol import messages as m
from ..protocol.events import (
    Action,
    Event,
    HeartbeatReceived,
    JobEnded,
    MessageReceived,
    SchedulerRestarted,
    TickEvent,
)
from ..protocol.messages import Failure, ReliableMessage
from ..protocol.reliable_link import ReliableLink
from ..protocol.transitions import transitions
from .admission import ProcessAdmission
from .failure_detector import FailureDetector, fence_reason
from .member_requests import MemberRequests
from .peers import AdmittedProcess, PeerConnection, ProcessState, StepActions
from .rank_assignment import RankAssignment
from .shutdown import JobShutdown
from .stores import JobStores

_STRANGERS = 4096  # peers that have not sent a hello


#: A process that waits for a rank is admitted at a tick, any other one at its `HelloRequest`.
TRANSITIONS: Final = transitions(
    ("process", "new", "here", "HelloRequest TickEvent",
     "its rank is free, or the process that had it is lost"),
    ("process", "here", "ended", "ProcessEndNotice", "it has closed its stores"),
    ("process", "here", "ended", "HelloRequest TickEvent",
     "a new server, where values of a lost server are missing"),
    ("process", "here", "lost", "TickEvent", "no heartbeat and no message for `dead_after` seconds"),
    ("process", "here", "lost", "ProcessEndNotice", "it reports that it has failed"),
    ("process", "here", "lost", "HelloRequest", "a restarted process has its rank"),
    ("store", "new", "forming", "HelloRequest TickEvent", "its first worker is admitted"),
    ("store", "forming", "running", "HelloRequest TickEvent ProcessEndNotice",
     "all servers, and all workers that are not lost"),
    ("store", "forming", "broken", "HelloRequest TickEvent ProcessEndNotice",
     "a server is lost and was not restarted in time"),
    ("store", "running", "broken", "HelloRequest TickEvent ProcessEndNotice LeaveNotice",
     "so, or a worker is lost (`on_peer_loss`)"),
    ("store", "running", "over", "LeaveNotice ProcessEndNotice", "its last member has left"),
    ("store", "broken", "over", "LeaveNotice ProcessEndNotice", "its last member has left"),
    ("job", "gathering", "running", "HelloRequest TickEvent", "all servers are there for the first time"),
    ("job", "gathering", "over", "ProcessEndNotice TickEvent", "as from running"),
    ("job", "running", "over", "ProcessEndNotice TickEvent",
     "no worker is left, or none was there for `timeout` seconds"),
    ("job", "over", "closed", "TickEvent", "all processes know it, or a deadline has passed"),
)  # fmt: skip


@dataclass(frozen=True)
class SchedulerOptions:
    """The job of a scheduler, and its times in seconds."""

    #: Name of the job, which each hello must contain.
    job: str
    num_workers: int
    num_servers: int
    #: Seconds after which an unacknowledged message is sent again.
    resend_after: float = 1.0
    #: Seconds of silence after which a process is lost.
    dead_after: float = DEFAULTS["dead_after"]
    #: Seconds in which a lost server can be restarted; 0: it cannot.
    server_grace: float = 0.0
    #: Seconds without any worker after which the job ends.
    timeout: float = DEFAULTS["timeout"]


class SchedulerMachine:
    """The state machine of the scheduler of one job."""

    def __init__(self, options: SchedulerOptions) -> None:
        self.options = options
        self.ended = False
        #: Whether the last step has changed state that a restarted scheduler needs.
        self.changed = False
        #: Number of starts of the scheduler of this job; 0: it cannot be restarted.
        self.term = 0
        self._stepped: float | None = None
        self._peers: dict[Hashable, PeerConnection] = {}
        self._assignment = assignment = RankAssignment(options.num_workers, options.num_servers)
        self._stores = stores = JobStores(assignment)
        self._detector = detector = FailureDetector(
            assignment, stores, options.dead_after, options.server_grace
        )
        self._admission = ProcessAdmission(options.job, assignment, stores, detector, options.dead_after)
        self._shutdown = JobShutdown(assignment, stores, detector, self._admission, options.timeout)
        self._set_handlers()

    def _set_handlers(self) -> None:
        """Assign a handler to each kind of message."""
        self._processes = self._assignment.processes
        shutdown, requests = self._shutdown, MemberRequests(self._assignment, self._stores)
        self._handlers: dict[type, Callable[[PeerConnection, Any, StepActions], None]] = {
            m.HelloRequest: self._admission.receive_hello,
            m.ProcessEndNotice: shutdown.note_process_end,
            m.LeaveNotice: shutdown.leave_store,
            m.RejoinBeginNotice: requests.begin_rejoin,
            m.JoinPointNotice: requests.join_point_reached,
            m.InstallReply: requests.note_installed,
            m.MissingRequest: requests.send_missing,
            m.PingRequest: self._answer_ping,
        }
        of_members: dict[type, Callable[..., None]] = {
            m.JoinRequest: requests.join_rounds,
            m.BarrierRequest: requests.enter_barrier,
            m.CreateKeysRequest: requests.create_keys,
            m.KeysReadyRequest: requests.mark_keys_ready,
            m.DropKeysRequest: requests.drop_keys,
            m.LookupRequest: requests.look_up_keys,
            m.LostCountRequest: requests.count_lost,
            m.SettingsRequest: requests.change_settings,
            m.CommandRequest: requests.send_command,
        }
        self._handlers |= {
            kind: partial(requests.handle_request, answer) for kind, answer in of_members.items()
        }

    def step(self, event: Event, now: float) -> list[Action]:
        """Process one event at time `now` in seconds; return the actions for the event loop."""
        outgoing = StepActions(now)
        self._discount_pause(now, outgoing)
        if self.ended:
            return outgoing.actions
        if isinstance(event, MessageReceived):
            self._receive_message(event.peer, event.message, outgoing)
        elif isinstance(event, HeartbeatReceived):
            self._detector.note_heartbeat(event.process, outgoing)
        elif isinstance(event, TickEvent):
            self._tick(outgoing)
        elif isinstance(event, SchedulerRestarted):
            self._restart_waits(event.term, outgoing)
        self.changed = outgoing.changed
        return outgoing.actions

    # -------------------------------------------------------------------------------------------- the journal

    def clocks(self) -> tuple[float | None, float]:
        """Return the time of the last step, and the last time at which a worker was present."""
        return self._stepped, self._shutdown.manned

    def replay(
        self, event: Event, now: float, clocks: tuple[float | None, float], heard: Mapping[str, float]
    ) -> None:
        """Process a recorded event again, with its `clocks` and the times of the heartbeats before it."""
        self._stepped, self._shutdown.manned = clocks
        for name, when in heard.items():
            if name in self._processes:
                self._processes[name].heard = when
        self.step(event, now)

    def state(self) -> tuple[Any, ...]:
        """Return all mutable state, for `restore`."""
        return (
            self._peers, self._assignment, self._stores, self._detector, self._admission, self._shutdown,
            self._stepped, self.ended, self.term,
        )  # fmt: skip

    def restore(self, state: tuple[Any, ...]) -> None:
        """Replace the state by that of another machine with the same options."""
        (
            self._peers, self._assignment, self._stores, self._detector, self._admission, self._shutdown,
            self._stepped, self.ended, self.term,
        ) = state  # fmt: skip
        self._set_handlers()

    def _restart_waits(self, term: int, outgoing: StepActions) -> None:
        """Restart all waits for heartbeats and ranks, and repeat all unacknowledged messages."""
        self.term, outgoing.changed = term, True
        self._detector.restart_silences(outgoing.now)
        self._admission.restart_waits(outgoing.now)
        self._shutdown.delay_end(outgoing.now)
        for peer in self._peers.values():
            peer.link.restart_repeats(term, outgoing.now)

    def process_named(self, name: str) -> AdmittedProcess | None:
        """Return a process by its name."""
        return self._processes.get(name)

    def process_of(self, name: Hashable) -> AdmittedProcess | None:
        """Return the process of a connection."""
        peer = self._peers.get(name)
        return None if peer is None else peer.process

    @property
    def is_deserted(self) -> bool:
        """Return whether no worker was ever admitted."""
        return not self._assignment.workers

    def waits_for(self) -> str:
        """Return the processes that are not present yet, for a log line."""
        missing = [f"server {rank}" for rank in self._assignment.servers.missing_ranks]
        missing += [f"worker {rank}" for rank in self._assignment.missing_ranks]
        return ", ".join(missing)

    def _discount_pause(self, now: float, outgoing: StepActions) -> None:
        """Subtract a time in which the scheduler itself was stopped from all silences and waits."""
        if self._stepped is None:
            self._shutdown.count_from(now)
            outgoing.changed = True
        elif now - self._stepped > self.options.dead_after / 2:
            self._detector.discount_pause(now - self._stepped)
            self._admission.discount_pause(now - self._stepped)
            outgoing.changed = True
        self._stepped = now

    def _receive_message(self, name: Hashable, message: Any, outgoing: StepActions) -> None:
        if type(message) is not ReliableMessage:
            return
        if message.term > self.term:
            self._end_fenced(message.term, outgoing)
            return
        peer = self._peers.get(name) or self._add_peer(name, outgoing.now)
        process = peer.process
        if message.seen > peer.link.last_number:
            outgoing.fence(peer, "this scheduler is not the one that you know; start the job again")
            return
        if process is not None and process.state == ProcessState.LOST:
            outgoing.fence(peer, fence_reason(process))
            return
        if process is not None:
            process.heard = outgoing.now
        outgoing.changed = outgoing.changed or peer.link.is_new(message)
        for body in peer.link.read(message, outgoing.now):
            handler = self._handlers.get(type(body))
            if handler is not None and (peer.hello is not None or type(body) is m.HelloRequest):
                handler(peer, body, outgoing)
        outgoing.acknowledge(peer)

    def _end_fenced(self, term: int, outgoing: StepActions) -> None:
        """End because a newer scheduler of this job was started, which replaces this one."""
        self.ended = outgoing.changed = True
        text = (
            f"this scheduler (start {self.term} of its job) was replaced: another scheduler was started "
            f"(start {term}), and the job continues with that scheduler"
        )
        outgoing.actions.append(JobEnded(Failure("FencedError", text)))

    def _add_peer(self, name: Hashable, now: float) -> PeerConnection:
        if len(self._peers) > _STRANGERS + 2 * len(self._processes):
            self._forget_strangers(now)
        peer = self._peers[name] = PeerConnection(
            name, ReliableLink(self.options.resend_after, self.term), now
        )
        return peer

    def _forget_strangers(self, now: float) -> None:
        old = [
            name
            for name, peer in self._peers.items()
            if peer.hello is None and now - peer.since > self.options.dead_after
        ]
        for name in old:
            del self._peers[name]

    def _answer_ping(self, peer: PeerConnection, message: m.PingRequest, outgoing: StepActions) -> None:
        outgoing.send_unreliable(peer, m.PingReply(message.number))

    def _tick(self, outgoing: StepActions) -> None:
        self._detector.check_silences(outgoing)
        self._admission.admit_waiting(outgoing)
        self._shutdown.check_over(outgoing)
        self._stores.send_stale_views(outgoing)
        peers = self._peers.values()
        for peer in peers:
            if peer.process is None or peer.process.state == ProcessState.HERE:
                outgoing.repeat(peer)
        self.ended = self._shutdown.close_if_over(
            peers, self.options.dead_after, self.options.resend_after / 5, outgoing
        )
