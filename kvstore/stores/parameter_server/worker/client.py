"""A worker's end of the parameter server: the sockets, driven by whoever waits.

There is no thread for it. Whoever calls the store takes the sockets, sends, and drives the worker's machine
until what it waits for is there; another thread that wants them is let in between two steps. Signs of life
are the pulse's business, which needs no thread of Python's.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import msgspec

from ....errors import ArgumentError, ClosedError, KVStoreError, PeerLostError, TimeoutError
from ....settings.options import StoreConfig
from ....waiting import WaitClock
from ..protocol import events
from ..protocol import messages as m
from ..protocol.failures import raised
from ..protocol.losses import lost
from ..protocol.messages import Answer, Control, Failure, PayloadLocation, Record, View
from ..transport.shared_buffers import PeerBuffers, SharedBufferPool
from ..transport.sockets import WorkerSockets
from .machine import Worker
from .process import this_process, worker_roles

log = logging.getLogger("kvstore.ps")

_ANSWERED = 1.0  # seconds for the answer for whom a wait is, before it is told
_TICK = 0.1  # seconds between two looks at the clock
_FAREWELL = 5.0  # seconds for the scheduler to hear that this worker leaves

#: Takes in the value of one slice: ``take(part, record, frames)``; False asks for it once more, in a frame.
Take = Callable[[Any, Record, Sequence[Any]], bool]


class Request(NamedTuple):
    """What is wanted of one slice."""

    server: int
    record: Record
    payload: tuple[Any, ...]
    take: Take | None
    #: The caller's name for the slice, which `take` gets.
    part: Any


class Operation:
    """Requests under way."""

    __slots__ = ("answer", "done", "error", "requests", "rounds")

    def __init__(self, requests: Sequence[Request] = ()) -> None:
        self.requests = requests
        #: Of the values that came, by request, as the servers count.
        self.rounds: dict[int, int] = {}
        self.done = False
        self.error: Failure | None = None
        self.answer: Answer | None = None


class Client:
    """One store of one worker process.

    Parameters
    ----------
    config : StoreConfig
    synchronous : bool
        Whether pushes count in rounds.
    slice_bytes : int
        Size of the slices into which the scheduler cuts large keys.

    Raises
    ------
    ConfigError
        No variables say where the servers are, or the scheduler refuses this process.
    TimeoutError
        The job did not come together within the deadline.
    """

    def __init__(self, config: StoreConfig, synchronous: bool, slice_bytes: int) -> None:
        self._config, self._roles = config, worker_roles()
        self._process = this_process(self._roles)
        self._lock = threading.Lock()
        self._waiters: deque[None] = deque()  # threads that want the sockets
        self._operations: dict[Hashable, Operation] = {}
        self._actions: deque[events.Action] = deque()  # of the machine, yet to be carried out
        self._names = itertools.count()
        self._inboxes: dict[Hashable, PeerBuffers | None] = {}
        self._barriers = 0
        self._released: set[Operation] = set()  # nobody waits for these
        #: Says which key a slice is of.
        self.name_of: Callable[[int], str] = "slice {}".format
        self._late: Failure | None = None  # what became of one of them
        self._ticked = 0.0
        self._ran = (
            time.monotonic(),
            time.process_time(),
        )  # when this process ran last, and for how long by then
        self.closed = False
        self._failure: Failure | None = None
        self.outbox = SharedBufferPool() if config.same_host_shm else None
        options = {
            "mode": "sync" if synchronous else "async",
            "on_peer_loss": config.on_peer_loss,
            "slice_bytes": slice_bytes,
        }
        hello = self._process.hello(config.group, options)
        self._machine = Worker(
            hello,
            self._process.worker_options(config.credit_bytes, slice_bytes),
            self.outbox.offer() if self.outbox is not None else "",
        )
        self._sockets = WorkerSockets(self._roles, hello, self._process.echo)
        try:
            self._sockets.check(hello, "the store's options")
        except ArgumentError:
            self._sockets.close()
            raise
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.Send: lambda action: self._sockets.send(action.peer, action.message),
            events.SliceReceived: self._take,
            events.Done: self._done,
            events.Connect: self._connect,
            events.MetScheduler: self._met,
            events.Failed: self._failed,
            events.ViewChanged: lambda action: _tell(action.view),
            events.Shrunk: self._warn,
        }
        try:
            self._step_in(events.Start())
            self._wait(lambda: self._machine.welcome is not None, "the other processes of the job to start")
        except BaseException:
            self.shut()
            raise
        welcome = self._machine.welcome
        assert welcome is not None
        self.rank, self.size = welcome.rank, welcome.size
        self.local_rank, self.local_size = self._process.place(self.rank, self.size)
        self._process.opened(self)

    # ------------------------------------------------------------------------------------ data and questions

    def submit(self, requests: Sequence[Request], priority: int = 0) -> Operation:
        """Send requests, as far as the credit allows; the rest goes while somebody waits.

        Payloads belong to the operation until it is finished. Operations on one slice are submitted one after
        the other.
        """
        self._raise_late()
        operation = Operation(requests)
        name = next(self._names)
        parts = [events.SliceRequest(r.server, r.record, r.payload) for r in requests]
        self._operations[name] = operation
        self._step_in(events.Submit(name, parts, priority))
        return operation

    def finish(self, operation: Operation, what: str) -> None:
        """Wait until all requests of an operation are answered.

        Raises
        ------
        TimeoutError
            After the store's deadline. A push that was under way goes on, unless arrays were being sent that
            are now the caller's again: then the store is of no use any more.
        PeerLostError, UpdaterError, ...
            What a server answered.
        """
        try:
            self._wait(lambda: operation.done, what, operation)
        except BaseException as error:
            if not operation.done:
                self._give_up(
                    operation,
                    f"worker {self.rank} gave up in {what} while its arrays were being sent, and has left "
                    f"the job: close the store, and start the job again ({error})",
                )
            raise
        if operation.error is not None:
            self._hear_of(operation.error)
            raise raised(operation.error)

    def _hear_of(self, failure: Failure) -> None:
        """Wait for the scheduler's word of a loss of which a server has told: then there are reads again."""
        if failure.role in ("worker", "server") and not self.broken:
            with contextlib.suppress(KVStoreError):
                self._wait(lambda: self.broken or self.failed, "the scheduler's word of a loss")

    def let_go(self, operation: Operation) -> None:
        """Wait no longer for pushes whose payloads nobody changes; what becomes of them is told later.

        An error is raised by the next operation. `settle` waits for all of them.
        """
        if operation.done:
            self._note(operation)
        else:
            self._released.add(operation)

    def settle(self) -> None:
        """Wait until all operations that were let go are answered; raise what became of them."""
        while self._released:
            self._wait(lambda: not self._released, "pushes to be taken in")
        self._raise_late()

    def _raise_late(self) -> None:
        if self._late is not None:
            late, self._late = self._late, None
            self._hear_of(late)
            raise raised(late)

    def _note(self, operation: Operation) -> None:
        self._late = self._late or operation.error

    def ask(
        self, make: Callable[..., Control], what: str, until: Callable[[], bool] | None = None
    ) -> Answer | None:
        """Ask the scheduler; `make` gets `request` and `store`. None where `until` came true before.

        Raises
        ------
        TimeoutError, and what the scheduler answered
        ArgumentError
            The question cannot be sent; nothing has happened.
        """
        message = make(request=0, store=0)
        self._sockets.check(message, what)
        operation = Operation()
        name = next(self._names)
        self._operations[name] = operation
        try:
            self._step_in(events.SchedulerRequest(name, message))
            self._wait(lambda: operation.done or (until is not None and until()), what)
        finally:
            self._operations.pop(name, None)
        if not operation.done:
            return None
        if operation.error is not None:
            raise raised(operation.error)
        return operation.answer

    def told(self, make: Callable[..., Control], what: str) -> Answer:
        """Ask the scheduler for what it always answers."""
        answer = self.ask(make, what)
        assert answer is not None
        return answer

    # ---------------------------------------------------------------------------------------------- the job

    def founds(self) -> bool:
        """Whether this worker's first values count: it is the lowest member of those that are not late."""
        view = self._machine.view
        if view is None:
            return False
        ranks = {one.rank for one in view.members}
        return self.rank == min(ranks - set(view.late) or ranks, default=self.rank)

    @property
    def broken(self) -> bool:
        """Whether rounds have ended with a loss."""
        view = self._machine.view
        return view is not None and view.broken

    @property
    def late(self) -> bool:
        """Whether this worker took a lost one's place, and has not pushed."""
        return self._machine.late

    def lost_servers(self) -> set[int]:
        """Return the servers that are lost for good."""
        view = self._machine.view
        losses = view.losses if view is not None else ()
        return {one.rank for one in losses if one.role == "server"}

    def check_alive(self) -> None:
        """Raise once this worker has no part in the job any more."""
        if os.getpid() != self._process.pid:
            raise KVStoreError(
                "this process is a fork of a worker and has no part in its job; use the store in the process "
                "that created it, or start workers with `kvstore run`"
            )
        if self._failure is not None:
            raise raised(self._failure)
        if self.closed:
            raise ClosedError("this store is closed; create a new one")

    def check_writing(self) -> None:
        """Raise unless this worker may push."""
        self.check_alive()
        if self.broken:
            raise self.lost_peer()

    def lost_peer(self, text: str = "") -> KVStoreError:
        """Make the error of who meets a loss; `text` in the place of what is said of it."""
        view = self._machine.view
        failure = lost(view.losses, len(view.servers)) if view is not None else lost(())
        return raised(msgspec.structs.replace(failure, text=text) if text else failure)

    def barrier(self) -> None:
        """Wait until every member that has not joined is here; what they pushed has been taken in by then."""
        self.settle()
        self.told(partial(m.Barrier, number=self._barriers + 1), f"barrier {self._barriers + 1}")
        self._barriers += 1

    def rest(self) -> None:
        """Tell all that this worker has no more batches."""
        self.settle()
        self.told(m.JoinRounds, "the others to know that this worker has joined")

    def num_lost(self, timeout: float) -> int:
        """Count the processes that are lost, or of which the scheduler has not heard for so many seconds.

        Without the scheduler: those of which this process knows that they are lost.
        """
        if self._failure is None:
            with contextlib.suppress(PeerLostError):
                return self.told(partial(m.Count, seconds=timeout), "the number of dead processes").count
        view = self._machine.view
        losses = () if view is None else view.losses
        return len(losses) + (self._machine.failure is not None and not losses)

    # ---------------------------------------------------------------------------------------- shared memory

    @property
    def failed(self) -> bool:
        """Whether this worker is out."""
        return self._failure is not None

    @property
    def all_read_here(self) -> bool:
        """Whether every server reads this process's memory."""
        view = self._machine.view
        return view is not None and all(self._inboxes.get(one.rank) for one in view.servers)

    def inbox(self, server: int) -> PeerBuffers | None:
        """Return the memory of a server's values, if this process can read it."""
        return self._inboxes.get(server)

    def round_of(self, part: Any, round: int) -> int:
        """Turn a server's round of a slice into this worker's."""
        return round - self._machine.base(part.server, part.slice)

    def complete(self, slices: Iterable[Any]) -> int:
        """Count the pushes of this worker whose rounds are known to be complete, in all slices (parts)."""
        return min(self._machine.complete(one.server, one.slice) for one in slices)

    # ----------------------------------------------------------------------------------------------- driving

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the machine and the sockets."""
        if not self._lock.acquire(blocking=False):
            self._waiters.append(None)
            try:
                self._sockets.wake()
                if not self._lock.acquire(timeout=self._config.timeout):
                    raise TimeoutError("another thread has held this store's sockets until the deadline")
            finally:
                self._waiters.pop()
        try:
            yield
        finally:
            self._lock.release()

    def _step_in(self, event: events.Event) -> None:
        self.check_alive()
        with self._turn():
            self._carry_out(self._machine.step(event, time.monotonic()))

    def _wait(self, ready: Callable[[], bool], what: str, operation: Operation | None = None) -> None:
        """Drive until it is ready."""
        clock = WaitClock(self._config.timeout)
        asked, last = False, None
        while True:
            clock.read()
            if self._driven(ready):
                return
            if clock.near_notice(_ANSWERED) and not asked:
                asked = True
                self._inquire(operation)
            if clock.tells():
                log.warning("%s", self._waiting(what, clock.waited))
            if clock.over:
                last = last or WaitClock(_ANSWERED)  # a machine that stood still has still to hear for whom
                last.read()
                if self._machine.missing is not None or last.over:
                    raise TimeoutError(self._waiting(what, clock.waited))
            if self._waiters:
                time.sleep(50e-6)  # a lock that is given back and taken at once lets nobody in

    def _driven(self, ready: Callable[[], bool]) -> bool:
        """Take one turn at the sockets, if it is not ready yet; whether it is then."""
        with self._turn():
            if ready():
                return True
            self.check_alive()
            self._drive()
            return ready()

    def _drive(self) -> None:
        """Wait a little for messages, and handle them."""
        if self._tick():
            self._process.look_after_others(self)
        self._handle(_TICK)

    def glance(self) -> None:
        """Handle what has come, while this process waits in another store, unless somebody does it already.

        Others may wait for a word of this store's: a server that has come back does, until it has heard of
        every member.
        """
        if self.closed or self._failure is not None or not self._lock.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(KVStoreError):  # the next call here raises it again
                self._tick()
                self._handle(0.0)
        finally:
            self._lock.release()

    def _tick(self) -> bool:
        """Let the machine look at the clock, if it is time."""
        now = time.monotonic()
        if now - self._ticked < _TICK:
            return False
        self._ticked = now
        self._look_for_stop()
        lost = self._process.without_scheduler
        event = events.Tick() if lost is None else events.SchedulerLost(lost)
        self._carry_out(self._machine.step(event, now))
        return True

    def _handle(self, timeout: float) -> None:
        for peer, message in self._sockets.receive(timeout):
            if type(message) is m.Attached:
                self._open_memory(peer, message)
            self._look_for_stop()
            self._carry_out(self._machine.step(events.Received(peer, message), time.monotonic()))

    def _look_for_stop(self) -> None:
        """Tell the machine if this process has stood still: time has passed, and it has not run."""
        now, patience = time.monotonic(), self._process.config.dead_after
        still = now - self._ran[0]
        if still < min(_TICK, patience / 2):
            return
        ran = time.process_time()
        if still > patience / 2 and ran - self._ran[1] < still / 10:
            self._carry_out(self._machine.step(events.StoodStill(still), now))
        self._ran = now, ran

    def _carry_out(self, actions: list[events.Action]) -> None:
        self._actions.extend(actions)
        while self._actions:
            action = self._actions.popleft()
            handler = self._handlers.get(type(action))
            if handler is not None:
                handler(action)

    def _connect(self, action: events.Connect) -> None:
        self._inboxes.pop(action.server, None)
        self._sockets.connect(action.server, action.address)

    def _met(self, action: events.MetScheduler) -> None:
        self._process.met(action.met)
        self._sockets.connect_echo(action.met.echo)

    def _failed(self, action: events.Failed) -> None:
        self._failure = action.failure
        if action.failure.role == "scheduler":
            self._process.without_scheduler = action.failure

    def _warn(self, action: events.Shrunk) -> None:
        log.warning(
            "worker %d has ended, or closed its store, without join(): sums go on without it. The last round "
            "that it was in was number %d of %s. A worker that has no more batches calls store.join()",
            action.rank, action.round, self.name_of(action.slice),
        )  # fmt: skip

    def _take(self, action: events.SliceReceived) -> None:
        operation = self._operations.get(action.op)
        if operation is None:  # given up
            return
        request = operation.requests[action.index]
        operation.rounds[action.index] = action.record.round
        if request.take is None or operation.error is not None:
            return
        try:
            good = request.take(request.part, action.record, action.frames)
        except (KVStoreError, ValueError, IndexError) as error:
            if action.record.place != PayloadLocation.SHARED:
                operation.error = Failure(
                    "ProtocolError", f"server {request.server} sent what is no value: {error}"
                )
                return
            good = False  # its memory is gone with it, or there is no room to map it: a frame will do
        if not good:
            part = events.SliceRequest(request.server, request.record, request.payload)
            for other in [
                one for one in self._actions if isinstance(one, events.Done) and one.op == action.op
            ]:
                self._actions.remove(other)
            again = events.RetrySlice(action.op, action.index, part)
            self._actions.extend(self._machine.step(again, time.monotonic()))

    def _done(self, action: events.Done) -> None:
        operation = self._operations.pop(action.op, None)
        if operation is not None:
            operation.error = operation.error or action.error
            operation.answer, operation.done = action.answer, True
            if operation in self._released:
                self._released.remove(operation)
                self._note(operation)

    def _open_memory(self, server: Hashable, message: m.Attached) -> None:
        self._inboxes[server] = PeerBuffers.open(message.memory) if message.memory and self.outbox else None

    def _inquire(self, operation: Operation | None) -> None:
        """Ask whom an operation waits for; the answer comes while it waits on."""
        with self._turn():
            name = next((name for name, one in self._operations.items() if one is operation), None)
            for server, record in self._machine.pending(name) if name is not None else ():
                self._carry_out([self._machine.who(server, record.slice, record.round)])
                return
            self._carry_out([self._machine.who(None)])

    def _waiting(self, what: str, waited: float) -> str:
        """Say for whom this worker waits."""
        told = self._machine.missing
        names = []
        if told is not None:
            names = [f"{what} {', '.join(map(str, ranks))}" for what, ranks in _ranks(told) if ranks]
        whom = f"; missing: {' and '.join(names)}" if names else ""
        if not self._machine.met:
            whom = f"; no scheduler answers at {self._roles.scheduler}: start it, or check the address"
        welcome = self._machine.welcome
        who = "this process" if welcome is None else f"worker {welcome.rank}"
        return f"{who} has waited {waited:.0f} s for {what}{whom}"

    def _give_up(self, operation: Operation, text: str) -> None:
        """Write to none of the caller's arrays any more, and read none."""
        names = [name for name, one in self._operations.items() if one is operation]
        with self._turn():
            for name in names:
                del self._operations[name]
            kept = all(self._machine.keep(name) for name in names)
        if not kept:
            self._say(partial(m.Leave, lost=True))
            self._fail(Failure("KVStoreError", text))

    def _fail(self, failure: Failure) -> None:
        """Go no further: what is under way must not be read any more."""
        with self._turn():
            self._failure = self._failure or failure
            self._sockets.close()

    # --------------------------------------------------------------------------------------------------- end

    def close(self, lost: bool = False) -> None:
        """Leave the job, with `lost` as one who is lost. A second call does nothing."""
        if self.closed or os.getpid() != self._process.pid:
            return
        if self._failure is None:
            if not lost:
                try:
                    self.settle()
                except KVStoreError as error:
                    log.error("worker %d, as its store is closed: %s", self.rank, error)
            self._say(partial(m.Leave, lost=lost))
        self.closed = True
        if not self._process.keeps(self):
            self.shut()

    def say_bye(self, lost: bool) -> None:
        """Tell the scheduler that this process ends; for one store, when all are closed."""
        self.closed = False
        self._say(lambda store: m.Bye(self._process.name, lost))
        self.closed = True
        self.shut()

    def _say(self, make: Callable[..., Control]) -> None:
        """Tell the scheduler something; not for long, if it does not listen."""
        operation = Operation()
        name = next(self._names)
        self._operations[name] = operation
        with contextlib.suppress(KVStoreError):
            self._step_in(events.SchedulerRequest(name, make(store=0)))
            end = time.monotonic() + min(_FAREWELL, self._config.timeout)
            self._wait(lambda: operation.done or time.monotonic() > end, "the scheduler")

    def shut(self) -> None:
        """Close the sockets."""
        self._sockets.close()
        for inbox in self._inboxes.values():
            if inbox is not None:
                inbox.close()
        self._inboxes.clear()


def _ranks(told: m.Missing) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return ("server", told.servers), ("worker", told.ranks)


def _tell(view: View) -> None:
    for loss in view.losses:
        log.warning("%s %d is lost; epoch %d", loss.role, loss.rank, view.epoch)
