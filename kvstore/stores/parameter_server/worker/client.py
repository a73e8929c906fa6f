"""A worker's connection to the parameter server: requests to servers and scheduler, and waits for replies."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ....errors import (
    ArgumentError,
    CapabilityError,
    ClosedError,
    ConfigError,
    KVStoreError,
    PeerLostError,
)
from ....observe.native._observe import Counters
from ....settings.options import StoreConfig
from ..protocol import events
from ..protocol import messages as m
from ..protocol.failures import as_exception
from ..protocol.messages import Control, Failure, MemberReply, Slice
from ..transport.shared_buffers import PeerBuffers, SharedBufferPool
from ..transport.sockets import WorkerSockets
from .driver import MachineDriver, ServerMemory
from .operations import OperationTable, PartRequest, PendingOperation
from .process import this_process, worker_roles
from .state_machine.machine import WorkerMachine

if TYPE_CHECKING:
    from ..transport.native._streams import Exchange
    from .quick_calls import QuickCall

log = logging.getLogger("kvstore.ps")

_FAREWELL = 5.0  # seconds for the scheduler to receive that this worker leaves


class WorkerClient:
    """One store of one worker process; the scheduler divides large keys at `slice_bytes`.

    `synchronous`: pushes count in rounds. `host`: this worker's host, where hosts push. Raises ConfigError
    where no variables name the servers, or the scheduler refuses this process, and TimeoutError where not all
    processes of the job start within the deadline.
    """

    def __init__(self, config: StoreConfig, synchronous: bool, slice_bytes: int, host: str = "") -> None:
        roles = worker_roles()
        self._process = this_process(roles)
        self._operations = OperationTable()
        self._synchronous = synchronous
        #: Counts sent and received values, and records times.
        self.counters = self._operations.counters
        #: Barriers that this worker has passed.
        self.barriers = 0
        #: Whether it has announced that it has no more batches.
        self.joined = False
        #: Whether an error has reported a loss to the caller.
        self.told_of_loss = False
        #: Memory for pushed arrays, where servers on this machine may read it.
        self.pool = SharedBufferPool() if config.same_host_shm else None
        self._memory = ServerMemory(config.same_host_shm)
        options = {
            "mode": "sync" if synchronous else "async",
            "on_peer_loss": config.on_peer_loss,
            "slice_bytes": slice_bytes,
        }
        if host:
            options["hierarchy"] = config.hierarchy
        self._hello = hello = self._process.make_hello(config.group, options, host)
        patience = self._process.worker_options(config.credit_bytes, slice_bytes, synchronous)
        self._patience = patience
        self._machine = WorkerMachine(
            hello,
            patience,
            self.pool.handle() if self.pool is not None else "",
        )
        #: The state of this worker as a member of its store.
        self.member = self._machine.member
        self._sockets = WorkerSockets(roles, hello, self._process.echo)
        try:
            self._sockets.check_message(hello, "the store's options")
        except ArgumentError:
            self._sockets.close()
            raise
        self.driver = MachineDriver(
            self._machine, self._sockets, self._process, self._operations, self._memory, config.timeout
        )
        try:
            self.driver.step(events.StartEvent())
            self.driver.wait(
                lambda: self.member.welcome is not None, "the other processes of the job to start"
            )
        except BaseException:
            self.close_sockets()
            raise
        welcome = self.member.welcome
        assert welcome is not None
        self.rank, self.size = welcome.rank, welcome.size
        self.local_rank, self.local_size = self._process.local_place(self.rank, self.size)
        #: Memory for the sums that this worker pushes for its host; its own pushes then have none.
        self.host_pool: SharedBufferPool | None = None
        if self.member.seats:
            self.pool, self.host_pool = None, self.pool
        #: Called before this worker leaves as a lost one, and its operations end.
        self.before_leaving: Callable[[], None] = lambda: None
        self.driver.on_half_step = partial(self._leave_interrupted, "counted its requests")
        self._process.add_store(self)

    @property
    def host_job(self) -> tuple[str, str, int]:
        """Identify the workers of this host: the job and host, the group, the store's number."""
        hello, welcome = self._hello, self.member.welcome
        assert welcome is not None
        return f"{hello.job} at {self._process.roles.scheduler} on {hello.host}", hello.group, welcome.store

    @property
    def dead_after(self) -> float:
        """Seconds without a heartbeat after which a process of the job is lost."""
        return self._process.config.dead_after

    def observe(self, counters: Counters) -> None:
        """Count in `counters` from now on."""
        self.counters = self._operations.counters = counters
        self.driver.observe(counters)
        self._sockets.observe(counters)

    def describe(self) -> str:
        """Return the addresses and modes of the store, for the log."""
        welcome, roles = self.member.welcome, self._process.roles
        assert welcome is not None
        secret = "encrypted" if roles.keys is not None else "not encrypted"
        mode, loss = self._hello.options["mode"], self._hello.options["on_peer_loss"]
        where = f"{len(welcome.servers)} servers, scheduler at {roles.scheduler}, {secret}"
        return f"{where}, store {welcome.store}, {mode}, epoch {welcome.epoch}, on_peer_loss={loss!r}"

    # --------------------------------------------------------------------------------- requests to servers

    def submit(
        self, requests: Sequence[PartRequest], priority: int = 0, taken: Callable[[], None] | None = None
    ) -> PendingOperation:
        """Send requests, as far as the credit allows; later waits send the rest.

        Payloads belong to the operation until it is finished. Operations on one slice are submitted one after
        the other. `taken` is called when nothing can prevent their sending any more.
        """
        if self._operations.failed is not None:
            self._raise_failed()
        self._check_sizes(requests)
        operation = PendingOperation(requests)
        parts = [events.SliceRequest(r.server, r.record, r.payload, r.back) for r in requests]
        try:
            name = self._operations.add_operation(operation)
            self.driver.step(events.SubmitRequests(name, parts, priority), taken)
        except BaseException as error:
            if not self.has_failed and not isinstance(error, KVStoreError):  # it may have been sent
                self.give_up(operation, "a call", error)
            for one in self._operations.open_names(operation):  # later replies are not written any more
                del self._operations.open[one]
            raise
        return operation

    def _check_sizes(self, requests: Sequence[PartRequest]) -> None:
        """Raise CapabilityError for a payload that exceeds a message: it would be repeated for ever."""
        most = self.frame_bytes
        for request in requests:
            record = request.record
            if record.nbytes <= most or record.place != m.PayloadLocation.FRAME:
                continue
            if any(memoryview(part).nbytes > most for part in request.payload):
                name = self.driver.name_of(record.slice)
                raise CapabilityError(
                    f"worker {self.rank} cannot send {record.nbytes} bytes of {name} in one message, which "
                    f"has at most {most}: push fewer rows at once, or give the store a smaller slice_bytes"
                )

    @property
    def frame_bytes(self) -> int:
        """The most bytes of a payload."""
        return self._sockets.frame_bytes

    def finish(self, operation: PendingOperation, what: str, resumes: bool = False) -> None:
        """Wait until all requests of an operation are answered; raise a server's error.

        Raises TimeoutError after the store's deadline. A push in progress continues; but an error while the
        sockets still read the caller's arrays ends the store. With `resumes`, Ctrl-C ends nothing: the
        sockets still have the arrays, and the caller waits again.
        """
        try:
            self.driver.wait(lambda: operation.done, what, operation)
        except BaseException as error:
            if not operation.done and (isinstance(error, Exception) or not resumes):
                self.give_up(operation, what, error)
            raise
        if operation.error is not None:
            self._await_report(operation.error)
            failed = self.driver.failure if operation.error.error == ClosedError.__name__ else None
            raise as_exception(failed or operation.error)

    def finish_call(self, call: QuickCall, resumes: bool = False) -> None:
        """Wait for a call that the driver has begun; otherwise as `finish`."""
        try:
            operation = self.driver.end(call)
        except BaseException as error:
            self.counters.leave()
            if isinstance(error, Exception) or not resumes:
                self.give_up_call(call, error)
            raise
        if operation is not None:
            self.finish(operation, call.what, resumes)

    def give_up_call(self, call: QuickCall, error: BaseException) -> None:
        """Cancel a call that has been sent, unless none of its arrays are the caller's."""
        if call.let_go or self.has_failed:
            return
        call.awaited = True  # else the driver would leave the job, with a less precise error
        operation = self.driver.adopted(call)
        if operation is not None and not operation.done:
            self.give_up(operation, call.what, error)

    def _note_told(self, failure: Failure) -> None:
        """Record whether the caller receives the report of a loss now."""
        self.told_of_loss = self.told_of_loss or bool(failure.role)

    def hear_of_loss(self) -> None:
        """Wait for the scheduler's report of a loss that the caller knows from elsewhere; then reads work."""
        self._await_report(Failure("PeerLostError", "", "worker"))

    def _await_report(self, failure: Failure) -> None:
        """Wait for the scheduler's report of a loss that a server has reported: then reads work again."""
        self._note_told(failure)
        if failure.role in ("worker", "server") and not self.member.is_broken:
            with contextlib.suppress(KVStoreError), self.watch_scheduler():
                self.driver.wait(lambda: self.member.is_broken or self.has_failed, "the report of a loss")

    @contextlib.contextmanager
    def watch_scheduler(self) -> Iterator[None]:
        """Detect the loss of the scheduler even while this worker has no operation in progress."""
        listener = object()
        self._machine.listeners.add(listener)
        try:
            yield
        finally:
            self._machine.listeners.discard(listener)

    def give_up(self, operation: PendingOperation, what: str, error: BaseException) -> None:
        """Stop reading and writing the caller's arrays; leave the job if they are being sent."""
        what += self.driver.where(operation)
        if not self.driver.forget(operation):
            cause = type(error).__name__ + (f": {error}" if str(error) else "")
            text = (
                f"worker {self.rank} gave up in {what} while its arrays were being sent, and has left the "
                f"job: close the store, and start the job again. The cause: {cause}"
            )
            self.leave_as_lost(Failure("KVStoreError", text))

    def give_up_half(self, what: str, error: BaseException) -> None:
        """Leave the job: a call was begun only in part, so rounds and replies can not be trusted any more."""
        self._leave_interrupted(f"began {what}", error)

    def _leave_interrupted(self, where: str, error: BaseException) -> None:
        cause = type(error).__name__ + (f": {error}" if str(error) else "")
        text = (
            f"worker {self.rank} was interrupted while it {where}, and has left the job: close the "
            f"store, and start the job again. The cause: {cause}"
        )
        self.leave_as_lost(Failure("KVStoreError", text))

    def leave_as_lost(self, failure: Failure) -> None:
        """Leave the job as a lost worker, and inform the scheduler; every later call raises this failure."""
        self.before_leaving()
        failed = self._operations.failed
        self._send_to_scheduler(partial(m.LeaveNotice, lost=True))
        self.driver.fail(failure)
        self._operations.failed = failed  # released pushes have ended for this reason, too

    def perform(self, requests: Sequence[PartRequest], what: str) -> None:
        """Send requests, and wait until all are answered."""
        self.finish(self.submit(requests), what)

    def release_operation(self, operation: PendingOperation) -> None:
        """Release pushes with payloads that do not change; `finish_released` waits for all released pushes.

        The next operation raises their error.
        """
        self._operations.release_operation(operation)

    def make_exchange(
        self, server: int, parts: list[tuple[int, int, int, int]], sizes: list[int], kind: m.RecordKind
    ) -> Exchange:
        """Return an `Exchange` for parts of arrays of these sizes with a server."""
        member = self.member.welcome
        assert member is not None
        who = member.store, member.rank, self._hello.incarnation
        patience = self._patience
        limits = patience.batch_bytes, patience.credit, patience.report_bytes
        made = self._sockets.make_exchange(who, parts, sizes, *limits, kind)
        made.observe(self.counters, server)
        return made

    def finish_released(self) -> None:
        """Wait until all released operations are answered; raise their error."""
        self.driver.check_process()  # a fork must not read messages for its parent
        self.driver.end_released()
        released = self._operations.released
        while released:
            self.driver.wait(lambda: not released, "servers to receive pushes")
        self._raise_failed()

    def _raise_failed(self) -> None:
        """Raise the error of a released operation, once; not a loss that was already reported."""
        failed, self._operations.failed = self._operations.failed, None
        if failed is not None and not (self.told_of_loss and failed.role == "worker"):
            self._await_report(failed)
            raise as_exception(failed)

    # ---------------------------------------------------------------------------- requests to the scheduler

    def request_scheduler(self, make: Callable[..., Control], what: str) -> MemberReply:
        """Send a request that the scheduler always answers; `make` gets `request` and `store`."""
        answer = self.request_or_none(make, what)
        assert answer is not None
        return answer

    def request_or_none(
        self, make: Callable[..., Control], what: str, until: Callable[[], bool] | None = None
    ) -> MemberReply | None:
        """Send a request to the scheduler; `make` gets `request` and `store`. None: `until` was true before.

        Raises TimeoutError, the scheduler's error, and ArgumentError for a message that cannot be sent, which
        then has no effect.
        """
        message = make(request=0, store=0)
        self._sockets.check_message(message, what)
        operation = PendingOperation()
        name = self._operations.add_operation(operation)
        try:
            self.driver.step(events.SchedulerRequest(name, message))
            self.driver.wait(lambda: operation.done or (until is not None and until()), what)
        finally:
            self._operations.open.pop(name, None)
        if not operation.done:
            return None
        if operation.error is not None:
            self._note_told(operation.error)
            raise as_exception(operation.error)
        return operation.answer

    def barrier(self) -> m.MemberReply:
        """Wait until every member that has not joined is here; servers have received their pushes by then.

        Returns the newest settings.
        """
        self.finish_released()
        return self.barrier_of_host(self.barriers + 1)

    def barrier_of_host(self, number: int) -> m.MemberReply:
        """Wait until all other hosts are here; the workers of this host have met for its barrier `number`."""
        answer = self.request_scheduler(partial(m.BarrierRequest, number=number), f"barrier {number}")
        self.barriers += 1
        return answer

    def join(self) -> None:
        """Inform all that this worker has no more batches."""
        if not self.joined:
            self.finish_released()
            self.request_scheduler(m.JoinRequest, "the other processes to know that this worker has joined")
            self.joined = True

    def num_lost(self, timeout: float) -> int:
        """Count the processes that are lost, or that have been silent for `timeout` seconds.

        Without the scheduler: the processes that this process knows to be lost.
        """
        if not self.has_failed:
            with contextlib.suppress(PeerLostError):
                return self.request_scheduler(
                    partial(m.LostCountRequest, seconds=timeout), "the number of dead processes"
                ).count
        view = self.member.view
        losses = () if view is None else view.losses
        return len(losses) + (self._machine.failure is not None and not losses)

    # ------------------------------------------------------------------------------------------------ states

    @property
    def is_closed(self) -> bool:
        """Whether the store is closed."""
        return self.driver.closed

    @property
    def has_failed(self) -> bool:
        """Whether this worker has left the job after an error."""
        return self.driver.failure is not None

    @property
    def in_step(self) -> bool:
        """Whether each read follows a push of this worker, in rounds that proceed."""
        return not (self.joined or self.member.is_broken or self.member.rejoining)

    def check_writing(self) -> None:
        """Raise unless this worker may push."""
        self.driver.check_alive()
        if self.member.is_broken:
            raise self.lost_peer()
        if self.joined:
            raise ConfigError(f"worker {self.rank} has joined: it can read, and push no more")

    def lost_peer(self, text: str = "") -> KVStoreError:
        """Return the error of a call after a loss; `text` replaces its usual text."""
        failure = self.member.loss_failure()
        self._note_told(failure)
        return as_exception(msgspec.structs.replace(failure, text=text) if text else failure)

    # -------------------------------------------------------------------------------------- memory and rounds

    @property
    def all_read_here(self) -> bool:
        """Whether every server maps this process's memory."""
        view = self.member.view
        return view is not None and self._memory.has_all(one.rank for one in view.servers)

    def server_memory(self, server: int) -> PeerBuffers | None:
        """Return the memory of a server's values, if this process can read it."""
        return self._memory.get(server)

    def round_of(self, part: Slice, round: int) -> int:
        """Convert a server's round of a slice to this worker's count."""
        return round - self._machine.base_round(part.server, part.id)

    def complete_pushes(self, slices: Iterable[Slice]) -> int:
        """Count the pushes of this worker whose rounds are known to be complete, in all these slices.

        Without rounds, the pushes that are answered: the server's count is then of all workers.
        """
        count = self._machine.complete_pushes if self._synchronous else self._machine.answered_pushes
        return min(count(one.server, one.id) for one in slices)

    # ---------------------------------------------------------------------------------------------------- end

    def close(self, lost: bool = False, last: bool = False) -> None:
        """Leave the job, as a `lost` worker, or the last of its host. A second call does nothing."""
        if self.is_closed or os.getpid() != self._process.pid:
            return
        if not self.has_failed:
            if not lost:
                try:
                    self.finish_released()
                except KVStoreError as error:
                    log.error("worker %d, as its store is closed: %s", self.rank, error)
            with contextlib.suppress(KVStoreError):
                self.driver.compare_clocks()
            self._send_to_scheduler(partial(m.LeaveNotice, lost=lost, last=last))
        self.driver.closed = True
        if not self._process.remove_store(self):
            self.close_sockets()
        else:
            self.driver.close_streams()

    def send_bye(self, lost: bool) -> None:
        """Inform the scheduler that this process ends; for one store, when all are closed."""
        self.driver.closed = False
        self._send_to_scheduler(lambda store: m.ProcessEndNotice(self._process.name, lost))
        self.driver.closed = True
        self.close_sockets()

    def _send_to_scheduler(self, make: Callable[..., Control]) -> None:
        """Send a message to the scheduler; wait a limited time for its acknowledgement."""
        operation = PendingOperation()
        name = self._operations.add_operation(operation)
        with contextlib.suppress(KVStoreError):
            self.driver.step(events.SchedulerRequest(name, make(store=0)))
            patience = max(
                _FAREWELL, self._process.absence
            )  # without `LeaveNotice` the worker would count as lost
            end = time.monotonic() + min(patience, self.driver.timeout)
            self.driver.wait(lambda: operation.done or time.monotonic() > end, "the scheduler")

    def close_sockets(self) -> None:
        """Close the sockets."""
        self._sockets.close()
        self._memory.close()
