"""The worker's state machine: one store of one worker process, its requests and what has become of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from ....settings.table import DEFAULTS
from ..protocol.events import (
    ECHO,
    Action,
    Connect,
    Done,
    Event,
    Failed,
    MetScheduler,
    Received,
    RetrySlice,
    SchedulerLost,
    SchedulerRequest,
    Send,
    Shrunk,
    SliceReceived,
    SliceRequest,
    Start,
    StoodStill,
    Submit,
    Tick,
    ViewChanged,
    Welcomed,
)
from ..protocol.losses import lost, stopped
from ..protocol.messages import (
    BY_FRAME,
    Answer,
    Attach,
    Attached,
    Batch,
    Begin,
    Failure,
    Fenced,
    Hello,
    JoinPointReached,
    Kind,
    Leave,
    LeftOut,
    Loss,
    Member,
    Met,
    Missing,
    PayloadLocation,
    Ping,
    Pong,
    Record,
    Refused,
    ReliableMessage,
    View,
    Welcome,
    Who,
)
from ..protocol.reliable_link import ReliableLink
from ..protocol.silence import SilenceDetector
from .request_table import Operation, Request, Requests

_PULL, _PUSH, _PUSHPULL, _INIT = Kind.PULL, Kind.PUSH, Kind.PUSHPULL, Kind.INIT
_PUSHES = frozenset((Kind.PUSH, Kind.PUSHPULL))
_VALUE, _FAILED = Kind.VALUE, Kind.FAILED
_new = tuple.__new__

SCHEDULER = "scheduler"


@dataclass(frozen=True)
class WorkerOptions:
    """How patient a worker is.

    Attributes
    ----------
    credit : int
        Bytes that may be on the way to one server.
    batch_bytes : int
        Requests are put together up to so many bytes.
    resend : float
        Seconds after which a request without an answer is asked for again.
    letter : float
        The same for what goes to the scheduler.
    dead_after : float
        Seconds without a word of the scheduler, while something waits, after which it is lost.
    start : float
        The same before its first word: it may be started after this process. 0: as `dead_after`.
    echoes : bool
        Whether `ECHO` can be reached before the scheduler has said where: another store knows it.
    """

    credit: int = DEFAULTS["credit_bytes"]
    batch_bytes: int = 1 << 20
    resend: float = DEFAULTS["resend"]
    letter: float = 1.0
    dead_after: float = DEFAULTS["dead_after"]
    start: float = 0.0
    echoes: bool = False


class _Server:
    """One server as this worker knows it."""

    __slots__ = ("attached", "attempted", "begun", "incarnation", "lost", "met", "requests")

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        self.incarnation = -1
        self.attached = False
        self.met = False  # attached to it or to one whose place it has taken
        self.attempted = 0.0
        self.begun = 0  # epoch in which this worker began, of which the server has told the rounds
        self.lost: Failure | None = None


class Worker:
    """One store of a worker; `step` is all there is to drive it."""

    def __init__(self, hello: Hello, options: WorkerOptions | None = None, memory: str = "") -> None:
        self.hello = hello
        self.options = options or WorkerOptions()
        self.memory = memory
        self.welcome: Welcome | None = None
        self.view: View | None = None
        self.failure: Failure | None = None
        self.missing: Missing | None = None
        self._link = ReliableLink(self.options.letter)
        self._servers: dict[int, _Server] = {}
        self._operations: dict[Hashable, Operation] = {}
        self._asks: dict[int, Hashable] = {}
        self._delivered: dict[int, Hashable] = {}  # by number of the letter: done when it has come
        self._request = 0
        self._epoch = 0  # of the view that is known and, if somebody begins in it, reached
        self._late = False  # took a lost worker's place, and has not begun
        self._held: list[Submit] = []  # until it has
        self._begun = 0  # epoch in which it did
        self._bases: tuple[tuple[int, int], ...] = ()  # as the scheduler has told them
        self._left = False
        self._shrunk: set[int] = set()  # ranks that rounds go on without
        #: Whether the scheduler has ever said a word.
        self.met = False
        self._silence = SilenceDetector(self.options.dead_after)
        self._echoes = self.options.echoes
        self._still = (0.0, 0.0)  # seconds that the process was stopped last, and until when
        self._handlers: dict[type, Callable[[Any, float, list[Action]], None]] = {
            Met: self._has_met,
            Welcome: self._welcomed,
            View: self._viewed,
            Answer: self._answered,
            Refused: self._refused,
            Fenced: self._fenced,
            Ping: self._ping,
            Missing: self._told,
        }

    @property
    def busy(self) -> bool:
        """Whether something has no answer yet."""
        return bool(self._operations or self._asks or self._delivered or self._held)

    def step(self, event: Event, now: float) -> list[Action]:
        """Take one event; return what is to be done."""
        actions: list[Action] = []
        self._silence.step(now)
        kind = type(event)
        if kind is Received:
            self._received(event.peer, event.message, now, actions)  # type: ignore[union-attr]
        elif kind is Submit:
            self._submit(event, now, actions)  # type: ignore[arg-type]
        elif kind is Tick:
            self._tick(now, actions)
        elif kind is SchedulerLost:
            self._out(event.failure, actions)  # type: ignore[union-attr]
        elif kind is StoodStill:
            self._still = (event.seconds, now)  # type: ignore[union-attr]
        elif kind is SchedulerRequest:
            self._ask(event, now, actions)  # type: ignore[arg-type]
        elif kind is RetrySlice:
            self._again(event, now, actions)  # type: ignore[arg-type]
        elif kind is Start:
            self._write(self.hello, now, actions)
        return actions

    def pending(self, op: Hashable) -> list[tuple[int, Record]]:
        """Server and request of whatever an operation still waits for."""
        return [(rank, one) for rank, at in self._servers.items() for one in at.requests.waiting(op)]

    def keep(self, op: Hashable) -> bool:
        """Read an operation's memory no more, and go on with it all the same; False: that cannot be."""
        tables = [at.requests for at in self._servers.values()]
        if any(table.lends(op) for table in tables):
            return False
        for table in tables:
            table.keep(op)
        return True

    def complete(self, server: int, slice: int) -> int:
        """How many of this worker's pushes into a slice are in rounds that are known to be complete."""
        requests = self._servers[server].requests
        return requests.complete.get(slice, 0) - requests.bases.get(slice, 0)

    def base(self, server: int, slice: int) -> int:
        """Round of a slice after which this worker's own begin."""
        return self._servers[server].requests.bases.get(slice, 0)

    @property
    def late(self) -> bool:
        """Whether it took a lost worker's place, and has not begun."""
        return self._late

    def who(self, server: int | None, slice: int = -1, round: int = 0) -> Send:
        """Ask whom a round waits for, or with None the scheduler, whom start or barrier or init wait for.

        `missing` has the answer some time later.
        """
        self.missing = None
        store = self.welcome.store if self.welcome else -1
        question = Who(store, slice, round)
        return Send(SCHEDULER, self._link.aside(question)) if server is None else Send(server, question)

    # ------------------------------------------------------------------------------------ requests to servers

    def _submit(self, event: Submit, now: float, actions: list[Action]) -> None:
        error = self._cannot(event.parts)
        if error or not event.parts:
            actions.append(Done(event.op, error))
            return
        if self._late and self._waits(event.parts):
            self._hold(event, now, actions)
            return
        self._look_where(event.parts, now, actions)
        operation = self._operations[event.op] = Operation(event.op, len(event.parts))
        servers = self._servers
        touched = set()
        for index, part in enumerate(event.parts):
            at = servers[part.server]
            at.requests.add(
                Request(operation, index, self._counted(at, part.record), part.payload), event.priority
            )
            touched.add(part.server)
        for rank in touched:
            self._pump(rank, now, actions)

    def _waits(self, parts: Iterable[SliceRequest]) -> bool:
        """Whether these come after the first push of a worker that came back, or are it."""
        held = {part.record.slice for event in self._held for part in event.parts}
        return any(part.record.kind in _PUSHES or part.record.slice in held for part in parts)

    def _hold(self, event: Submit, now: float, actions: list[Action]) -> None:
        """Wait until the others are where this worker begins."""
        if not self._held and self.welcome is not None:
            first = next(part.record.slice for part in event.parts if part.record.kind in _PUSHES)
            self._write(Begin(self.welcome.store, first), now, actions)
        self._held.append(event)

    def _look_where(self, parts: Iterable[SliceRequest], now: float, actions: list[Action]) -> None:
        """Say what was pushed so far, if this is where somebody else begins."""
        view = self.view
        if view is None or self._epoch == view.epoch or self._late:
            return
        if any(at.begun < self._begun for at in self._servers.values()):
            return  # it has just begun itself, and cannot say it in rounds: the next time, then
        if any(part.record.slice == view.begin and part.record.kind in _PUSHES for part in parts):
            self._epoch = view.epoch
            pushed = tuple(one for at in self._servers.values() for one in at.requests.pushed())
            self._write(JoinPointReached(view.store, view.epoch, pushed), now, actions)

    def _cannot(self, parts: Iterable[SliceRequest]) -> Failure | None:
        """Why the requests cannot be made."""
        if self.failure is not None:
            return self.failure
        broken = self.view is not None and self.view.broken
        for part in parts:
            at = self._servers[part.server]
            if at.lost is not None:
                return at.lost
            if broken and part.record.kind in (_PUSH, _PUSHPULL, _INIT):
                return self._broken()
        return None

    def _counted(self, at: _Server, record: Record) -> Record:
        """Say how many pushes of this worker there are, with this one."""
        slice_ = record[1]
        pushes = at.requests.pushes
        if record[0] == _PUSH or record[0] == _PUSHPULL:
            count = pushes[slice_] = pushes.get(slice_, 0) + 1
        elif self.view is not None and self.view.broken:
            count = record[3]  # no round will be complete: what is there, or the one that the caller names
        else:
            count = max(record[3], pushes.get(slice_, 0))
        return _new(Record, (record[0], slice_, 0, count, *record[4:]))

    def _again(self, event: RetrySlice, now: float, actions: list[Action]) -> None:
        operation = self._operations.get(event.op)
        if operation is None:
            operation = self._operations[event.op] = Operation(event.op, 0)
        operation.left += 1
        record = event.part.record
        kind = _PULL if record.kind == _PUSHPULL else record.kind
        payload = None if kind == _PULL else event.part.payload
        place, nbytes = (PayloadLocation.NONE, 0) if kind == _PULL else (record.place, record.nbytes)
        at = self._servers[event.part.server]
        record = self._counted(at, record._replace(kind=kind, stamp=BY_FRAME, place=place, nbytes=nbytes))
        at.requests.add(Request(operation, event.index, record, payload), 0)
        self._pump(event.part.server, now, actions)

    def _pump(self, rank: int, now: float, actions: list[Action]) -> None:
        at = self._servers[rank]
        if at.attached and at.begun >= self._begun:
            self._send(rank, at.requests.pump(now), actions)

    def _send(self, rank: int, batches: list[tuple[list[Record], list[Any]]], actions: list[Action]) -> None:
        welcome = self.welcome
        if welcome is None:
            return
        head = (welcome.store, welcome.rank, self.hello.incarnation, self._epoch)
        for records, frames in batches:
            actions.append(Send(rank, Batch(*head, records, tuple(frames))))

    def _received(self, peer: Hashable, message: Any, now: float, actions: list[Action]) -> None:
        if type(message) is Batch:
            self._replies(peer, message, now, actions)  # type: ignore[arg-type]
        elif peer == ECHO:
            self._silence.hear(now)
        elif type(message) is ReliableMessage:
            self._read(message, now, actions)
        elif type(message) is Attached:
            self._attached(peer, message, now, actions)  # type: ignore[arg-type]
        elif type(message) is Fenced:
            if not self._left:
                self._fenced(message, now, actions)
        elif type(message) is Missing:
            self._told(message, now, actions)
        elif type(message) is LeftOut:
            self._left_out(peer, message, actions)  # type: ignore[arg-type]

    def _left_out(self, server: int, message: LeftOut, actions: list[Action]) -> None:
        known = self.welcome is not None and message.store == self.welcome.store
        if known and server in self._servers and message.rank not in self._shrunk:
            self._shrunk.add(message.rank)
            own = message.round - self.base(server, message.slice)
            actions.append(Shrunk(message.rank, message.slice, own))

    def _replies(self, rank: int, batch: Batch, now: float, actions: list[Action]) -> None:
        at = self._servers.get(rank)
        if at is None or batch.incarnation != self.hello.incarnation or not at.attached:
            return
        done, unknown = at.requests.answered(batch, now)
        for request, record in done:
            operation = request.operation
            if operation is None:
                continue
            operation.left -= 1
            if record[0] == _VALUE:
                actions.append(SliceReceived(operation.name, request.index, record, batch.frames))
            elif record[0] == _FAILED and operation.error is None:
                operation.error = _failure(record, batch)
            if not operation.left:
                del self._operations[operation.name]
                actions.append(Done(operation.name, operation.error))
        if unknown:
            self._send(rank, at.requests.repeats(unknown), actions)
        self._pump(rank, now, actions)

    def _attached(self, rank: int, message: Attached, now: float, actions: list[Action]) -> None:
        at = self._servers.get(rank)
        if at is None or message.incarnation != at.incarnation:
            return
        begins = at.begun < self._begun <= message.epoch
        if begins or not at.met:
            at.requests.bases.update(message.bases)
            at.requests.accepted.update(message.bases)
        if begins:
            at.begun = self._begun
        at.attached = at.met = True
        self._pump(rank, now, actions)

    # ------------------------------------------------------------------------------ requests to the scheduler

    def _ask(self, event: SchedulerRequest, now: float, actions: list[Action]) -> None:
        if self.failure is not None or self.welcome is None:
            error = self.failure or Failure("KVStoreError", "the scheduler has not answered yet")
            actions.append(Done(event.op, error))
            return
        message: Any = event.message
        store = {"store": self.welcome.store} if hasattr(message, "store") else {}
        if type(message) is Leave:
            self._leave(actions)
        if not hasattr(message, "request"):
            self._write(msgspec.structs.replace(message, **store), now, actions)
            self._delivered[self._link.number] = event.op
            return
        self._request += 1
        self._asks[self._request] = event.op
        self._write(msgspec.structs.replace(message, request=self._request, **store), now, actions)

    def _leave(self, actions: list[Action]) -> None:
        """Close: what has no answer yet will never have one."""
        self._left = True
        closed = Failure("ClosedError", "the store is closed")
        for at in self._servers.values():
            at.lost = at.lost or closed
            self._end(at.requests.drop(), closed, actions)
        self._drop_held(closed, actions)

    def _write(self, body: Any, now: float, actions: list[Action]) -> None:
        actions.append(Send(SCHEDULER, self._link.write(body, now)))

    def _read(self, letter: ReliableMessage, now: float, actions: list[Action]) -> None:
        self._silence.hear(now)
        self.met = True
        if now - self._still[1] > self.options.dead_after:
            self._still = (0.0, 0.0)  # nobody has missed it
        for body in self._link.read(letter, now):
            handler = self._handlers.get(type(body))
            if handler is not None:
                handler(body, now, actions)
        delivered = [number for number in self._delivered if number <= self._link.acknowledged]
        actions.extend(Done(self._delivered.pop(number)) for number in delivered)
        owed = self._link.owed()
        if owed is not None:
            actions.append(Send(SCHEDULER, owed))

    def _answered(self, message: Answer, now: float, actions: list[Action]) -> None:
        op = self._asks.pop(message.request, None)
        if op is not None:
            actions.append(Done(op, message.error, message))

    def _ping(self, message: Ping, now: float, actions: list[Action]) -> None:
        actions.append(Send(SCHEDULER, self._link.aside(Pong(message.number))))

    def _told(self, message: Missing, now: float, actions: list[Action]) -> None:
        self.missing = message

    # ----------------------------------------------------------------------------------------- who takes part

    def _has_met(self, message: Met, now: float, actions: list[Action]) -> None:
        self._echoes = True
        actions.append(MetScheduler(message))

    def _welcomed(self, message: Welcome, now: float, actions: list[Action]) -> None:
        if self.welcome is not None:
            return
        self.welcome = message
        self.view = View(
            message.store, message.epoch, message.members, (), (), message.servers, late=message.late
        )
        self._epoch, self._late = message.epoch, message.rank in message.late
        actions.append(Welcomed(message))
        self._meet(message.servers, now, actions)

    def _viewed(self, view: View, now: float, actions: list[Action]) -> None:
        if self.welcome is None or self.view is None or view.epoch <= self.view.epoch or self.failure:
            return
        was_broken = self.view.broken
        self.view = view
        actions.append(ViewChanged(view))
        if self._late or view.begin < 0:
            self._epoch = view.epoch
        self._meet(view.servers, now, actions)
        if self._late and view.begun == self.welcome.rank:
            self._start_pushing(view, now, actions)
        for loss in view.losses:
            if loss.role == "server":
                self._lose(loss, actions)
        if view.broken and not was_broken:
            self._give_up(self._broken(), actions)

    def _start_pushing(self, view: View, now: float, actions: list[Action]) -> None:
        """All others are where this worker begins: ask the servers in which rounds, and go on."""
        self._late, self._begun, self._bases = False, view.epoch, view.bases
        for rank, at in self._servers.items():
            if at.lost is None:
                self._attach(rank, now, actions)
        held, self._held = self._held, []
        for event in held:
            self._submit(event, now, actions)

    def _drop_held(self, failure: Failure, actions: list[Action]) -> None:
        held, self._held = self._held, []
        actions.extend(Done(event.op, failure) for event in held)

    def _meet(self, servers: Iterable[Member], now: float, actions: list[Action]) -> None:
        """Connect to servers that are new, or in place of old ones."""
        options = self.options
        for member in servers:
            at = self._servers.get(member.rank)
            if at is None:
                requests = Requests(options.credit, options.batch_bytes, options.resend)
                at = self._servers[member.rank] = _Server(requests)
            if at.incarnation != member.incarnation:
                at.incarnation = member.incarnation
                at.attached = False
                at.requests.begin_again()
                actions.append(Connect(member.rank, member.address, member.incarnation))
                self._attach(member.rank, now, actions)

    def _attach(self, rank: int, now: float, actions: list[Action]) -> None:
        at = self._servers[rank]
        at.attempted = now
        if self.welcome is not None:
            known = tuple((dict(self._bases) | at.requests.accepted).items()) if not at.attached else ()
            who = (self.welcome.store, self.welcome.rank, self.hello.incarnation, self._epoch)
            met = at.met and at.begun >= self._begun
            actions.append(Send(rank, Attach(*who, self.hello.job, known, met, self._late, self.memory)))

    def _lose(self, loss: Loss, actions: list[Action]) -> None:
        at = self._servers.get(loss.rank)
        if at is not None and at.lost is None:
            at.lost = lost((loss,), len(self._servers))
            self._end(at.requests.drop(), at.lost, actions)

    def _broken(self) -> Failure:
        return lost(self.view.losses, len(self._servers)) if self.view is not None else lost(())

    def _give_up(self, failure: Failure, actions: list[Action]) -> None:
        """Nobody will complete what is under way at the servers."""
        for at in self._servers.values():
            self._end(at.requests.disown(), failure, actions)
        self._drop_held(failure, actions)

    def _end(self, operations: Iterable[Operation], failure: Failure, actions: list[Action]) -> None:
        known = [one for one in operations if self._operations.pop(one.name, None) is not None]
        actions.extend(Done(one.name, one.error or failure) for one in known)

    def _refused(self, message: Refused, now: float, actions: list[Action]) -> None:
        why = Failure(message.error, message.text, message.role, message.rank, message.silent)
        self._out(why, actions)

    def _fenced(self, message: Fenced, now: float, actions: list[Action]) -> None:
        self._out(self._told_of_stop(Failure("FencedError", message.text)), actions)

    def _told_of_stop(self, why: Failure) -> Failure:
        """Word why this process is out: if it was stopped itself, that comes first."""
        if not self._still[0]:
            return why
        who = f"worker {self.welcome.rank}" if self.welcome is not None else "this worker"
        return stopped(who, self._still[0], self.options.dead_after, why)

    def _out(self, failure: Failure, actions: list[Action]) -> None:
        """End: everything fails, from now on too."""
        if self.failure is not None:
            return
        self.failure = failure
        for at in self._servers.values():
            self._end(at.requests.drop(), failure, actions)
        self._drop_held(failure, actions)
        self._end(list(self._operations.values()), failure, actions)
        waiting = [*self._asks.values(), *self._delivered.values()]
        self._asks.clear()
        self._delivered.clear()
        actions.extend(Done(op, failure) for op in waiting)
        actions.append(Failed(failure))

    # --------------------------------------------------------------------------------------------------- time

    def _tick(self, now: float, actions: list[Action]) -> None:
        if self.failure is not None:
            return
        self._look_for_scheduler(now, actions)
        actions.extend(Send(SCHEDULER, letter) for letter in self._link.again(now))
        for rank, at in self._servers.items():
            if at.lost is not None:
                continue
            told = at.attached and at.begun >= self._begun
            if not told and now - at.attempted >= self.options.letter:
                self._attach(rank, now, actions)
            if not at.attached:
                continue
            late = at.requests.late(now)
            if late:
                self._send(rank, at.requests.probes(late), actions)
            self._pump(rank, now, actions)

    def _look_for_scheduler(self, now: float, actions: list[Action]) -> None:
        """While something waits, make sure that the scheduler is there."""
        if not self.busy and self.welcome is not None:
            self._silence.hear(now)
            return
        patience = self.options.dead_after if self.met else self.options.start or self.options.dead_after
        if self._silence.lost(now, patience):
            if self._left:
                # It has ended, most likely, and its last word was lost.
                actions.extend(Done(op) for op in self._delivered.values())
                self._delivered.clear()
                return
            loss = Loss("scheduler", 0, self._silence.silent(now))
            self._out(self._told_of_stop(lost((loss,))), actions)
        elif self._silence.asks(now):
            if self._echoes:
                actions.append(Send(ECHO, Ping(0)))
            if not self._echoes or self._silence.is_long(now):  # another may be at its address
                actions.append(Send(SCHEDULER, self._link.aside(Ping(0))))


def _failure(record: Record, batch: Batch) -> Failure:
    """Read why a request failed."""
    try:
        data = memoryview(batch.frames[record.frame])[record.offset : record.offset + record.nbytes]
        return msgspec.msgpack.decode(data, type=Failure)
    except (msgspec.MsgspecError, IndexError, TypeError, ValueError):
        return Failure("ProtocolError", "a server failed a request, and its reason cannot be read")
