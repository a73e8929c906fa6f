"""The worker's state machine: one store of one worker process, its requests and what has become of them.

What it knows of its store is in `member.py`, what it has asked of servers in `server_links.py`, what of the
scheduler in `scheduler_link.py`; here is what an event means to the three of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from ...protocol import events
from ...protocol import messages as m
from ...protocol.events import ECHO, Action, Done, Received, Send, Submit
from ...protocol.messages import Answer, Failure, Kind, Record, View
from .member import StoreMember
from .options import WorkerOptions
from .request_table import RequestTable
from .scheduler_link import SchedulerLink
from .server_links import ServerLinks

_PUSHES = frozenset((Kind.PUSH, Kind.PUSHPULL))


class WorkerMachine:
    """One store of a worker; `step` is all there is to drive it."""

    def __init__(self, hello: m.Hello, options: WorkerOptions | None = None, memory: str = "") -> None:
        self._hello, options = hello, options or WorkerOptions()
        self.member = StoreMember()
        self.failure: Failure | None = None
        self.missing: m.Missing | None = None
        #: Those who wait, for what nothing that is under way says, while the scheduler is there.
        self.listeners: set[object] = set()
        self._scheduler = SchedulerLink(options)
        self._servers = ServerLinks(self.member, hello, options, memory)
        self._held: list[Submit] = []  # pushes, until this worker has reached its join point
        self._left = False
        self._shrunk: set[int] = set()  # ranks that rounds go on without
        self._handlers: dict[type, Callable[[Any, float, list[Action]], None]] = {
            m.Met: self._met_scheduler,
            m.Welcome: self._welcomed,
            View: self._viewed,
            Answer: self._scheduler.answered,
            m.Refused: self._refused,
            m.Fenced: self._fenced,
            m.Ping: self._ping,
            m.Missing: self._is_missing,
        }

    @property
    def busy(self) -> bool:
        """Whether something has no answer yet, or somebody waits otherwise."""
        return self._servers.busy or self._scheduler.busy or bool(self._held or self.listeners)

    @property
    def met(self) -> bool:
        """Whether the scheduler has ever said a word."""
        return self._scheduler.met

    def step(self, event: events.Event, now: float) -> list[Action]:
        """Take one event; return what is to be done."""
        actions: list[Action] = []
        self._scheduler.silence.step(now)
        kind = type(event)
        if kind is Received:
            self._received(event.peer, event.message, now, actions)  # type: ignore[union-attr]
        elif kind is Submit:
            self._submit(event, now, actions)  # type: ignore[arg-type]
        elif kind is events.Tick:
            self._tick(now, actions)
        elif kind is events.SchedulerLost:
            self._fail(event.failure, actions)  # type: ignore[union-attr]
        elif kind is events.StoodStill:
            self._scheduler.stood_still(event.seconds, now)  # type: ignore[union-attr]
        elif kind is events.SchedulerRequest:
            self._request(event, now, actions)  # type: ignore[arg-type]
        elif kind is events.StreamLost:
            self._servers.suspect(event.server)  # type: ignore[union-attr]
        elif kind is events.RetrySlice:
            self._servers.retry(event, now, actions)  # type: ignore[arg-type]
        elif kind is events.Taken:
            self._servers.taken(event, now, actions)  # type: ignore[arg-type]
        elif kind is events.Start:
            self._scheduler.write(self._hello, now, actions)
        return actions

    # -------------------------------------------------------------------------------------- what callers ask

    def pending(self, op: Hashable) -> list[tuple[int, Record]]:
        """Server and request of whatever an operation still waits for."""
        return self._servers.pending(op)

    def suspect(self) -> None:
        """Ask all servers at the next tick for whatever has no answer: some of it was lost, perhaps."""
        self._servers.suspect_all()

    def oldest(self) -> tuple[int, int, int] | None:
        """Server, slice and round of a request that has waited long; None: nothing is under way."""
        return self._servers.oldest()

    def keep(self, op: Hashable) -> bool:
        """Read an operation's memory no more, and go on with it all the same; False: that cannot be."""
        return self._servers.keep(op)

    def forget_reads(self) -> None:
        """Let pushes go before values that were asked for, and that nobody reads any more."""
        self._servers.forget_reads()

    def complete(self, server: int, slice: int) -> int:
        """How many of this worker's pushes into a slice are in rounds that are known to be complete."""
        requests = self._servers[server].requests
        return requests.complete.get(slice, 0) - requests.first_rounds.get(slice, 0)

    def answered(self, server: int, slice: int) -> int:
        """How many of this worker's pushes into a slice are answered, where they are so in their order."""
        requests = self._servers[server].requests
        first = requests.first_rounds.get(slice, 0)
        return requests.accepted.get(slice, first) - first

    def base(self, server: int, slice: int) -> int:
        """Round of a slice after which this worker's own begin."""
        return self._servers[server].requests.first_rounds.get(slice, 0)

    def who(self, server: int | None, slice: int = -1, round: int = 0) -> Send:
        """Ask whom a round waits for, or with None the scheduler, whom start or barrier or init wait for.

        `missing` has the answer some time later.
        """
        self.missing = None
        welcome = self.member.welcome
        question = m.Who(welcome.store if welcome else -1, slice, round)
        return Send(server, question) if server is not None else self._scheduler.unreliable(question)

    # --------------------------------------------------------------------------------------------- exchanges

    def allows_exchange(self, servers: Iterable[int]) -> bool:
        """Whether all is as usual, and nothing is under way to these servers."""
        view, member = self.member.view, self.member
        if self.failure is not None or self._left or member.rejoining or view is None:
            return False
        usual = not view.broken and view.epoch == member.epoch
        return usual and all(map(self._servers.is_idle, servers))

    def begin_exchange(self, server: int, slices: list[int], pushes: bool) -> tuple[int, int, list[int]]:
        """Count one request for each slice of a server, after `allows_exchange`; the caller sends them.

        Returns the first sequence; bytes that were sent before; and rounds, as the server counts. Before any
        event `end_exchange` must be told of what was answered, and `adopt` of what was not.
        """
        return self._servers[server].requests.begin_exchange(slices, pushes)

    def requests_to(self, server: int) -> RequestTable:
        """Return what counts the requests to a server, for who begins and ends many small exchanges there."""
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
        """Note which requests of an exchange were answered, as `RequestTable.end_exchange`."""
        return self._servers[server].requests.end_exchange(slices, rounds, last, nbytes, received)

    def adopt(
        self,
        op: Hashable,
        parts: Sequence[tuple[int, events.SliceRequest]],
        ends: Mapping[int, int],
        now: float,
        priority: int | None = None,
    ) -> list[Action]:
        """Go on with the rest of an exchange as with an operation.

        `ends` are by server: requests from this sequence on are yet to be sent. They come first, unless there
        is a `priority`: then all exchanges with later sequences are to be adopted after this one.
        """
        return self._servers.adopt(op, parts, ends, now, priority)

    # -------------------------------------------------------------------------------------------- operations

    def _submit(self, event: Submit, now: float, actions: list[Action]) -> None:
        error = self.failure or self._servers.refusal(event.parts)
        if error or not event.parts:
            actions.append(Done(event.op, error))
            return
        member = self.member
        if member.rejoining and self._waits(event.parts):
            self._hold(event, now, actions)
            return
        if member.view is not None and member.epoch != member.view.epoch and not member.rejoining:
            self._look_for_join_point(member.view, event.parts, now, actions)
        self._servers.submit(event, now, actions)

    def _waits(self, parts: Iterable[events.SliceRequest]) -> bool:
        """Whether these come after the first push of a worker that came back, or are it."""
        held = {part.record.slice for event in self._held for part in event.parts}
        return any(part.record.kind in _PUSHES or part.record.slice in held for part in parts)

    def _hold(self, event: Submit, now: float, actions: list[Action]) -> None:
        """Wait until the others have reached this worker's join point."""
        if not self._held and self.member.welcome is not None:
            first = next(part.record.slice for part in event.parts if part.record.kind in _PUSHES)
            self._scheduler.write(m.Begin(self.member.welcome.store, first), now, actions)
        self._held.append(event)

    def _look_for_join_point(
        self, view: View, parts: Iterable[events.SliceRequest], now: float, actions: list[Action]
    ) -> None:
        """Say what was pushed so far, if this is another worker's join point."""
        if any(link.join_epoch < self.member.join_epoch for link in self._servers.all()):
            return  # it has just begun itself, and cannot say it in rounds: the next time, then
        if any(part.record.slice == view.begin and part.record.kind in _PUSHES for part in parts):
            self.member.epoch = view.epoch
            pushed = tuple(one for link in self._servers.all() for one in link.requests.pushed())
            self._scheduler.write(m.JoinPointReached(view.store, view.epoch, pushed), now, actions)

    def _drop_held(self, failure: Failure, actions: list[Action]) -> None:
        held, self._held = self._held, []
        actions.extend(Done(event.op, failure) for event in held)

    def _request(self, event: events.SchedulerRequest, now: float, actions: list[Action]) -> None:
        welcome = self.member.welcome
        if self.failure is not None or welcome is None:
            error = self.failure or Failure("KVStoreError", "the scheduler has not answered yet")
            actions.append(Done(event.op, error))
            return
        if type(event.message) is m.Leave:
            self._leave(actions)
        self._scheduler.request(event, welcome.store, now, actions)

    def _leave(self, actions: list[Action]) -> None:
        """Close: what has no answer yet will never have one."""
        self._left = True
        closed = Failure("ClosedError", "the store is closed")
        self._servers.leave(closed, actions)
        self._drop_held(closed, actions)

    # ---------------------------------------------------------------------------------------------- messages

    def _received(self, peer: Hashable, message: Any, now: float, actions: list[Action]) -> None:
        if type(message) is m.Batch:
            self._servers.replies(peer, message, now, actions)  # type: ignore[arg-type]
        elif peer == ECHO:
            self._scheduler.silence.hear(now)
        elif type(message) is m.ReliableMessage:
            self._read(message, now, actions)
        elif type(message) is m.Attached:
            self._servers.attached(peer, message, now, actions)  # type: ignore[arg-type]
        elif type(message) is m.Fenced:
            if not self._left:
                self._fenced(message, now, actions)
        elif type(message) is m.Missing:
            self._is_missing(message, now, actions)
        elif type(message) is m.LeftOut:
            self._left_out(peer, message, actions)  # type: ignore[arg-type]

    def _read(self, message: m.ReliableMessage, now: float, actions: list[Action]) -> None:
        for body in self._scheduler.read(message, now):
            handler = self._handlers.get(type(body))
            if handler is not None:
                handler(body, now, actions)
        self._scheduler.acknowledge(actions)

    def _left_out(self, server: int, message: m.LeftOut, actions: list[Action]) -> None:
        welcome = self.member.welcome
        known = welcome is not None and message.store == welcome.store
        if known and server in self._servers and message.rank not in self._shrunk:
            self._shrunk.add(message.rank)
            own = message.round - self.base(server, message.slice)
            actions.append(events.Shrunk(message.rank, message.slice, own))

    def _ping(self, message: m.Ping, now: float, actions: list[Action]) -> None:
        actions.append(self._scheduler.unreliable(m.Pong(message.number)))

    def _is_missing(self, message: m.Missing, now: float, actions: list[Action]) -> None:
        self.missing = message

    # ---------------------------------------------------------------------------------------- who takes part

    def _met_scheduler(self, message: m.Met, now: float, actions: list[Action]) -> None:
        self._scheduler.echoes = True
        self._scheduler.absence = message.absence
        actions.append(message)

    def _welcomed(self, message: m.Welcome, now: float, actions: list[Action]) -> None:
        if self.member.welcome is None:
            self.member.enter(message)
            actions.append(message)
            self._servers.meet(message.servers, now, actions)

    def _viewed(self, view: View, now: float, actions: list[Action]) -> None:
        member = self.member
        if member.welcome is None or member.view is None or view.epoch <= member.view.epoch or self.failure:
            return
        was_broken = member.broken
        member.see(view)
        actions.append(view)
        self._servers.meet(view.servers, now, actions)
        if member.rejoining and view.begun == member.welcome.rank:
            self._start_pushing(view, now, actions)
        for loss in view.losses:
            if loss.role == "server":
                self._servers.lose(loss, actions)
        if view.broken and not was_broken:
            failure = member.loss()
            self._servers.give_up(failure, actions)
            self._drop_held(failure, actions)

    def _start_pushing(self, view: View, now: float, actions: list[Action]) -> None:
        """All others have reached the join point: ask the servers in which rounds to begin, and go on."""
        self.member.join(view)
        self._servers.attach_again(now, actions)
        held, self._held = self._held, []
        for event in held:
            self._submit(event, now, actions)

    # -------------------------------------------------------------------------------------------------- ends

    def _refused(self, message: m.Refused, now: float, actions: list[Action]) -> None:
        why = Failure(message.error, message.text, message.role, message.rank, message.silent)
        self._fail(why, actions)

    def _fenced(self, message: m.Fenced, now: float, actions: list[Action]) -> None:
        self._fail(self._explained(Failure("FencedError", message.text)), actions)

    def _explained(self, why: Failure) -> Failure:
        welcome = self.member.welcome
        return self._scheduler.explained(why, f"worker {welcome.rank}" if welcome else "this worker")

    def _fail(self, failure: Failure, actions: list[Action]) -> None:
        """End: everything fails, from now on too."""
        if self.failure is not None:
            return
        self.failure = failure
        self._servers.drop(failure, actions)
        self._drop_held(failure, actions)
        self._servers.end_all(failure, actions)
        self._scheduler.fail(failure, actions)
        actions.append(events.Failed(failure))

    def _tick(self, now: float, actions: list[Action]) -> None:
        if self.failure is not None:
            return
        self._look_for_scheduler(now, actions)
        self._scheduler.resend(now, actions)
        self._servers.tick(now, actions)

    def _look_for_scheduler(self, now: float, actions: list[Action]) -> None:
        """While something waits, make sure that the scheduler is there."""
        if not self.busy and self.member.welcome is not None:
            self._scheduler.silence.hear(now)
            return
        failure = self._scheduler.look(now, actions)
        if failure is not None and self._left:
            self._scheduler.end_delivered(actions)
        elif failure is not None:
            self._fail(self._explained(failure), actions)
