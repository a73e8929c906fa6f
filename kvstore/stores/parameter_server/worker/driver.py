"""Drives a worker's state machine: the sockets and the clock, in the hands of whoever waits.

There is no thread for it. Whoever calls the store takes the sockets, sends, and drives the worker's machine
until what it waits for is there; another thread that wants them is let in between two steps. Signs of life
are the heartbeats' business, which need no thread of Python's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from ....errors import ClosedError, KVStoreError, TimeoutError
from ....observe.counters import WAITING
from ....observe.log import SLOW
from ....observe.membership import MembershipLog
from ....observe.native._observe import Counters
from ....waiting import WaitClock
from ..protocol import events
from ..protocol import messages as m
from ..protocol.failures import as_exception
from ..protocol.messages import Failure
from ..protocol.view_log import tell_view
from ..transport.clock_comparison import ClockComparison
from ..transport.shared_buffers import PeerBuffers
from ..transport.socket_waits import SocketWait, SocketWaits, WakeSignal
from ..transport.sockets import SCHEDULER, Message, WorkerSockets
from .operations import OperationTable, PendingOperation
from .process import WorkerProcess
from .state_machine.machine import WorkerMachine

if TYPE_CHECKING:
    from ..transport.native._streams import ExpectedRows, Stream
    from .quick_calls import QuickCall

log = logging.getLogger("kvstore.ps")

P = ParamSpec("P")
T = TypeVar("T")

_ANSWERED = 1.0  # seconds for the answer for whom a wait is, before it is told
_TICK = 0.1  # seconds between two looks at the clock
_QUICK = 1.0  # seconds that a quick call may take; then it goes on as a usual one
_CHAIN = 1.5  # seconds since the last look at the clock; then so do chained ones
_USUAL = 60e-6  # seconds that this takes for each of its requests, and more
_COMPARISONS = 8  # of clocks
_COMPARING = 0.5  # seconds that they may take
#: What is not done again after an error: the machine repeats the one, and the other is an operation's error.
_TOLD_ELSEWHERE = (events.SendMessage, events.SliceReceived)
#: What comes with each slice, so that who sleeps need not look.
_ENDS_NO_WAIT = (events.ReadsCopied, events.RoundsSeen)
_SOON = 0.001  # seconds for the answer to a push that nobody waits for, when the next one comes


class ServerMemory:
    """The memory of each server, if this process can read it; not `enabled`: it shares none at all."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._buffers: dict[Hashable, PeerBuffers | None] = {}

    def open(self, server: Hashable, handle: str) -> None:
        """Open the memory that a server has told of, if it has."""
        self._buffers[server] = PeerBuffers.open(handle) if handle and self._enabled else None

    def way(self, server: Hashable, message: m.AttachReply) -> str:
        """Say for the log how data goes to a server, and why."""
        if self._buffers[server] is not None:
            why = "shared memory"
        elif not self._enabled:
            why = "no shared memory (switched off by same_host_shm)"
        else:
            why = "no shared memory (it is on another host, or reads none of this worker's)"
        no_stream = "ZeroMQ (the server offers no stream: KVSTORE_STREAMS=0, or keys without a common cipher)"
        return f"{why}; the rest through {'a stream' if message.stream else no_stream}"

    def get(self, server: int) -> PeerBuffers | None:
        """Return the memory of a server."""
        return self._buffers.get(server)

    def has_all(self, servers: Iterable[int]) -> bool:
        """Whether each of these servers shares memory with this process."""
        return all(self._buffers.get(server) for server in servers)

    def forget(self, server: int) -> None:
        """Another process takes the server's place."""
        self._buffers.pop(server, None)

    def close(self) -> None:
        """Let all memory go."""
        for buffers in self._buffers.values():
            if buffers is not None:
                buffers.close()
        self._buffers.clear()


def _in_turn(
    method: Callable[Concatenate[MachineDriver, P], T],
) -> Callable[Concatenate[MachineDriver, P], T]:
    """Run a method while it holds the machine and the sockets; no call is a quick one any more."""
    return _holding(method, adopts=True)


def _in_line(
    method: Callable[Concatenate[MachineDriver, P], T],
) -> Callable[Concatenate[MachineDriver, P], T]:
    """Run a method while it holds the machine and the sockets, which it must know what to do with."""
    return _holding(method, adopts=False)


def _holding(
    method: Callable[Concatenate[MachineDriver, P], T], adopts: bool
) -> Callable[Concatenate[MachineDriver, P], T]:
    @wraps(method)
    def held(driver: MachineDriver, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if driver.holds_sockets():
            raise driver.nested_call()
        try:
            if not driver._lock.acquire(blocking=False):
                driver._wait_for_turn()
            if driver._may_have_lost:
                driver._adopt()
                driver._machine.suspect()
                driver._may_have_lost = False
            if adopts and driver._quick is not None:
                driver._adopt()
            return method(driver, *args, **kwargs)
        except BaseException as error:  # Ctrl-C comes to whoever has a message in its hands
            driver._may_have_lost |= not isinstance(error, KVStoreError)
            raise
        finally:
            # One step, also without the lock: Ctrl-C can come between two steps.
            try:  # noqa: SIM105 - a context manager is a step of its own
                driver._lock.release()
            except RuntimeError:
                pass
            if driver._half is not None:
                driver._tell_half()

    return held


def _unless_taken(
    method: Callable[Concatenate[MachineDriver, P], bool],
) -> Callable[Concatenate[MachineDriver, P], bool]:
    """Run a method while it holds the machine and the sockets; False, at once, where somebody else does."""

    @wraps(method)
    def tried(driver: MachineDriver, /, *args: P.args, **kwargs: P.kwargs) -> bool:
        if driver._may_have_lost or driver._lock._is_owned():  # type: ignore[attr-defined]
            return False
        try:
            return driver._lock.acquire(blocking=False) and method(driver, *args, **kwargs)
        except BaseException as error:
            driver._may_have_lost |= not isinstance(error, KVStoreError)
            raise
        finally:
            try:  # noqa: SIM105 - as in `_in_turn`
                driver._lock.release()
            except RuntimeError:
                pass
            if driver._half is not None:
                driver._tell_half()

    return tried


class MachineDriver:
    """Steps one store's machine, and carries out what it says; a wait lasts at most `timeout` seconds."""

    _half: BaseException | None = None  # what has interrupted a step, until it is told
    _may_have_lost = False  # a message between the sockets and the machine: an interrupt came to who had it

    def __init__(
        self,
        machine: WorkerMachine,
        sockets: WorkerSockets,
        process: WorkerProcess,
        operations: OperationTable,
        memory: ServerMemory,
        timeout: float,
    ) -> None:
        self._machine, self._sockets, self._process = machine, sockets, process
        self._operations, self._memory = operations, memory
        self.timeout = timeout
        self.closed = False
        #: Why this worker is out, if it is.
        self.failure: Failure | None = None
        #: Told of what has interrupted a step of the machine, or the beginning of a call.
        self.on_half_step: Callable[[BaseException], None] = lambda _: None
        #: Says which key a slice is of.
        self.name_of: Callable[[int], str] = "slice {}".format
        self._lock = threading.RLock()  # knows its thread; nobody takes it twice
        self._waiters: deque[None] = deque()  # threads that want the sockets
        self._waits = SocketWaits()
        self._called = WakeSignal()  # who serves is to look again
        self._serving = False  # a thread is at the sockets that does nothing else
        self._actions: deque[events.Action] = deque()  # of the machine, yet to be carried out
        self._ticked = 0.0
        self._quick: QuickCall | None = None  # has been sent, and not yet received; it may have one before it
        self._receiving: QuickCall | None = None  # a thread is at the sockets for it, and lets others in
        self._standstill = StandstillDetector(process.config.dead_after)
        self._dead_after = process.config.dead_after
        self._members = MembershipLog(log, logging.WARNING)
        self._clocks = ClockComparison()
        self._counters = operations.counters
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.OperationDone: operations.end_operation,
            events.ConnectServer: self._connect,
            events.ReadsCopied: self._go_on,
            m.HelloReply: self._met,
            events.ProcessFailed: self._failed,
            m.ViewNotice: self._viewed,
            m.WelcomeNotice: self._viewed,
            events.RoundsShrunk: self._warn,
            events.RoundsSeen: lambda action: self._counters.end_rounds(action.rounds),
        }

    def observe(self, counters: Counters) -> None:
        """Count in `counters` from now on."""
        self._counters = self._members.counters = counters

    def check_alive(self) -> None:
        """Raise once this worker has no part in the job any more."""
        self.check_process()
        if self.failure is not None:
            raise as_exception(self.failure)
        if self.closed:
            raise ClosedError("this store is closed; create a new one")

    def check_process(self) -> None:
        """Raise in a fork of the worker."""
        if os.getpid() != self._process.pid:
            raise KVStoreError(
                "this process is a fork of a worker and has no part in its job; use the store in the process "
                "that created it, or start workers with `kvstore run`"
            )

    # --------------------------------------------------------------------------------------------- by callers

    def step(self, event: events.Event, first: Callable[[], None] | None = None) -> None:
        """Give the machine an event; just before that run `first`."""
        self.check_alive()
        self._step(event, first)

    @_in_turn
    def _step(self, event: events.Event, first: Callable[[], None] | None) -> None:
        if first is not None:
            first()
        self._carry_out(self._stepped(event, time.monotonic()))

    def wait(self, ready: Callable[[], bool], what: str, operation: PendingOperation | None = None) -> None:
        """Drive until it is ready; TimeoutError, after the deadline, says for whom this worker has waited."""
        clock = WaitClock(self.timeout)
        clock.read()
        me = self._waits.begin_wait()
        try:
            advance = partial(self._advance, me, ready)
            if not advance():
                with clock.described_by(partial(self._described, what, operation)):
                    self._wait_on(advance, what, operation, clock)
        finally:
            self._waits.end_wait(me)
            self._called.send()
            self._counters.leave()

    def _advance(self, me: SocketWait, ready: Callable[[], bool]) -> bool:
        """Take a turn at the sockets, or sleep while an older wait does; whether it is ready then."""
        if not self._waits.is_led(me):
            if self._waiters:
                time.sleep(50e-6)  # a lock that is given back and taken at once lets nobody in
            me.at_sockets = time.monotonic()
            return self._driven(ready)
        self._counters.enter(WAITING)
        if not ready():
            me.changed.wait(_TICK)
        return ready()

    def _wait_on(
        self, advance: Callable[[], bool], what: str, operation: PendingOperation | None, clock: WaitClock
    ) -> None:
        """Go on with a wait that the first turn has not ended."""
        asked, where, last = 0, "", None
        while True:
            due = (clock.waited > SLOW) + clock.near_notice(_ANSWERED)
            if due > asked:  # for who wants to know early, and again before it is told
                asked, where = due, self._inquire(operation)
            if clock.notice_due():
                log.warning("%s", self._waiting(what + where, clock.waited))
            if clock.is_over:
                last = last or WaitClock(_ANSWERED)  # a machine that stood still has still to hear for whom
                last.read()
                if self._machine.missing is not None or last.is_over:
                    raise TimeoutError(self._waiting(what + where, clock.waited))
            clock.read()
            if advance():
                if asked and clock.waited > SLOW:
                    self._tell_slow(what + where, clock.waited)
                return

    def begin(self, call: QuickCall) -> bool:
        """Begin a call, if nothing else is to be done; False: nothing has happened."""
        if self._operations.failed is not None:
            return False
        if call.chained:
            return not self.holds_sockets() and self._begin_in_line(call)
        return not self._waiters and self._begin(call)

    @_in_line
    def _begin_in_line(self, call: QuickCall) -> bool:
        """Begin a call, perhaps behind others, to which another thread receives the answers."""
        if self._quick is None or not self._quick.chained:
            return self._begun_if_free(call)
        late = time.monotonic() - self._ticked >= _CHAIN
        busy = late or self._actions or self.closed or self.failure is not None
        return not busy and os.getpid() == self._process.pid and self._begun(call)

    @_unless_taken
    def _begin(self, call: QuickCall) -> bool:
        return self._begun_if_free(call)

    def _begun_if_free(self, call: QuickCall) -> bool:
        if not self._is_free():
            return False
        if time.monotonic() - self._ticked >= _TICK:
            self._adopt()
            self._tick()
            self._process.serve_other_stores(self)
            self._handle(0.0)  # what has been sent may have hidden that something has come
            if not self._is_free():
                return False
        if self._quick is not None and call.kept and not self._received(self._quick, _SOON):
            self._counters.leave()
            return False
        return self._begun(call)

    def _begun(self, call: QuickCall) -> bool:
        """Begin a call behind those that have no answer yet."""
        before, self._quick = self._quick, call
        try:
            begun = call.begin(self._machine, self._sockets, before)
        except BaseException:
            self._adopt()
            raise
        if not begun:
            self._quick = before
        elif not call.sent:
            self._adopt()
        call.thread = threading.get_ident()
        return begun

    def _is_free(self) -> bool:
        """Whether a call can begin: nothing is to be done, and this worker has its part in the job."""
        waits = self._quick is not None and not self._quick.let_go
        busy = waits or self._actions or self.closed or self.failure is not None
        return not busy and os.getpid() == self._process.pid

    @property
    def abandoned(self) -> QuickCall | None:
        """The quick call that this thread has begun, and does not wait for."""
        call = self._quick
        return call if call is not None and call.is_abandoned else None

    def end(self, call: QuickCall) -> PendingOperation | None:
        """Wait for a call; if it has not ended then, return the operation that it is now."""
        if call.chained:
            while not (call.ended or call.operation is not None):
                if self._receiving is None or not call.own_left:
                    self._receive_for(call)
                else:
                    time.sleep(0.001)  # another thread receives for it as well
                if self._waiters:
                    time.sleep(50e-6)  # as in `_advance`
            return call.operation
        call.awaited = True
        try:
            if self._quick is call and self._ended(call):
                return None
            return self.adopted(call)
        finally:
            call.awaited = False

    @_unless_taken
    def _ended(self, call: QuickCall) -> bool:
        return self._quick is call and self._received(call)

    def _patience(self, left: int) -> float:
        """Return for how many seconds nothing may come: nobody looks for the scheduler meanwhile.

        Others may come late. A call that is adopted takes so long, where it has many keys, that this worker
        is late for the next one, which another would not wait for.
        """
        enough = max(self._dead_after / 10, left * _USUAL)
        return max(_TICK, min(enough, 2 * _QUICK, self._dead_after / 4, self.timeout / 2))

    @_in_turn
    def adopted(self, call: QuickCall) -> PendingOperation | None:
        """Return the operation that a call is, which is a quick one no longer."""
        return call.operation

    def end_released(self) -> None:
        """Wait for a quick push that nobody waits for, or make an operation of it."""
        call = self._quick
        if call is not None and call.let_go:
            self.end(call)

    def serve(self, ready: Callable[[], bool]) -> None:
        """Handle what comes for a while, or until it is ready; for a thread that does nothing else.

        While a wait is at the sockets, that one does it.
        """
        if self._waits.are_served() and not ready():
            self._called.wait(_TICK)
            return
        if self._waiters:
            time.sleep(50e-6)  # a lock that is given back and taken at once lets nobody in
        try:
            self._serving = True
            self._serve(ready)
        finally:
            self._serving = False

    @_in_turn
    def _serve(self, ready: Callable[[], bool]) -> None:
        if ready() or self._waits.are_served():
            return
        self.check_alive()
        if self._tick():
            self._process.serve_other_stores(self)
        self._handle(0.0 if self._waiters else _TICK)  # their wake may have come before this thread was here

    def rest(self, ready: Callable[[], bool]) -> None:
        """Leave the sockets to callers for a while, or until it is ready; then handle what has come."""
        if not ready():
            self._called.wait(_TICK)
        if not ready():
            self.check_alive()
            self.glance()
            self._process.serve_other_stores(self)

    def wake(self) -> None:
        """Have the thread that serves, or rests, look whether it is ready; quick calls wait no more."""
        self._called.send()
        if self._serving or self._quick is not None:
            self._sockets.wake()

    def glance(self) -> None:
        """Handle what has come, while this process waits in another store, unless somebody does it already.

        Others may wait for a word of this store's: a server that has come back does, until it has heard of
        every member.
        """
        if not self.closed and self.failure is None:
            self._glance()

    @_unless_taken
    def _glance(self) -> bool:
        with contextlib.suppress(KVStoreError):  # the next call here raises it again
            self._adopt()
            self._tick()
            self._handle(0.0)
        return True

    @_in_turn
    def forget(self, operation: PendingOperation) -> bool:
        """Write to none of an operation's arrays any more; False: they are being sent."""
        return self._forgotten(operation)

    def _forgotten(self, operation: PendingOperation) -> bool:
        names = self._operations.open_names(operation)
        for name in names:
            del self._operations.open[name]
        return all(self._machine.keep(name) for name in names)

    @_in_turn
    def forget_reads(self) -> None:
        """Let pushes go before values that were asked for, and that nobody reads any more."""
        self._machine.forget_reads()

    def compare_clocks(self) -> None:
        """Compare the clock of this process with the scheduler's, if a timeline is recorded; in some ms."""
        if not self._clocks.is_wanted or self.closed or self.failure is not None:
            return
        end, compared = time.monotonic() + _COMPARING, self._clocks.answers + _COMPARISONS
        while (before := self._clocks.answers) < compared and time.monotonic() < end:
            self._ask_for_time()
            self.wait(lambda: self._clocks.answers > before or time.monotonic() > end, "the scheduler's time")

    @_in_turn
    def _ask_for_time(self) -> None:
        self._sockets.send(SCHEDULER, self._clocks.make_question())

    def expect(self, rows: Iterable[tuple[int, ExpectedRows]]) -> list[tuple[Stream, ExpectedRows]]:
        """Receive rows from servers where they belong; return what `expect_no_more` takes."""
        self.check_alive()
        return self._expect(rows)

    @_in_turn
    def _expect(self, rows: Iterable[tuple[int, ExpectedRows]]) -> list[tuple[Stream, ExpectedRows]]:
        placed = [(self._sockets.expect_rows(server, one), one) for server, one in rows]
        return [(stream, one) for stream, one in placed if stream is not None]

    def expect_no_more(self, placed: list[tuple[Stream, ExpectedRows]]) -> None:
        """Write no more to where rows belong."""
        if os.getpid() != self._process.pid:  # a fork receives nothing, and its lock may be held for ever
            return
        self._expect_no_more(placed)

    @_in_turn
    def _expect_no_more(self, placed: list[tuple[Stream, ExpectedRows]]) -> None:
        for stream, one in placed:
            stream.expect_no_more(one)

    @_in_turn
    def fail(self, failure: Failure) -> None:
        """Go no further: what is under way must not be read any more."""
        self.failure = self.failure or failure
        self._sockets.close()

    @_in_turn
    def close_streams(self) -> None:
        """Hold no connections to servers any more; what is left is the farewell to the scheduler."""
        self._sockets.close_streams()

    # --------------------------------------------------------------------------------------- at the sockets

    def holds_sockets(self) -> bool:
        """Whether the calling thread is at the sockets already: a signal handler has interrupted it there."""
        lock: Any = self._lock
        return bool(lock._is_owned())

    def nested_call(self) -> KVStoreError:
        """Make the error for a call within a call."""
        return KVStoreError(
            "this thread is inside a call of this store already: a signal handler, or a finalizer, that "
            "interrupts a call cannot call the store. Let the handler set a flag, and call the store after"
        )

    def _wait_for_turn(self) -> None:
        """Take the machine and the sockets from another thread."""
        self._waiters.append(None)
        try:
            self._sockets.wake()
            if not self._lock.acquire(timeout=self.timeout):
                raise TimeoutError("another thread has held this store's sockets until the deadline")
        finally:
            self._waiters.pop()

    def _driven(self, ready: Callable[[], bool]) -> bool:
        """Take one turn at the sockets, if it is not ready yet; whether it is then."""
        self._counters.enter(WAITING)
        return self._drive_until(ready)

    @_in_turn
    def _drive_until(self, ready: Callable[[], bool]) -> bool:
        if ready():
            return True
        self.check_alive()
        self._drive()
        return ready()

    def _drive(self) -> None:
        """Wait a little for messages, and handle them."""
        if self._tick():
            self._process.serve_other_stores(self)
        if self._counters.timed and (oldest := self._machine.oldest()) is not None:
            server, slice_, round_ = oldest
            self._counters.enter(WAITING, slice_, round_, 0, -1 - server)
        else:
            self._counters.enter(WAITING)
        self._handle(_TICK)

    def _tick(self) -> bool:
        """Let the machine look at the clock, if it is time."""
        now = time.monotonic()
        if now - self._ticked < _TICK:
            return False
        self._ticked = now
        if (stopped := self._standstill.stopped_for(now)) is not None:
            self._stood_still(stopped, now)
        lost = self._process.without_scheduler
        event = events.TickEvent() if lost is None else events.SchedulerLost(lost)
        self._carry_out(self._stepped(event, now))
        return True

    def _received(self, call: QuickCall, patience: float | None = None) -> bool:
        """Wait until all of a call has come, or something else comes, or nothing has come for a while."""
        messages: list[tuple[int, Message]] = []
        done, stopped = False, None
        came = time.monotonic()
        latest = came + _QUICK
        try:
            left = call.left
            look = _TICK if patience is None else min(patience, _TICK)
            while left and not messages:
                end = time.monotonic() + look
                messages = call.wait(self._sockets, end)
                now = time.monotonic()
                stopped = self._standstill.stopped_for(now)
                if now < end or stopped is not None:
                    break
                if patience is None:
                    patience = self._patience(left)
                    latest = came + max(_QUICK, patience)
                before, left = left, call.left
                came = now if left != before else came
                if now > latest or now - came >= patience:
                    break
                self._process.serve_other_stores(self)
            try:
                done = call.complete(self._machine)
            except BaseException as error:
                self._half = error if call.is_counting else self._half  # as in `_whole`
                raise
        finally:
            if done:
                self._quick = None
            else:
                self._adopt()
        if stopped is not None:
            self._stood_still(stopped, now)
        for server, message in messages:
            self._carry_out(self._stepped(events.MessageReceived(server, message), time.monotonic()))
        return done

    @_in_line
    def _receive_for(self, call: QuickCall) -> None:
        """Receive until a call of the chain has ended, or another thread wants the sockets.

        Where something else comes, or nothing for a while, its calls go on as usual ones.
        """
        last = self._quick
        if call.ended or call.operation is not None or last is None:
            return
        messages: list[tuple[int, Message]] = []
        came, over, settled, stopped = time.monotonic(), False, False, None
        patience = self._patience(last.left)
        self._sockets.forget_wake()  # who has called is among those that wait
        try:
            self._receiving = call
            while call.own_left and not (messages or over or self._waiters):
                left, end = last.left, time.monotonic() + min(patience, _TICK)
                messages = last.wait(self._sockets, end, call)
                now = time.monotonic()
                stopped = self._standstill.stopped_for(now)
                came = now if last.left != left else came
                is_late = now - came >= patience or now - self._ticked >= _CHAIN
                other = now < end and call.own_left and not self._waiters
                over = bool(is_late or other or stopped is not None) and bool(call.own_left)
                if not over:
                    self._process.serve_other_stores(self)
            self._quick = self._whole(partial(last.settle, self._machine))
            settled = True
        finally:
            self._receiving = None
            if messages or over or not settled:
                self._adopt()
        if stopped is not None:
            self._stood_still(stopped, time.monotonic())
        for server, message in messages:
            self._carry_out(self._stepped(events.MessageReceived(server, message), time.monotonic()))

    def _adopt(self) -> None:
        """Go on with a call that is not done as with any other operation."""
        call, self._quick = self._quick, None
        if call is None:
            return
        chain = list(call.chain())
        try:
            adopt = partial(call.adopt, self._machine, self._operations, time.monotonic())
            actions = self._whole(adopt)
        except BaseException:
            for one in chain:
                one.operation = one.operation or PendingOperation()  # whoever waits for it hears why
            raise
        self._carry_out(actions)
        if call.is_abandoned and call.operation is not None and not self._forgotten(call.operation):
            self._half = KVStoreError(
                f"{call.what} was left before it was waited for, with arrays being sent"
            )

    def _handle(self, timeout: float) -> None:
        for peer, message in self._sockets.receive(timeout):
            self._clocks.read_answer(message)
            if type(message) is m.AttachReply:
                self._memory.open(peer, message.memory)
                self._sockets.open_stream(peer, message.stream)  # type: ignore[arg-type]
                log.info("data for server %s goes through %s", peer, self._memory.way(peer, message))
            now = time.monotonic()
            if (stopped := self._standstill.stopped_for(now)) is not None:
                self._stood_still(stopped, now)
            self._carry_out(self._stepped(events.MessageReceived(peer, message), now))
        for server in self._sockets.lost_streams():
            self._carry_out(self._stepped(events.StreamLost(server), time.monotonic()))

    def _stood_still(self, seconds: float, now: float) -> None:
        self._carry_out(self._stepped(events.StoodStill(seconds), now))

    def _stepped(self, event: events.Event, now: float) -> list[events.Action]:
        return self._whole(partial(self._machine.step, event, now))

    def _whole(self, change: Callable[[], T]) -> T:
        """Change the machine; if that is interrupted, half of it is done, and this worker is of no use."""
        try:
            return change()
        except BaseException as error:
            self._half = error
            raise

    def _tell_half(self) -> None:
        error, self._half = self._half, None
        if error is not None and self.failure is None:
            self.on_half_step(error)

    # ----------------------------------------------------------------------------------------------- actions

    def _carry_out(self, actions: list[events.Action]) -> None:
        self._actions.extend(actions)
        while self._actions:
            action = self._actions.popleft()
            try:
                self._carry_out_one(action)
            except BaseException as error:  # Ctrl-C comes to the thread that happens to be here
                if not isinstance(error, Exception) or type(action) not in _TOLD_ELSEWHERE:
                    self._actions.appendleft(action)
                raise

    def _carry_out_one(self, action: events.Action) -> None:
        if type(action) is events.SendMessage:
            self._sockets.send(action.peer, action.message)
        elif type(action) is events.SliceReceived:
            retry = self._operations.write_value(action)
            if retry is not None:
                self._retry(retry)
        else:
            handler = self._handlers.get(type(action))
            if handler is not None:
                handler(action)
            if self._waits.are_several() and type(action) not in _ENDS_NO_WAIT:
                self._waits.wake_all()

    def _retry(self, retry: events.RetrySlice) -> None:
        """Ask for a value once more; the operation is not done yet."""
        for one in [
            one for one in self._actions if isinstance(one, events.OperationDone) and one.op == retry.op
        ]:
            self._actions.remove(one)
            retry = retry._replace(error=one.error)
        # Before pushes that the answer has let go: the server may write the value anew with them.
        self._actions.extendleft(reversed(self._stepped(retry, time.monotonic())))

    def _go_on(self, taken: events.ReadsCopied) -> None:
        """Send what has waited until values were copied."""
        self._actions.extend(self._stepped(taken, time.monotonic()))

    def _connect(self, action: events.ConnectServer) -> None:
        log.debug("server %d is at %s", action.server, action.address)
        self._memory.forget(action.server)
        self._sockets.connect_server(action.server, action.address)

    def _met(self, met: m.HelloReply) -> None:
        self._process.start_heartbeats(met)
        self._sockets.connect_echo(met.echo)

    def _viewed(self, view: m.ViewNotice | m.WelcomeNotice) -> None:
        tell_view(self._members, view)

    def _failed(self, action: events.ProcessFailed) -> None:
        self.failure = action.failure
        if action.failure.role == "scheduler":
            self._process.without_scheduler = action.failure

    def _warn(self, action: events.RoundsShrunk) -> None:
        log.warning(
            "worker %d has ended, or closed its store, without join(): sums go on without it. The last round "
            "that it was in was number %d of %s. A worker that has no more batches calls store.join()",
            action.rank, action.round, self.name_of(action.slice),
        )  # fmt: skip

    # ------------------------------------------------------------------------------------- for whom one waits

    @_in_turn
    def _inquire(self, operation: PendingOperation | None) -> str:
        """Ask whom an operation waits for, and return for what; the answer comes while it waits on."""
        where = self.where(operation)
        names: list[Hashable] = self._operations.open_names(operation)[:1]
        waiting = [one for name in names for one in self._machine.pending(name)]
        if waiting:
            server, record = waiting[0]
            question = self._machine.request_missing(server, record.slice, record.round)
        else:
            question = self._machine.request_missing(None)
        self._carry_out([question])
        return where

    def where(self, operation: PendingOperation | None) -> str:
        """Name a round for which an operation waits."""
        if operation is not None:
            for name in self._operations.open_names(operation):
                for _, record in self._machine.pending(name):
                    return f" ({self.name_of(record.slice)}, round {record.round})"
        return ""

    def _missing(self) -> str:
        """Name those for whom this worker waits, if it was told."""
        missing = self._machine.missing
        if missing is None:
            return ""
        roles = (("server", missing.servers), ("worker", missing.ranks))
        return " and ".join(f"{role} {', '.join(map(str, ranks))}" for role, ranks in roles if ranks)

    def _tell_slow(self, what: str, waited: float) -> None:
        """Log a wait that was long, and has ended."""
        if last := self._missing():
            log.info("%s was slow: %s came last, %.1f s after this worker", what, last, waited)

    def _described(self, what: str, operation: PendingOperation | None, waited: float) -> str:
        """Say for what and whom this worker waits, from anywhere: what it looks at may change meanwhile."""
        return self._waiting(what + self.where(operation), waited)

    def _waiting(self, what: str, waited: float) -> str:
        """Say for whom this worker waits."""
        names = self._missing()
        whom = f"; missing: {names}" if names else ""
        if not self._machine.has_met_scheduler:
            whom = (
                f"; no scheduler answers at {self._process.roles.scheduler}: start it, or check the address"
            )
        welcome = self._machine.member.welcome
        who = "this process" if welcome is None else f"worker {welcome.rank}"
        return f"{who} has waited {waited:.0f} s for {what}{whom}"


class StandstillDetector:
    """Notices that this process was stopped: time has passed, and it has not run."""

    def __init__(self, dead_after: float) -> None:
        self._dead_after = dead_after
        self._ran = (time.monotonic(), time.process_time())  # when it ran last, and for how long by then

    def stopped_for(self, now: float) -> float | None:
        """Return for how many seconds it has stood still; None: for no time that matters."""
        still = now - self._ran[0]
        if still < min(_TICK, self._dead_after / 2):
            return None
        ran = time.process_time()
        stopped = still > self._dead_after / 2 and ran - self._ran[1] < still / 10
        self._ran = now, ran
        return still if stopped else None
