"""The scheduler's state machine: one judge of who is there, which stores there are, and when the job ends.

The rooms beside it divide the work; each knows only those before it:

- `peers`: processes, their sockets, and the messages of one step
- `rank_assignment`: who has which rank
- `stores`: who enters a store, when it starts, what its members are told
- `failure_detector`: who is silent or lost, servers that may come back
- `admission`: who is let in
- `shutdown`: who leaves, and the end of the job
- `member_requests`: what members ask

Its state outlasts its process in a journal: `recording` says what is written there, `machine_state` how a
whole state looks, `journal` is the file.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ....settings.definitions import DEFAULTS
from ..protocol import messages as m
from ..protocol.events import Action, End, Event, Heard, Received, Resumed, Tick
from ..protocol.messages import Failure, ReliableMessage
from ..protocol.reliable_link import ReliableLink
from .admission import Admission
from .failure_detector import FailureDetector, given_up
from .member_requests import MemberRequests
from .peers import Outgoing, Peer, Process, State
from .rank_assignment import RankAssignment
from .shutdown import JobShutdown
from .stores import Stores

_STRANGERS = 4096  # peers that have not said who they are


@dataclass(frozen=True)
class SchedulerOptions:
    """The job, and how patient its scheduler is."""

    #: Everybody who says hello must name it.
    job: str
    num_workers: int
    num_servers: int
    #: Seconds after which a message that has not been acknowledged is sent again.
    resend_after: float = 1.0
    #: Seconds of silence after which a process is lost.
    dead_after: float = DEFAULTS["dead_after"]
    #: Seconds that a lost server has to come back; 0: it cannot.
    server_grace: float = 0.0
    #: Seconds without any worker after which the job is given up.
    timeout: float = DEFAULTS["timeout"]


class Scheduler:
    """The scheduler of one job; `step` is all there is to drive it."""

    def __init__(self, options: SchedulerOptions) -> None:
        self.options = options
        self.ended = False
        #: Whether the last step has changed what must outlast this process.
        self.changed = False
        #: How often the scheduler of this job was started; 0: it cannot be started again.
        self.term = 0
        self._stepped: float | None = None
        self._peers: dict[Hashable, Peer] = {}
        self._assignment = assignment = RankAssignment(options.num_workers, options.num_servers)
        self._stores = stores = Stores(assignment)
        self._detector = detector = FailureDetector(
            assignment, stores, options.dead_after, options.server_grace
        )
        self._admission = Admission(options.job, assignment, stores, detector, options.dead_after)
        self._shutdown = JobShutdown(assignment, stores, detector, self._admission, options.timeout)
        self._connect()

    def _connect(self) -> None:
        """Say who handles which message."""
        self._processes = self._assignment.processes
        shutdown, requests = self._shutdown, MemberRequests(self._assignment, self._stores)
        self._handlers: dict[type, Callable[[Peer, Any, Outgoing], None]] = {
            m.Hello: self._admission.hello,
            m.Bye: shutdown.bye,
            m.Leave: shutdown.leave,
            m.Begin: requests.collect_join_point,
            m.JoinPointReached: requests.join_point_reached,
            m.Installed: requests.installed,
            m.Who: requests.who,
            m.Ping: self._ping,
        }
        of_members: dict[type, Callable[..., None]] = {
            m.JoinRounds: requests.join_rounds,
            m.Barrier: requests.barrier,
            m.CreateKeys: requests.create_keys,
            m.Ready: requests.ready,
            m.Drop: requests.drop,
            m.Lookup: requests.lookup,
            m.Count: requests.count,
            m.Settings: requests.settings,
            m.Command: requests.command,
        }
        self._handlers |= {kind: partial(requests.handle, answer) for kind, answer in of_members.items()}

    def step(self, event: Event, now: float) -> list[Action]:
        """Take one event; return what is to be done."""
        outgoing = Outgoing(now)
        self._pass(now, outgoing)
        if self.ended:
            return outgoing.actions
        if isinstance(event, Received):
            self._received(event.peer, event.message, outgoing)
        elif isinstance(event, Heard):
            self._detector.heard(event.process, outgoing)
        elif isinstance(event, Tick):
            self._tick(outgoing)
        elif isinstance(event, Resumed):
            self._resume(event.term, outgoing)
        self.changed = outgoing.changed
        return outgoing.actions

    # ------------------------------------------------------------------------------------------ what outlasts

    def clocks(self) -> tuple[float | None, float]:
        """When it was stepped last, and when a worker was there last."""
        return self._stepped, self._shutdown.manned

    def step_again(
        self, event: Event, now: float, clocks: tuple[float | None, float], heard: Mapping[str, float]
    ) -> None:
        """Take an event as before, with these clocks, and what had been heard since the one before."""
        self._stepped, self._shutdown.manned = clocks
        for name, when in heard.items():
            if name in self._processes:
                self._processes[name].heard = when
        self.step(event, now)

    def state(self) -> tuple[Any, ...]:
        """All that changes, for `restore`."""
        return (
            self._peers, self._assignment, self._stores, self._detector, self._admission, self._shutdown,
            self._stepped, self.ended, self.term,
        )  # fmt: skip

    def restore(self, state: tuple[Any, ...]) -> None:
        """Be what another one with the same options was."""
        (
            self._peers, self._assignment, self._stores, self._detector, self._admission, self._shutdown,
            self._stepped, self.ended, self.term,
        ) = state  # fmt: skip
        self._connect()

    def _resume(self, term: int, outgoing: Outgoing) -> None:
        """Take nobody's silence for a loss, and say again what may not have come."""
        self.term, outgoing.changed = term, True
        self._detector.resume(outgoing.now)
        self._admission.resume(outgoing.now)
        self._shutdown.resume(outgoing.now)
        for peer in self._peers.values():
            peer.link.resume(term, outgoing.now)

    def process(self, name: str) -> Process | None:
        """Return a process by its name."""
        return self._processes.get(name)

    def process_of(self, name: Hashable) -> Process | None:
        """Return the process behind a socket."""
        peer = self._peers.get(name)
        return None if peer is None else peer.process

    @property
    def deserted(self) -> bool:
        """Whether no worker has ever come."""
        return not self._assignment.workers

    def waits_for(self) -> str:
        """Say who is not there yet, for a log line."""
        missing = [f"server {rank}" for rank in self._assignment.servers.missing]
        missing += [f"worker {rank}" for rank in self._assignment.missing]
        return ", ".join(missing)

    def _pass(self, now: float, outgoing: Outgoing) -> None:
        """Forgive all silence while the scheduler itself was stopped."""
        if self._stepped is None:
            self._shutdown.begin(now)
            outgoing.changed = True
        elif now - self._stepped > self.options.dead_after / 2:
            self._detector.forgive(now - self._stepped)
            self._admission.forgive(now - self._stepped)
            outgoing.changed = True
        self._stepped = now

    def _received(self, name: Hashable, message: Any, outgoing: Outgoing) -> None:
        if type(message) is not ReliableMessage:
            return
        if message.term > self.term:
            self._end_fenced(message.term, outgoing)
            return
        peer = self._peers.get(name) or self._meet(name, outgoing.now)
        process = peer.process
        if message.seen > peer.link.number:
            outgoing.fence(peer, "this scheduler is not the one that you know; start the job again")
            return
        if process is not None and process.state == State.LOST:
            outgoing.fence(peer, given_up(process))
            return
        if process is not None:
            process.heard = outgoing.now
        outgoing.changed = outgoing.changed or peer.link.is_new(message)
        for body in peer.link.read(message, outgoing.now):
            handler = self._handlers.get(type(body))
            if handler is not None and (peer.hello is not None or type(body) is m.Hello):
                handler(peer, body, outgoing)
        outgoing.acknowledge(peer)

    def _end_fenced(self, term: int, outgoing: Outgoing) -> None:
        """Leave the job to the scheduler that was started after this one."""
        self.ended = outgoing.changed = True
        text = (
            f"this scheduler (start {self.term} of its job) was replaced: another was started ({term}), and "
            "the job goes on with that one"
        )
        outgoing.actions.append(End(Failure("FencedError", text)))

    def _meet(self, name: Hashable, now: float) -> Peer:
        if len(self._peers) > _STRANGERS + 2 * len(self._processes):
            self._clear_strangers(now)
        peer = self._peers[name] = Peer(name, ReliableLink(self.options.resend_after, self.term), now)
        return peer

    def _clear_strangers(self, now: float) -> None:
        old = [
            name
            for name, peer in self._peers.items()
            if peer.hello is None and now - peer.since > self.options.dead_after
        ]
        for name in old:
            del self._peers[name]

    def _ping(self, peer: Peer, message: m.Ping, outgoing: Outgoing) -> None:
        outgoing.send_unreliable(peer, m.Pong(message.number))

    def _tick(self, outgoing: Outgoing) -> None:
        self._detector.look(outgoing)
        self._admission.look(outgoing)
        self._shutdown.look(outgoing)
        self._stores.look(outgoing)
        peers = self._peers.values()
        for peer in peers:
            if peer.process is None or peer.process.state == State.HERE:
                outgoing.repeat(peer)
        self.ended = self._shutdown.close(
            peers, self.options.dead_after, self.options.resend_after / 5, outgoing
        )
