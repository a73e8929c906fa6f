"""A server's event loop: its sockets, and the execution of the machine's actions, in one thread.

Arithmetic runs on the kernels' helper threads, without the interpreter's lock; at that time messages wait
in ZeroMQ's queues. `storage` has the values and their memory.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import msgspec

from ....errors import CapabilityError, KVStoreError
from ....kernels import cpu
from ....observe.counters import MOVING, SHARED, SUMMING, UPDATING
from ....observe.log import introduce
from ....observe.membership import MembershipLog
from ....observe.native._observe import NO_SLICE, Counters
from ....observe.stacks import watch
from ....observe.stragglers import StragglerLog
from ....observe.timeline import recording
from ....observe.timeline.sources import StoreRecord
from ....settings.parameter_server import PsConfig
from ....settings.roles import Roles
from ....source_tree import package_version
from ..protocol import events
from ..protocol import messages as m
from ..protocol.failures import as_exception
from ..protocol.messages import Batch, Failure, PayloadLocation, Record, RecordKind
from ..protocol.view_log import tell_message
from ..transport.clock_comparison import ClockComparison
from ..transport.frames import MessageLimits
from ..transport.heartbeat_echoes import HeartbeatResponder
from ..transport.sockets import SCHEDULER, ServerSockets
from .held_slices import HeldSlices
from .machine import ServerMachine, ServerOptions
from .storage import ServerStorage

log = logging.getLogger("kvstore.ps")

_COMPLAINT = 60.0  # seconds until the same error is logged again
_TICK = 0.1  # seconds between two ticks
_COMPARISONS = 10  # of clocks, one in each tick; then one in a hundred ticks
_FRAME_BYTES = MessageLimits().frame
_REPLY_BYTES = 1 << 20  # a larger reply is sent in several messages


class ServerLoop:
    """One server, from its start, or its restart from a snapshot, to its end."""

    def __init__(self, roles: Roles, config: PsConfig) -> None:
        self._config = config
        introduce(f"server {roles.rank}" if roles.rank >= 0 else "server")
        self._storage = storage = ServerStorage(roles.rank, config)
        self._members = MembershipLog(log)
        if not roles.restart:  # a restarted server has its last snapshot, even if it can write no other
            storage.check_snapshots()
        state = storage.restore_stores(roles.job) if roles.restart and config.snapshot else None
        if state is not None:
            log.info("snapshot read from %s: %d stores", config.snapshot, len(state["stores"]))
        incarnation = secrets.randbits(63)
        process = f"server/{roles.rank}/{os.getpid()}/{secrets.token_hex(8)}"
        self._sockets = ServerSockets(roles, incarnation, bool(config.streams))
        hello = m.HelloRequest(
            "server", roles.rank, incarnation, process, roles.job, m.PROTOCOL,
            address=self._sockets.address, restarted=state is not None, version=package_version(),
        )  # fmt: skip
        options = ServerOptions(
            dead_after=config.dead_after,
            saves=bool(config.snapshot),
            start=config.timeout,
            where=roles.scheduler,
        )
        self._machine = ServerMachine(hello, options, state)
        self._held = HeldSlices()
        self.counters = self._members.counters = Counters("server", roles.job, roles.rank, roles.num_servers)
        self._sockets.observe(self.counters, self._machine.observe(self.counters))
        self._heartbeats: HeartbeatResponder | None = None
        self._roles = roles
        self._process = process
        self._started = self._ticked = self._saved = time.monotonic()
        if log.isEnabledFor(logging.INFO):
            self._machine.watch_arrivals()
        self._stragglers = StragglerLog(log, self._machine.take_late, self.slice_names, self._started)
        self._clocks = ClockComparison()
        self._ticks = 0
        self._due = False  # a snapshot is
        self._writing: threading.Thread | None = None
        self._unwritten: Failure | None = None  # the failure of the last snapshot
        self._complained = -math.inf
        #: By store and rank, the handle of the values for a worker of this machine.
        self._memory: dict[tuple[int, int], str] = {}
        self._attaching: dict[Hashable, tuple[int, int]] = {}
        self._ended: events.JobEnded | None = None
        self._handlers: dict[type, Callable[[Any], events.Event | None]] = {
            events.SendReplies: self._send_replies,
            events.ApplyRounds: self._apply_rounds,
            events.AbortJobs: storage.abort_jobs,
            events.WithdrawJobs: storage.withdraw_jobs,
            events.SendMessage: self._send_message,
            events.WriteSlices: storage.write_slices,
            m.InstallRequest: self._install_settings,
            events.DefineSlices: self._define_slices,
            events.ForgetSlices: self._forget_slices,
            events.WorkerAttachment: self._attach_worker,
            m.HelloReply: self._meet_scheduler,
            m.WelcomeNotice: self._note_welcome,
            events.SaveSnapshot: self._wants_snapshot,
            events.JobEnded: self._note_end,
            events.ProcessFailed: self._note_end,
        }

    def run(self) -> None:
        """Serve until the end of the job; KVStoreError: it ended with an error, or refused this server."""
        watch(self, ServerLoop.whereabouts)
        recording.follow(self, ServerLoop.timeline_record)
        log.info(
            "server started: scheduler at %s, %s, kernels %s, %d threads, snapshots %s",
            self._roles.scheduler,
            "streams" if self._config.streams else "no streams (KVSTORE_STREAMS=0)",
            cpu.level(), cpu.threads(), self._config.snapshot or "off",
        )  # fmt: skip
        try:
            self._step_machine(events.StartEvent())
            while self._ended is None:
                self._serve_once()
        finally:
            self.counters.leave()
            if self._writing is not None:
                self._writing.join()
            if self._heartbeats is not None:
                self._heartbeats.close()
            self._sockets.close()
            self._storage.close()
            recording.finish(self)
            recording.write_if_last()
        self._stragglers.look(time.monotonic(), at_end=True)
        log.info("server ended after %.1f s", time.monotonic() - self._started)
        if self._ended.error is not None:
            raise as_exception(self._ended.error)

    def whereabouts(self) -> str:
        """Name the server and its stores; see `kvstore.observe.stacks`."""
        stores = ", ".join(map(str, self._machine.store_numbers())) or "none"
        return f"server {self._machine.rank} serves stores {stores}"

    def timeline_record(self) -> StoreRecord:
        """Return the server's description for a timeline."""
        about = self.counters.read()
        return StoreRecord(
            self.counters.number, "server", about["job"], about["rank"], about["size"], self.slice_names()
        )

    def _serve_once(self) -> None:
        for peer, message in self._sockets.receive(_TICK):
            tell_message(self._members, message)
            self._clocks.read_answer(message)
            if type(message) is m.AttachRequest:
                self._attaching[peer] = message.store, message.rank
                log.debug("worker %d attaches to store %d", message.rank, message.store)
            if isinstance(message, Batch):
                self._handle_batch(peer, *self._storage.add_shared_payloads(message))
            else:
                self._step_machine(events.MessageReceived(peer, message))
        now = time.monotonic()
        if now - self._ticked >= _TICK:
            self._ticked = now
            self._step_machine(events.TickEvent())
            self._compare_clocks()
            self._stragglers.look(now)
        self._look_after_snapshots(now)

    def _handle_batch(self, peer: Hashable, batch: Batch, segments: Mapping[int, Any]) -> None:
        """Handle requests of a worker, with the segments of its shared memory."""
        self._step_machine(events.MessageReceived(peer, batch))
        self._link_stream(peer, batch, segments)

    def _compare_clocks(self) -> None:
        """Request the scheduler's time, if a timeline is recorded."""
        if not self._clocks.is_wanted or self._heartbeats is None:
            return
        if self._ticks < _COMPARISONS or self._ticks % 100 == 0:
            self._sockets.send(SCHEDULER, self._clocks.make_question())
        self._ticks += 1

    def _look_after_snapshots(self, now: float) -> None:
        """Start a snapshot when it is due, in its own thread; report when it is on disk."""
        if self._writing is not None:
            if not self._writing.is_alive():
                self._writing = None
                self._end_snapshot()
            return
        interval = self._config.snapshot_interval
        if self._config.snapshot and (self._due or now - self._saved > interval) and self._machine.is_quiet():
            self._due, self._saved = False, now
            write = self._storage.capture_stores(self._machine.snapshot_state())
            thread = threading.Thread(target=self._write_snapshot, args=(write,), name="kvstore-snapshot")
            try:
                thread.start()
                self._writing = thread
            except RuntimeError as error:
                log.warning("no thread can be started (%s): this server pauses for its snapshot", error)
                self._write_snapshot(write)
                self._end_snapshot()

    def _end_snapshot(self) -> None:
        self._storage.end_snapshot()
        if self._unwritten is None:
            took = time.monotonic() - self._saved
            log.info("snapshot written to %s in %.1f s", self._config.snapshot, took)
        self._step_machine(events.SnapshotSaved(self._unwritten))

    def _write_snapshot(self, write: Callable[[], None]) -> None:
        self._unwritten = None
        try:
            write()
        except Exception as error:
            told = str(error) or type(error).__name__  # a MemoryError may have no text
            self._unwritten = Failure(
                "StateFileError",
                f"server {self._machine.rank} has no snapshot: {told}. Correct it, then init the key again",
            )
            if time.monotonic() - self._complained > _COMPLAINT:
                self._complained = time.monotonic()
                log.error("no snapshot could be written, the last one stays: %s", told)

    def _step_machine(self, event: events.Event) -> None:
        work = [event]
        while work:
            for action in self._machine.step(work.pop(0), time.monotonic()):
                follows = self._carry_out(action)
                if follows is not None:
                    work.append(follows)

    def _carry_out(self, action: events.Action) -> events.Event | None:
        handler = self._handlers.get(type(action))
        return None if handler is None else handler(action)

    def _link_stream(self, peer: Hashable, batch: Batch, segments: Mapping[int, Any]) -> None:
        """Have C handle the next requests of a worker's stream as far as possible."""
        link = self._sockets.link_of(peer)
        if link is None or link.session.gone:
            if not self._sockets.has_stream(peer):
                return
            link = self._machine.worker_link(batch.store, batch.rank, self._sockets.job_hash)
            if link is None:
                return
            link.reads_here = self._storage.reads_here(batch.store, batch.rank)
            self._sockets.set_link(peer, link)
        for number, memory in segments.items():
            link.map(number, memory)

    def slice_names(self) -> dict[int, str]:
        """Return a name for the key of each slice, by the number that its events use."""
        return self._held.slice_names()

    def _define_slices(self, action: events.DefineSlices) -> None:
        self._storage.define_slices(action)
        self._held.add_slices(self._machine.rank, action.store, action.keys)
        self._count_held()

    def _count_held(self) -> None:
        """Update the counters of held keys; tables count with all their rows, so the sum may be huge."""
        self.counters.hold(self._held.key_count, min(self._held.nbytes, 2**64 - 1))

    def _apply_rounds(self, action: events.ApplyRounds) -> events.JobsApplied | None:
        phase = UPDATING if any(job.version for job in action.jobs) else SUMMING
        with self.counters.during(phase):
            applied = self._storage.apply_rounds(action)
        for job in action.jobs:
            value = self._storage.slice_value(action.store, job.slice)
            if value is not None:
                self._machine.set_value(action.store, job.slice, value)
        return applied

    def _install_settings(self, install: m.InstallRequest) -> events.InstallDone:
        return events.InstallDone(install.store, install.version, self._storage.install_settings(install))

    def _attach_worker(self, action: events.WorkerAttachment) -> None:
        self._memory[action.store, action.rank] = self._storage.attach_worker(action)

    def _forget_slices(self, action: events.ForgetSlices) -> None:
        self._storage.forget_slices(action)
        self._held.forget_slices(action.store, action.slices)
        self._count_held()
        if action.slices is None:
            self._memory = {key: one for key, one in self._memory.items() if key[0] != action.store}
            for worker in {key for key in self._attaching.values() if key[0] == action.store}:
                self._forget_names(worker)

    def _forget_names(self, worker: tuple[int, int], but: Hashable = None) -> None:
        """Forget the socket identities of a worker, except its present one."""
        for peer in [one for one, known in self._attaching.items() if known == worker and one != but]:
            del self._attaching[peer]
            self._sockets.forget_worker(peer)

    def _meet_scheduler(self, met: m.HelloReply) -> None:
        self._heartbeats = HeartbeatResponder(met.pulse, self._process, self._roles.keys, self._roles.job)
        self._sockets.start_receiving(met.echo)

    def _note_welcome(self, welcome: m.WelcomeNotice) -> None:
        self._storage.set_rank(welcome.rank)
        if self._config.snapshot and not self._roles.restart:
            self._storage.begin_snapshots(self._roles.job)
        self.counters.describe("server", self._roles.job, welcome.rank, self._roles.num_servers)
        introduce(f"server {welcome.rank}")

    def _wants_snapshot(self, action: events.SaveSnapshot) -> None:
        self._due = True

    def _note_end(self, action: events.JobEnded | events.ProcessFailed) -> None:
        self._ended = action if isinstance(action, events.JobEnded) else events.JobEnded(action.failure)

    def _send_message(self, action: events.SendMessage) -> None:
        message = action.message
        if type(message) is m.AttachReply:
            worker = self._attaching.get(action.peer, (-1, -1))
            self._forget_names(worker, but=action.peer)
            stream = self._sockets.offer_stream(action.peer)
            message = msgspec.structs.replace(message, memory=self._memory.get(worker, ""), stream=stream)
        self._sockets.send(action.peer, message)

    def _send_replies(self, action: events.SendReplies) -> None:
        """Answer one worker; a large reply is sent in several messages."""
        with self.counters.during(MOVING, NO_SLICE, 0, 0, action.batch.rank):
            self._send_answers(action)

    def _send_answers(self, action: events.SendReplies) -> None:
        records: list[Record] = []
        frames: list[Any] = []
        size = 0
        store, rank = action.batch.store, action.batch.rank
        for kind, request, round, detail in action.answers:
            record, buffers = self._read_answer(store, rank, kind, request, round, detail)
            if size and size + record.nbytes > _REPLY_BYTES and buffers:
                self._send_reply(action, records, frames)
                records, frames, size = [], [], 0
            if buffers:
                record = record._replace(frame=len(frames))
                frames.append(tuple(buffers))
                size += record.nbytes
            records.append(record)
        if records or not action.answers:
            self._send_reply(action, records, frames)

    def _send_reply(self, action: events.SendReplies, records: list[Record], frames: list[Any]) -> None:
        self._sockets.send(action.peer, action.batch._replace(records=records, frames=tuple(frames)))

    def _read_answer(
        self, store: int, rank: int, kind: RecordKind, request: Record, round: int, detail: Any
    ) -> tuple[Record, Sequence[Any]]:
        record = Record(kind, request.slice, request.sequence, round)
        if kind == RecordKind.FAILED:
            return _failure_record(record, detail)
        if kind != RecordKind.VALUE:
            return record, ()
        try:
            steady = self._machine.waits_for(store, rank)
            past = request.flags == m.OF_ROUND and request.round < round
            found, buffers = self._storage.read_slice(store, rank, request, detail, steady, past)
            self._check_size(store, found, request.slice, buffers)
            round = request.round if past else round
            if found.flags == m.IN_PLACE and found.place == PayloadLocation.NONE:
                self.counters.move(SHARED, request.nbytes, 0)
        except KVStoreError as error:
            return _failure_record(record, Failure(type(error).__name__, str(error)))
        return found._replace(kind=kind, slice=request.slice, sequence=request.sequence, round=round), buffers

    def _check_size(self, store: int, found: Record, slice: int, buffers: Sequence[Any]) -> None:
        """Raise CapabilityError if a reply is too large for a message: the codec would end this server."""
        if found.nbytes <= _FRAME_BYTES:
            return
        if all(len(one) <= _FRAME_BYTES for one in buffers):
            return
        key = self._storage.store_shard(store).slice_key(slice)
        raise CapabilityError(
            f"server {self._machine.rank} has {found.nbytes} bytes of key {key!r} to send, and a frame has "
            f"at most {_FRAME_BYTES}: pull the rows of a table in portions with row_sparse_pull, or start "
            "more servers"
        )


def _failure_record(record: Record, failure: Failure) -> tuple[Record, list[bytes]]:
    text = msgspec.msgpack.encode(failure)
    return record._replace(kind=RecordKind.FAILED, place=PayloadLocation.FRAME, nbytes=len(text)), [text]
