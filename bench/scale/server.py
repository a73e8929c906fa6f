"""A server's process: the real state machine and native rounds; values are only counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from bench.scale.job import Job
from bench.scale.network import Host
from bench.scale.processes import Process
from bench.scale.wire import data_bytes, values_of
from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.protocol.messages import PayloadLocation, Record, RecordKind
from kvstore.stores.parameter_server.scheduler.key_table import itemsize
from kvstore.stores.parameter_server.server.machine import ServerMachine, ServerOptions

_PUSHES = (RecordKind.PUSH, RecordKind.PUSHPULL)
_VALUE, _FRAME, _NONE = RecordKind.VALUE, PayloadLocation.FRAME, PayloadLocation.NONE
#: As native/replies.h has them.
_REPLY_BYTES, _REPLY_RECORDS = 1 << 20, 4096


class ServerProcess(Process):
    """A server. `requests` and `values` count records of requests, and bytes of values both ways."""

    def __init__(self, job: Job, host: Host, rank: int, options: ServerOptions) -> None:
        super().__init__(job.clock, host, f"server{rank}", job.costs)
        self._job = job
        self._sizes: dict[tuple[int, int], int] = {}  # bytes of each slice, by store
        self.requests = self.rounds = 0
        self.values_in = self.values_out = 0
        hello = m.HelloRequest("server", rank, rank + 1, self.name, job.name, m.PROTOCOL, self.name)
        self.machine = ServerMachine(hello, options)

    def start(self) -> None:
        """Register at the scheduler."""
        self._take(e.StartEvent())

    def tick(self) -> None:
        """Pass a tick to the state machine."""
        self._take(e.TickEvent())

    def hear(self, message: Any, peer: Any = "scheduler") -> None:
        """Handle a control message."""
        self._take(e.MessageReceived(peer, message))

    def echo(self, message: Any) -> None:
        """Handle a reply of the scheduler's echo."""
        self._take(e.MessageReceived(e.ECHO, message))

    def receive(self, peer: tuple[str, int], batch: m.Batch) -> None:
        """Handle requests of a worker."""
        costs, records = self.costs, batch.records
        self.received += 1
        self.requests += len(records)
        carried = values_of(records)
        self.values_in += carried
        self.spend(costs.server_message + len(records) * costs.server_request)
        if not (records and records[0].coding):
            self.spend(carried * costs.server_push)
        self._take(e.MessageReceived(peer, batch))

    def _take(self, event: e.Event) -> None:
        work = deque([event])
        while work:
            for action in self.machine.step(work.popleft(), max(self.clock.now, self.time)):
                follows = self._carry_out(action)
                if follows is not None:
                    work.append(follows)

    def _carry_out(self, action: e.Action) -> e.Event | None:
        kind = type(action)
        if kind is e.SendReplies:
            self._reply(action)  # type: ignore[arg-type]
        elif kind is e.ApplyRounds:
            return self._apply(action)  # type: ignore[arg-type]
        elif kind is e.WriteSlices:
            return e.JobsApplied(action.store, [(one.slice, None) for one in action.writes])  # type: ignore[union-attr]
        elif kind is e.SendMessage:
            self._send_control(action)  # type: ignore[arg-type]
        elif kind is e.DefineSlices:
            self._define(action)  # type: ignore[arg-type]
        elif kind is m.InstallRequest:
            return e.InstallDone(action.store, action.version)  # type: ignore[union-attr]
        elif kind is e.JobEnded:
            self.die()
        return None

    def _apply(self, action: e.ApplyRounds) -> e.JobsApplied:
        """Sum the parts; the cost of plain parts was spent when they arrived."""
        for job in action.jobs:
            self.rounds += 1
            if job.parts and job.parts[0][1].coding:
                plain = self._sizes[action.store, job.slice]
                self.spend(len(job.parts) * plain * self.costs.server_unpack)
        return e.JobsApplied(action.store, [(job.slice, None) for job in action.jobs])

    def _define(self, action: e.DefineSlices) -> None:
        for entry in action.keys:
            size = itemsize(entry.spec.dtype)
            for one in entry.slices:
                self._sizes[action.store, one.id] = (one.stop - one.start) * size

    def _send_control(self, action: e.SendMessage) -> None:
        if action.peer == e.ECHO:
            self._job.ask_echo(self, action.message)
        elif action.peer == "scheduler":
            self.send_control(self._job.scheduler, action.message, (self.name, -1))
        else:
            self.send_control(self._job.processes[action.peer[0]], action.message, self.machine.rank)

    # ------------------------------------------------------------------------------------------- replies

    def _reply(self, action: e.SendReplies) -> None:
        records = [self._answer(action.batch.store, *answer) for answer in action.answers]
        worker, costs = self._job.processes[action.peer[0]], self.costs
        for some in _portions(records):
            carried = values_of(some)
            self.values_out += carried
            self.spend(costs.server_message + carried * costs.server_pull)
            batch = action.batch._replace(records=some, frames=("value",))
            nbytes = data_bytes((one.nbytes for one in some if one.nbytes), len(some))
            self.send(worker, nbytes, worker.receive, self.machine.rank, batch)

    def _answer(self, store: int, kind: RecordKind, request: Record, round_: int, detail: Any) -> Record:
        nbytes = self._sizes[store, request.slice] if kind == _VALUE else 0
        place = _FRAME if nbytes else _NONE
        return Record(kind, request.slice, request.sequence, round_, place=place, nbytes=nbytes)


def _portions(records: list[Record]) -> Iterator[list[Record]]:
    """Divide replies into messages, as `kp_count_for_message` does."""
    some: list[Record] = []
    size = 0
    for record in records:
        if some and (len(some) == _REPLY_RECORDS or (size and size + record.nbytes > _REPLY_BYTES)):
            yield some
            some, size = [], 0
        some.append(record)
        size += record.nbytes
    if some or not records:
        yield some
