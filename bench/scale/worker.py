"""A worker's process: the real state machine, and a program that uses it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

from bench.scale.job import Job
from bench.scale.network import Host
from bench.scale.processes import Process
from bench.scale.wire import batch_bytes, values_of
from kvstore.kernels import cpu
from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.protocol.messages import Failure, PayloadLocation, Record, RecordKind
from kvstore.stores.parameter_server.scheduler.key_table import itemsize
from kvstore.stores.parameter_server.worker.state_machine.machine import WorkerMachine
from kvstore.stores.parameter_server.worker.state_machine.options import WorkerOptions

_FRAME, _NONE = PayloadLocation.FRAME, PayloadLocation.NONE
_PUSHES = (RecordKind.PUSH, RecordKind.PUSHPULL)
_CARRY = (*_PUSHES, RecordKind.ASSIGN)

#: A wait that a program yields: a function of the callback that continues the program.
Wait = Callable[[Callable[[], None]], None]
Program = Callable[["WorkerProcess"], Generator[Wait, None, None]]


class WorkerProcess(Process):
    """A worker with one store; `coding` is the kernels' number of the codec of its pushes, 0 for none."""

    def __init__(
        self,
        job: Job,
        host: Host,
        rank: int,
        options: dict[str, Any],
        patience: WorkerOptions,
        program: Program,
    ) -> None:
        super().__init__(job.clock, host, f"worker{rank}", job.costs)
        self.job, self.rank, self.coding = job, rank, 0
        hello = m.HelloRequest(
            "worker", rank, rank + 1, self.name, job.name, m.PROTOCOL,
            group="default", ordinal=0, options=options,
        )  # fmt: skip
        self.machine = WorkerMachine(hello, patience)
        self.entries: dict[m.Key, m.KeyEntry] = {}
        self.failure: Failure | None = None
        self.over = False
        self.requests = self.values_out = self.values_in = 0
        self._waiting: dict[Hashable, Callable[[e.OperationDone], None]] = {}
        self._names = 0
        self._program = program(self)
        self._sizes: dict[m.Key, list[tuple[m.Slice, int]]] = {}

    def start(self) -> None:
        """Register at the scheduler."""
        self._take(e.StartEvent())

    def tick(self) -> None:
        """Pass a tick to the state machine."""
        self._take(e.TickEvent())

    def hear(self, message: Any, peer: Any = "scheduler") -> None:
        """Handle a control message of the scheduler, or of a server."""
        self._take(e.MessageReceived(peer, message))

    def echo(self, message: Any) -> None:
        """Handle a reply of the scheduler's echo."""
        self._take(e.MessageReceived(e.ECHO, message))

    def receive(self, server: int, batch: m.Batch) -> None:
        """Handle replies."""
        costs = self.costs
        self.received += 1
        carried = values_of(batch.records)
        self.values_in += carried
        self.spend(costs.worker_message + carried * costs.worker_pull)
        self._take(e.MessageReceived(server, batch))

    # ------------------------------------------------------------------------------------------- program

    def ask(self, message: Any, then: Callable[[e.OperationDone], None]) -> None:
        """Send a request to the scheduler."""
        self._take(e.SchedulerRequest(self._name(then), message))

    def submit(
        self,
        kind: RecordKind,
        keys: Sequence[m.Key],
        then: Callable[[e.OperationDone], None],
        priority: int = 0,
    ) -> None:
        """Send requests for all slices of these keys to the servers."""
        parts = [self._part(kind, one, size) for key in keys for one, size in self.slices(key)]
        self.spend(self.costs.worker_call)
        if self.coding and kind in _PUSHES:
            self.spend(sum(size for key in keys for _, size in self.slices(key)) * self.costs.worker_pack)
        self._take(e.SubmitRequests(self._name(then), parts, priority))

    def _part(self, kind: RecordKind, one: m.Slice, size: int) -> e.SliceRequest:
        nbytes = size if kind in _CARRY else 0
        coding = self.coding if kind in _PUSHES else 0
        if coding:
            nbytes = cpu.encoded_bytes(coding, size // 4)
        record = Record(kind, one.id, 0, coding=coding, place=_FRAME if nbytes else _NONE, nbytes=nbytes)
        return e.SliceRequest(one.server, record, "value")

    def slices(self, key: m.Key) -> list[tuple[m.Slice, int]]:
        """Return the slices of a key, each with its bytes."""
        found = self._sizes.get(key)
        if found is None:
            entry = self.entries[key]
            size = itemsize(entry.spec.dtype)
            found = self._sizes[key] = [(one, (one.stop - one.start) * size) for one in entry.slices]
        return found

    def _name(self, then: Callable[[e.OperationDone], None]) -> int:
        self._names += 1
        self._waiting[self._names] = then
        return self._names

    def go_on(self) -> None:
        """Continue the program with its next step; it ends with the first error of any wait."""
        if self.over or not self.alive:
            return
        try:
            wait = next(self._program)
        except StopIteration:
            self.over = True
            self.job.worker_is_over(self)
            return
        wait(lambda: self.post(self.go_on))

    def fail(self, failure: Failure) -> None:
        """End with an error."""
        if self.failure is None:
            self.failure = failure
            self.job.mark("failed")
            if not self.over:
                self.over = True
                self.job.worker_is_over(self)

    # ------------------------------------------------------------------------------------------- machine

    def _take(self, event: e.Event) -> None:
        for action in self.machine.step(event, max(self.clock.now, self.time)):
            kind = type(action)
            if kind is e.SendMessage:
                self._send_message(action.peer, action.message)  # type: ignore[union-attr]
            elif kind is e.OperationDone:
                self._done(action)  # type: ignore[arg-type]
            elif kind is m.WelcomeNotice:
                self.go_on()
            elif kind is e.ProcessFailed:
                self.fail(action.failure)  # type: ignore[union-attr]

    def _done(self, action: e.OperationDone) -> None:
        then = self._waiting.pop(action.op, None)
        if action.error is not None:
            self.fail(action.error)
        elif then is not None:
            then(action)

    def _send_message(self, peer: Hashable, message: Any) -> None:
        job, costs = self.job, self.costs
        if type(message) is m.Batch:
            carried = values_of(message.records)
            self.requests += len(message.records)
            self.values_out += carried
            self.spend(
                costs.worker_message
                + len(message.records) * costs.worker_request
                + carried * costs.worker_push
            )
            server = job.servers[peer]  # type: ignore[index]
            self.send(server, batch_bytes(message), server.receive, (self.name, 0), message)
            return
        if peer == e.ECHO:
            job.ask_echo(self, message)
        elif peer == "scheduler":
            self.send_control(job.scheduler, message, (self.name, 0))
        else:
            self.send_control(job.servers[peer], message, (self.name, 0))  # type: ignore[index]
