"""The loop of a server in this process, and workers' ends of its streams, which are pairs of sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pace
import pytest

from kvstore.errors import KVStoreError
from kvstore.kernels import cpu
from kvstore.observe.native._observe import Counters
from kvstore.optimizer import states
from kvstore.optimizer.builtin import arrays_of
from kvstore.settings.parameter_server import PsConfig
from kvstore.settings.roles import Roles
from kvstore.stores.parameter_server.native._native import Link
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.protocol.messages import Batch, PayloadLocation, Record
from kvstore.stores.parameter_server.server import loop as server_loop
from kvstore.stores.parameter_server.transport import ciphers
from kvstore.stores.parameter_server.transport.frames import MessageCodec, pack_payloads
from kvstore.stores.parameter_server.transport.native._streams import Cipher, Sender, Stream, StreamSet
from kvstore.stores.parameter_server.transport.shared_buffers import (
    PeerBuffers,
    SharedBlock,
    SharedBufferPool,
)
from kvstore.stores.parameter_server.transport.sockets import _decode_or_refuse, _with_packed_payloads

K, P = m.RecordKind, PayloadLocation
LIMIT = 1 << 26
JOB = "job"
KEYS = bytes(range(32)), bytes(range(32, 64))  # for the data that a server sends, and receives


class Sockets:
    """In the place of `ServerSockets`: streams are pairs of sockets, all other messages stay here."""

    links = True
    cipher = 0  # the number of that of streams; 0: there is none

    def __init__(self, roles: Roles, incarnation: int, streams: bool) -> None:
        self.codec = MessageCodec(roles.job, marks=True)
        self.job_hash, self.address = self.codec.job, "tcp://127.0.0.1:1"
        self.sender, self.all = Sender(), StreamSet()
        self.streams: dict[Hashable, Stream] = {}
        self.known: dict[Hashable, Link] = {}
        self.inbox: list[tuple[Hashable, Any]] = []
        self.told: list[tuple[Hashable, Any]] = []
        self.seen = 0  # records that reached Python

    def observe(self, counters: Counters, waits: Any) -> None:
        self.all.observe(counters, waits)

    def open(self, peer: Hashable) -> socket.socket:
        ours, theirs = socket.socketpair()
        for one in (ours, theirs):
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.forget_worker(peer)
        self.streams[peer] = stream = self.stream(ours, KEYS)
        self.all.add(stream)
        return theirs

    def stream(self, end: socket.socket, keys: tuple[bytes, bytes]) -> Stream:
        cipher = Cipher(ciphers._find_aeads()[self.cipher], *keys) if self.cipher else None
        return Stream(self.sender, end.detach(), LIMIT, cipher)

    def send(self, peer: Hashable, message: Any) -> None:
        stream = self.streams.get(peer) if isinstance(message, Batch) else None
        frames = self.codec.encode(_with_packed_payloads(message))
        if stream is None or not stream.send(frames):
            self.told.append((peer, self.codec.decode([memoryview(one) for one in frames])))

    def receive(self, timeout: float) -> Iterator[tuple[Hashable, Any]]:
        inbox, self.inbox = self.inbox, []
        yield from inbox
        peers = {stream: peer for peer, stream in self.streams.items()}
        for stream in self.all.serve(0):
            try:
                for handled, frames in stream.take_messages():
                    message = _decode_or_refuse(self.codec, frames, "a test")
                    if isinstance(message, Batch):
                        self.seen += len(message.records) - handled
                        yield peers[stream], message._replace(records=message.records[handled:])
            except ConnectionError:  # noqa: PERF203
                self.forget_worker(peers[stream])

    def has_stream(self, peer: Hashable) -> bool:
        return peer in self.streams

    def link_of(self, peer: Hashable) -> Link | None:
        return self.known.get(peer)

    def set_link(self, peer: Hashable, link: Link) -> None:
        if self.links:
            self.streams[peer].set_link(link)
            self.known[peer] = link

    def forget_worker(self, peer: Hashable) -> None:
        stream = self.streams.pop(peer, None)
        self.known.pop(peer, None)
        if stream is not None:
            self.all.remove(stream.fileno())
            stream.close()

    def offer_stream(self, peer: Hashable) -> str:
        return ""

    def start_receiving(self, echo: str) -> None:
        raise AssertionError("there is no scheduler")

    def close(self) -> None:
        for peer in list(self.streams):
            self.forget_worker(peer)
        self.all.close()
        self.sender.close()


class Answer(NamedTuple):
    kind: int
    round: int
    payload: bytes | None


class Worker:
    """A worker's end: it sends messages of the test, and keeps all replies."""

    def __init__(self, server: Server, rank: int, incarnation: int) -> None:
        self.server, self.rank, self.incarnation = server, rank, incarnation
        self.pool = SharedBufferPool()
        self.memory: PeerBuffers | None = None
        self.blocks: dict[int, SharedBlock] = {}
        self.answers: dict[int, list[Answer]] = {}
        self.reported = self.packed = 0
        self.stream: Stream | None = None

    @property
    def peer(self) -> Hashable:
        return self.rank, self.incarnation

    def open(self) -> None:
        self.close_stream()
        self.stream = self.server.sockets.stream(self.server.sockets.open(self.peer), KEYS[::-1])

    def close_stream(self) -> None:
        if self.stream is not None:
            self.stream.close()
        self.stream = None

    def attach(self, epoch: int, host: str = "") -> None:
        handle = self.pool.handle()
        attach = m.AttachRequest(0, self.rank, self.incarnation, epoch, JOB, memory=handle, host=host)
        self.server.sockets.inbox.append((self.peer, attach))
        self.server.pump()

    def take(self, batch: Batch) -> None:
        assert (batch.store, batch.rank, batch.incarnation) == (0, self.rank, self.incarnation)
        self.reported = max(self.reported, batch.received)
        for record in batch.records:
            found = Answer(int(record.kind), record.round, self._payload(record, batch.frames))
            self.answers.setdefault(record.sequence, []).append(found)

    def _payload(self, record: Record, frames: tuple[Any, ...]) -> bytes | None:
        if record.place == P.FRAME and record.rows >= 0:
            both = b"".join(bytes(one) for one in frames[record.frame : record.frame + 2])
            return both[record.offset : record.offset + record.nbytes]
        if record.place == P.FRAME:
            frame = memoryview(frames[record.frame]).cast("B")
            assert len(frame) >= record.offset + record.nbytes
            data = bytes(frame[record.offset : record.offset + record.nbytes])
            if record.coding:
                self.packed += 1
                return summed(record, data, self.server.shapes[record.slice][0])
            return repr(unpacked(data)).encode() if b"kvstore.optimizer_states" in data else data
        if record.place == P.SHARED:
            assert self.memory is not None
            out = np.empty(record.nbytes, np.uint8)
            same = self.memory.copy_block(record.frame, record.offset, record.nbytes, record.flags, out)
            return out.tobytes() if same else None  # overwritten by now: a worker asks again
        block = self.blocks.get(record.sequence) if record.flags == m.IN_PLACE else None
        return block.array.tobytes() if block is not None else b""

    def close(self) -> None:
        self.close_stream()
        if self.memory is not None:
            self.memory.close()
        self.pool.close()


def summed(record: Record, data: bytes, size: int) -> bytes:
    """Sum the parts that are sent in place of a value."""
    parts = np.frombuffer(data, np.uint8).reshape(-1, cpu.encoded_bytes(record.coding, size))
    total = np.empty(size, np.float32)
    cpu.decode(record.coding, record.threshold, list(parts), total)
    return total.tobytes()


def unpacked(data: bytes) -> Any:
    """Rule, counts and arrays of a state; the order of packed entries may differ."""
    if not data:
        return None
    content = states.unpack_states(data)
    arrays = {key: [one.tobytes() for one in arrays_of(tree)] for key, tree in content.states.items()}
    return content.rule, content.counts, content.num_update, arrays


class Server:
    """The loop of a server, with sockets of its own."""

    mode = "sync"

    def __init__(
        self, patch: pytest.MonkeyPatch, links: bool, report: int = 1000, snapshot: str = ""
    ) -> None:
        patch.setattr(server_loop, "ServerSockets", type("Sockets", (Sockets,), {"links": links}))
        options = server_loop.ServerOptions
        patch.setattr(server_loop, "ServerOptions", lambda **more: options(**{**more, "report": report}))
        roles = Roles("server", 0, 3, 1, JOB, "tcp://127.0.0.1:1", "127.0.0.1", 0, None, True)
        config = PsConfig(timeout=1e6, heartbeat=1.0, dead_after=1e6, threads=1, snapshot=snapshot)
        self.loop = server_loop.ServerLoop(roles, config)
        patch.undo()
        self.sockets: Any = self.loop._sockets
        self.letters = self.epoch = self.installs = 0
        self.workers: dict[int, Worker] = {}
        self.shapes: list[tuple[int, str]] = []
        self.tell(m.WelcomeNotice(-1, 0, 1, 0, (), ()))

    def tell(self, body: Any) -> None:
        """Say something as the scheduler."""
        self.letters += 1
        self.sockets.inbox.append(("scheduler", m.ReliableMessage(self.letters, 0, body)))
        self.pump()

    def install(
        self, text: str, version: int = 1, ordinal: int = 1, epoch: int = 1, kind: str = "settings"
    ) -> None:
        """Send settings that hold from a version on; or a command, if it is of that kind."""
        self.installs += 1
        self.tell(m.InstallRequest(0, self.installs, kind, text, since=version, ordinal=ordinal, epoch=epoch))

    def define(self, shapes: list[tuple[int, str]]) -> None:
        self.shapes = shapes
        entries = [
            m.KeyEntry(m.KeySpec(str(i), (n,), dtype), i, (m.Slice(i, 0, 0, n),), False)
            for i, (n, dtype) in enumerate(shapes)
        ]
        self.tell(m.SlicesNotice(0, tuple(entries)))

    def view(self, **more: Any) -> None:
        self.epoch += 1
        members = tuple(m.Member(one.rank, one.incarnation) for one in self.workers.values())
        more = {"resting": (), "losses": (), "servers": (), "mode": self.mode, **more}
        self.tell(m.ViewNotice(0, self.epoch, members, **more))

    def start(self, workers: int) -> None:
        for rank in range(workers):
            self.workers[rank] = Worker(self, rank, 100 + rank)
        self.view()
        for worker in self.workers.values():
            worker.attach(self.epoch)
            worker.open()

    def pump(self) -> None:
        """Serve until all that was sent has been handled, and answered."""
        end = pace.deadline(60)
        calm = 0
        while calm < 2:
            assert time.monotonic() < end
            self.loop._serve_once()
            ends = [worker.stream for worker in self.workers.values() if worker.stream is not None]
            got = sum(self._collect(worker) for worker in self.workers.values())
            sent = all(one.sent for one in (*ends, *self.sockets.streams.values()))
            calm = calm + 1 if sent and not got and not self.sockets.inbox else 0

    def _collect(self, worker: Worker) -> int:
        for peer, message in self.sockets.told:
            if peer == worker.peer and isinstance(message, Batch):
                worker.take(message)
            elif peer == worker.peer and isinstance(message, m.AttachReply) and message.memory:
                worker.memory = PeerBuffers.open(message.memory)
        self.sockets.told = [one for one in self.sockets.told if one[0] != worker.peer]
        count = 0
        try:
            for frames in worker.stream.receive() if worker.stream is not None else ():
                message = self.sockets.codec.decode([memoryview(frame) for frame in frames])
                worker.take(message)
                count += 1
        except ConnectionError:
            worker.close_stream()
        return count

    def send(self, rank: int, records: list[Record], payloads: list[Any], **head: Any) -> None:
        """Send a batch; a record's `frame` is the number of its payload."""
        worker = self.workers[rank]
        frames, places = pack_payloads(payloads) if payloads else ([], [])
        moved = [
            one._replace(frame=places[one.frame][0], offset=places[one.frame][1])
            if one.place == P.FRAME and one.frame < len(places)
            else one
            for one in records
        ]
        batch = Batch(0, rank, worker.incarnation, self.epoch, moved, tuple(frames))._replace(**head)
        self.raw(rank, MessageCodec(JOB).encode(batch))

    def raw(self, rank: int, frames: list[Any]) -> None:
        stream = self.workers[rank].stream
        if stream is not None:
            stream.send(frames)

    def session(self, rank: int) -> Any:
        return self.loop._machine._stores[0].sessions.by_rank.get(rank)

    def values(self) -> dict[int, tuple[int, bytes]]:
        """Round and value of each slice that is ready."""
        store = self.loop._machine._stores[0]
        shard = self.loop._storage.store_shard(0)
        ready = {i: one for i, one in store.requests.slices.items() if one.ready}
        return {i: (one.round, shard.read_value(i).tobytes()) for i, one in sorted(ready.items())}

    def states(self) -> dict[int, bytes]:
        """State of the optimizer of each slice that is ready; b"" without one."""
        shard = self.loop._storage.store_shard(0)
        return {i: shard.fetch_state(i) for i in self.values()}

    def capture(self) -> list[int]:
        """Note a snapshot, and do not write it; return the slices that have changed."""
        shard = self.loop._storage.store_shard(0)
        shard._slices.note_changed()
        changed = sorted(shard._slices.changed)
        if self.loop._machine.is_quiet():
            self.loop._storage.capture_stores(self.loop._machine.snapshot_state())
        return changed

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self.sockets.close()
        self.loop._storage.close()


#: Row-sparse slices, by number: rows of the table, the first one of the slice, the shape of a row, type.
TABLES = [
    (40, 0, (3,), "float32"), (300, 0, (70,), "float32"), (400, 100, (24,), "float32"),
    (300, 0, (9, 2), "float64"), (200, 50, (5,), "float16"), (60, 0, (0,), "float32"),
]  # fmt: skip


class TableServer(Server):
    """A server of which all slices are row-sparse."""

    def define(self, shapes: list[Any]) -> None:
        entries = []
        for i, (n, start, rest, dtype) in enumerate(shapes):
            slices = [m.Slice(i, 0, start, n)]
            if start:
                slices.insert(0, m.Slice(100 + i, 1, 0, start))
            spec = m.KeySpec(str(i), (n, *rest), dtype, sparse=True)
            entries.append(m.KeyEntry(spec, slices[0].id, tuple(slices), False))
        self.tell(m.SlicesNotice(0, tuple(entries)))

    def values(self) -> dict[int, Any]:
        store = self.loop._machine._stores[0]
        shard = self.loop._storage.store_shard(0)
        ready = {i: one for i, one in store.requests.slices.items() if one.ready}
        rows = {i: [a.tobytes() for a in shard.read_rows(i)] for i in ready}
        return {i: (one.round, rows[i]) for i, one in sorted(ready.items())}

    def past(self) -> dict[int, Any]:
        """The content of each table before its last round, all of it and some rows."""
        found: dict[int, Any] = {}
        shard = self.loop._storage.store_shard(0)
        for i, (round, _) in self.values().items():
            n, start = TABLES[i][:2]
            if not round:
                continue
            try:
                some = np.arange(start, n, 3)
                both = [*shard.past_value(i, round - 1), *shard.past_value(i, round - 1, some)]
                found[i] = [array.tobytes() for array in both]
            except KVStoreError as error:
                found[i] = str(error)
        return found
