"""The sockets of each role: they send and receive the messages of the state machines.

A message that cannot be sent now is lost, as on a broken connection: the machines repeat it.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from ....errors import ArgumentError, ProtocolError
from ....observe.counters import FRAME, MOVING, STREAM, WAITING
from ....observe.native._observe import NO_SLICE, Counters
from ....settings import addresses
from ....settings.roles import Roles
from ..native._native import Link, count_values
from ..protocol.events import ECHO
from ..protocol.messages import PROTOCOL, Batch, Control, HelloRequest, PayloadLocation
from .channel import ChannelPoller, DealerChannel, NotSentError, RouterChannel, ZmqChannel
from .ciphers import available_ciphers
from .context import ZmqContext
from .frames import MessageCodec, pack_payloads
from .heartbeat_echoes import HeartbeatMonitor, SchedulerEcho
from .native._streams import Exchange, ExpectedRows, Sender, Stream, await_replies
from .process_limits import check_open_files, check_threads
from .refusals import RefusalLog
from .server_streams import ServerStreams
from .stream_client import StreamClient

log = logging.getLogger("kvstore.ps")

SCHEDULER = "scheduler"

_FRAME = PayloadLocation.FRAME
_AT_ONCE = 64  # messages of one channel before other channels are read
_LINGER = 0.5  # seconds to send the last messages of a process
_SERVER_CORES = 2  # of a server: two threads serve its streams
_FEW_WORKERS = 4  # that may each have two large parts in flight to one server, where there are cores
_THREADS = 4  # ZeroMQ's two, the ZAP handler's, and the echo's of the scheduler

Message = Control | Batch


class _RoleSockets:
    """The sockets of one process; base class of all roles."""

    def __init__(self, roles: Roles, job: str) -> None:
        check_open_files(roles)
        check_threads(_THREADS)
        self._context = ZmqContext(roles.keys, job=job)
        self._poller = ChannelPoller()
        self._counters = Counters("", "", 0, 0, shown=False)
        self.closed = False

    def _count_received(self, found: Message | None, way: int, begin: int) -> None:
        """Count the values of a message that was received since `begin`, and end a wait for it."""
        if type(found) is Batch:
            nbytes = count_values(self._counters, way, found.records, False)
            if begin:
                self._counters.leave(begin)
                self._counters.end(MOVING, begin, NO_SLICE, 0, nbytes)

    def close(self) -> None:
        """Close all. A second call does nothing."""
        if not self.closed:
            self.closed = True
            self.close_streams()
            self._context.close(_LINGER)
            self._poller.close()

    def close_streams(self) -> None:
        """Close the streams, once all messages are passed to the kernel."""


def _should_limit_in_flight(roles: Roles) -> bool:
    """Return whether workers should send in turn: too few cores, or many workers, if all are on one host."""
    wanted = roles.num_workers + _SERVER_CORES * roles.num_servers
    return roles.num_workers > 1 and (
        roles.num_workers > _FEW_WORKERS or len(os.sched_getaffinity(0)) < wanted
    )


class WorkerSockets(_RoleSockets):
    """A worker's sockets: one to the scheduler, one to its echo, and one to each server."""

    def __init__(self, roles: Roles, hello: HelloRequest, echo: str = "") -> None:
        super().__init__(roles, roles.job)
        self._codec = MessageCodec(roles.job)
        self._name = f"{roles.job}/{hello.group}.{hello.ordinal}/worker{roles.rank}/{hello.incarnation:x}"
        self._servers: dict[int, DealerChannel] = {}
        self._streams: dict[int, StreamClient] = {}
        self._encrypted, self._limits_in_flight = roles.keys is not None, _should_limit_in_flight(roles)
        self._sender: Sender | None = None
        self._peers: dict[Any, Hashable] = {}
        self._echo: DealerChannel | None = None
        try:
            met = bool(echo)  # another store of this process has met the scheduler
            self._scheduler = DealerChannel(
                self._context, roles.scheduler, _zmq_identity(self._name), insists=met
            )
            self._add_dealer(self._scheduler, SCHEDULER)
            if echo:
                self.connect_echo(echo)
        except BaseException:
            self.close()
            raise

    def observe(self, counters: Counters) -> None:
        """Count in `counters` from now on."""
        self._counters = counters
        for stream in list(self._streams.values()):  # another store's thread may open a stream concurrently
            stream.observe(counters)

    @property
    def frame_bytes(self) -> int:
        """Bytes of the largest payload that can be sent."""
        return self._codec.limits.frame

    def check_message(self, message: Control, what: str) -> None:
        """Raise `ArgumentError` if a message cannot be sent: it would be repeated for ever."""
        try:
            self._codec.encode(message)
        except (ProtocolError, ValueError, OverflowError, TypeError) as error:
            raise ArgumentError(f"{what} cannot be sent: {error}") from None

    def connect_echo(self, address: str) -> None:
        """Open the connection to the scheduler's echo."""
        if self._echo is None:
            self._echo = _connect_echo(self._context, address, self._name)
            self._add_dealer(self._echo, ECHO)

    def connect_server(self, server: int, address: str) -> None:
        """Open a connection to a server; it replaces an earlier one."""
        self._drop_server(server)
        name = f"{self._name}/{server}/{secrets.token_hex(4)}"
        dealer = DealerChannel(self._context, address, _zmq_identity(name), "server", server, insists=True)
        self._servers[server] = dealer
        self._add_dealer(dealer, server)

    def _add_dealer(self, dealer: DealerChannel, peer: Hashable) -> None:
        self._peers[dealer] = peer
        self._poller.add_channel(dealer)

    def open_stream(self, server: int, offer: str) -> None:
        """Send batches over a stream to a server from now on, where it offers one."""
        stream = self._streams.get(server)
        if not offer or (stream is not None and stream.offer == offer):
            return
        self._drop_stream(server)
        stream = self._streams[server] = StreamClient(
            offer, self._start_sender, self._poller, self._encrypted, self._limits_in_flight
        )
        self._peers[stream] = server
        stream.observe(self._counters)
        stream.advance_open()

    def _start_sender(self) -> Sender:
        if self._sender is None:
            self._sender = Sender()
        return self._sender

    def _drop_stream(self, server: int) -> None:
        stream = self._streams.pop(server, None)
        if stream is not None:
            del self._peers[stream]
            stream.close()

    def close_streams(self) -> None:
        """Close the streams to servers, once all messages are passed to the kernel."""
        for stream in self._streams.values():
            stream.wait_sent(_LINGER)
        for server in list(self._streams):
            self._drop_stream(server)
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _drop_server(self, server: int) -> None:
        self._drop_stream(server)
        dealer = self._servers.pop(server, None)
        if dealer is not None:
            self._poller.remove_channel(dealer)
            del self._peers[dealer]
            dealer.close()

    def send(self, peer: Hashable, message: Message) -> None:
        """Send to ``"scheduler"``, `ECHO` or a server's number."""
        if peer == SCHEDULER:
            dealer: DealerChannel | None = self._scheduler
        else:
            dealer = self._echo if peer == ECHO else self._servers.get(peer)  # type: ignore[call-overload]
        if dealer is None:
            return
        try:
            if type(message) is Batch:
                self._send_batch(peer, dealer, message)  # type: ignore[arg-type]
            else:
                dealer.send(self._codec.encode(message))
        except NotSentError as error:
            log.debug("not sent, and sent again later: %s", error)

    def _send_batch(self, server: int, dealer: DealerChannel, batch: Batch) -> None:
        stream, counters = self._streams.get(server), self._counters
        if batch.frames:  # a probe of a late reply does not end a wait
            counters.enter(MOVING, NO_SLICE, 0, 0, -1 - server)
        try:
            frames = self._codec.encode(_with_packed_payloads(batch))
            by_stream = stream is not None and stream.send(frames)
            if not by_stream:
                dealer.send(frames)
            count_values(counters, STREAM if by_stream else FRAME, batch.records, True)
        finally:
            if batch.frames:
                counters.leave()

    def receive(self, timeout: float) -> Iterator[tuple[Hashable, Message]]:
        """Wait for messages, at most `timeout` seconds; yield them."""
        for channel in self._poller.wait(timeout):
            peer = self._peers.get(channel)
            if peer is None:
                continue  # an earlier message has closed this channel
            if isinstance(channel, StreamClient):
                begin = self._counters.begin()
                for frames in channel.receive() if not self.closed else ():
                    message = _decode_or_refuse(self._codec, frames, f"server {peer}")
                    self._count_received(message, STREAM, begin)
                    begin = 0
                    if message is not None:
                        yield peer, message
                continue
            for _ in range(_AT_ONCE):
                begin = self._counters.begin()
                found = channel.receive() if not self.closed and channel in self._peers else None
                if found is None:
                    break
                message = _decode_or_refuse(self._codec, found, channel.peer_name)
                self._count_received(message, FRAME, begin)
                if message is not None:
                    yield peer, message

    def make_exchange(
        self,
        who: tuple[int, int, int],
        parts: list[tuple[int, int, int, int]],
        sizes: list[int],
        batch_bytes: int,
        credit: int,
        report: int,
        kind: int,
    ) -> Exchange:
        """Return an `Exchange` of arrays with a server over a stream; `who`: store, rank and incarnation."""
        head = (PROTOCOL, self._codec.job, *who)
        return Exchange(head, parts, sizes, batch_bytes, self._codec.limits.frame, credit, report, kind)

    def server_stream(self, server: int) -> Stream | None:
        """Return the stream to a server; None where there is none, or a handshake is in progress."""
        client = self._streams.get(server)
        return None if client is None or not self._poller.descriptors else client.stream

    def lost_streams(self) -> list[int]:
        """Return the servers to which a stream has ended since the last call."""
        lost = [server for server, client in self._streams.items() if client.has_lost]
        for server in lost:
            self._streams[server].has_lost = False
        return lost

    def expect_rows(self, server: int, rows: ExpectedRows) -> Stream | None:
        """Receive rows at their destination; return the stream that does so. None: they are to be copied."""
        client = self._streams.get(server)
        stream = None if client is None else client.stream
        return stream if stream is not None and stream.expect(rows) else None

    def await_replies(
        self,
        ways: list[tuple[Exchange, Stream]],
        end: float,
        untils: list[Exchange | None] | None = None,
    ) -> list[tuple[int, Message]]:
        """Wait for the replies to exchanges, or for another event; `untils` as in `await_replies` of C.

        Returns other messages, each with the index of its exchange.
        """
        found = await_replies(ways, self._poller.descriptors, end, untils)
        if not found:
            return []
        messages = [(number, _decode_or_refuse(self._codec, frames, "a server")) for number, frames in found]
        for _, message in messages:
            self._count_received(message, STREAM, 0)
        return [(number, message) for number, message in messages if message is not None]

    def wake(self) -> None:
        """End the `receive` of another thread."""
        if not self.closed:
            self._poller.wake()

    def forget_wake(self) -> None:
        """Discard earlier wakes: they do not end the next `receive`."""
        if not self.closed:
            self._poller.forget_wake()


class ServerSockets(_RoleSockets):
    """A server's sockets: one to the scheduler, one to its echo, one for all workers, and their streams."""

    def __init__(self, roles: Roles, incarnation: int, streams: bool) -> None:
        super().__init__(roles, roles.job)
        self._streams: ServerStreams | None = None
        self._codec = MessageCodec(roles.job, marks=True)
        self._echo: DealerChannel | None = None
        self._name = name = f"{roles.job}/server{roles.rank}/{incarnation:x}"
        try:
            self._workers = RouterChannel(self._context, _server_address(roles, name))
            self._scheduler = DealerChannel(self._context, roles.scheduler, _zmq_identity(name))
            self._poller.add_channel(self._scheduler)
            if streams and (roles.keys is None or available_ciphers()):
                self._streams = ServerStreams(roles, self._poller)
        except BaseException:
            self.close()
            raise
        #: The address at which workers connect.
        self.address = self._workers.address

    def observe(self, counters: Counters, waits: Any) -> None:
        """Count in `counters`; `waits` is a capsule that names the workers this server waits for."""
        self._counters = counters
        if self._streams is not None:
            self._streams.observe(counters, waits)

    def send(self, peer: Hashable, message: Message) -> None:
        """Send a message to ``"scheduler"``, `ECHO` or a worker's identity."""
        try:
            frames = self._codec.encode(_with_packed_payloads(message))
            if peer == SCHEDULER:
                self._scheduler.send(frames)
            elif type(message) is Batch:
                self._send_batch(peer, message, frames)
            elif peer != ECHO:
                self._workers.send(peer, frames)  # type: ignore[arg-type]
            elif self._echo is not None:
                self._echo.send(frames)
        except NotSentError as error:
            log.debug("not sent, and sent again later: %s", error)

    def _send_batch(self, peer: Hashable, batch: Batch, frames: list[Any]) -> None:
        by_stream = self._streams is not None and self._streams.send(peer, frames)
        if not by_stream:
            self._workers.send(peer, frames)  # type: ignore[arg-type]
        count_values(self._counters, STREAM if by_stream else FRAME, batch.records, True)

    def start_receiving(self, echo: str) -> None:
        """Connect to the scheduler's echo, and receive from workers from now on.

        Not earlier: their requests may keep this process busy, and it would send no heartbeats before.
        """
        if self._echo is None:
            self._echo = _connect_echo(self._context, echo, self._name)
            self._poller.add_channel(self._echo)
            self._poller.add_channel(self._workers)

    def offer_stream(self, peer: Hashable) -> str:
        """Return the offer that a worker needs to open a stream; empty where there are no streams."""
        return "" if self._streams is None else self._streams.offer_stream(peer)

    @property
    def job_hash(self) -> int:
        """Hash of the job's name, as in messages."""
        return self._codec.job

    def has_stream(self, peer: Hashable) -> bool:
        """Return whether a worker has a stream now."""
        return self._streams is not None and self._streams.has_stream(peer)

    def link_of(self, peer: Hashable) -> Link | None:
        """Return the link that handles the messages of a worker's stream in C, if there is one."""
        return None if self._streams is None else self._streams.link_of(peer)

    def set_link(self, peer: Hashable, link: Link) -> None:
        """Set the link that handles the messages of a worker's stream in C as far as it can."""
        if self._streams is not None:
            self._streams.set_link(peer, link)

    def forget_worker(self, peer: Hashable) -> None:
        """Close a worker's stream, and refuse new ones from it."""
        if self._streams is not None:
            self._streams.forget_worker(peer)

    def close_streams(self) -> None:
        """Close the streams of workers, once all messages are passed to the kernel."""
        if self._streams is not None:
            self._streams.close(_LINGER)
            self._streams = None

    def receive(self, timeout: float) -> Iterator[tuple[Hashable, Message]]:
        """Wait for messages, at most `timeout` seconds; yield them."""
        streams = self._streams
        if streams is None and timeout:
            self._counters.enter(WAITING)
        ready = self._poller.wait(timeout if streams is None else 0.0)
        for channel in ready:
            if isinstance(channel, ZmqChannel):
                yield from self._messages_of(channel)
            elif streams is not None:
                streams.handle_item(channel)
        if streams is not None:
            streams.close_late()
            for peer, handled, frames in streams.receive(0.0 if ready else timeout):
                message = _decode_or_refuse(self._codec, frames, repr(peer))
                if isinstance(message, Batch):
                    message = message._replace(records=message.records[handled:])
                    count_values(self._counters, STREAM, message.records, False)
                    yield peer, message

    def _messages_of(self, channel: ZmqChannel) -> Iterator[tuple[Hashable, Message]]:
        for _ in range(_AT_ONCE):
            begin = self._counters.begin()
            found = self._next_message(channel)
            if found is None:
                return
            peer, message = found
            self._count_received(message, FRAME, begin)
            if message is not None:
                yield peer, message

    def _next_message(self, channel: Any) -> tuple[Hashable, Message | None] | None:
        if channel is not self._workers:
            frames = channel.receive()
            name = SCHEDULER if channel is self._scheduler else ECHO
            return None if frames is None else (name, _decode_or_refuse(self._codec, frames, "the scheduler"))
        found = self._workers.receive()
        if found is None:
            return None
        peer, frames = found
        return peer, _decode_or_refuse(self._codec, frames, repr(peer))


class SchedulerSockets(_RoleSockets):
    """The scheduler's sockets: one for all processes, `heartbeats` for their echoes, and its own echo."""

    def __init__(self, roles: Roles, before: Sequence[str] = ("", "")) -> None:
        # A scheduler without a name for its job gets one with its port; until then no process knows it.
        super().__init__(roles, roles.job or secrets.token_hex(16))
        try:
            self._all = RouterChannel(self._context, _bind_address(roles))
            # The addresses of the previous scheduler, if there was one: processes use them without a message.
            pulse, echo = before
            pulse = pulse or _server_address(roles, roles.scheduler + "/pulse/")
            self.heartbeats = HeartbeatMonitor(self._context, pulse)
            echo = echo or _server_address(roles, roles.scheduler + "/echo/")
            self.echo = SchedulerEcho(self._context, echo).address
            self._poller.add_channel(self._all)
            self._poller.add_channel(self.heartbeats.router)
        except BaseException:
            self.close()
            raise
        #: The address of the scheduler; `echo` is the address of its echo.
        self.address = self._all.address
        #: Its port; 0 of a unix socket.
        self.port = 0 if roles.ipc else int(self.address.rpartition(":")[2])
        self._context.job = roles.bound(self.port).job
        self._codec = MessageCodec(self._context.job)

    def send(self, peer: Hashable, message: Message) -> None:
        """Send a message to a process."""
        try:
            self._all.send(peer, self._codec.encode(message))  # type: ignore[arg-type]
        except NotSentError as error:
            log.debug("not sent, and sent again later: %s", error)

    def receive(self, timeout: float) -> Iterator[tuple[Hashable, Message]]:
        """Wait for messages, at most `timeout` seconds; yield them."""
        self._poller.wait(timeout)
        for _ in range(_AT_ONCE):
            found = self._all.receive()
            if found is None:
                return
            message = _decode_or_refuse(self._codec, found[1], repr(found[0]))
            if message is not None:
                yield found[0], message


def _bind_address(roles: Roles) -> str:
    """Return the address at which the scheduler binds: its own, with a numeric host."""
    return roles.scheduler if roles.ipc else addresses.tcp_address(roles.host, roles.port)


def _server_address(roles: Roles, name: str) -> str:
    """Return the address at which a server binds."""
    if roles.ipc:
        return f"ipc://@kvstore/{secrets.token_hex(16)}/{name.rpartition('/')[0][-40:]}"
    return addresses.tcp_address(roles.host, roles.port if roles.role == "server" else 0)


def _connect_echo(context: ZmqContext, address: str, name: str) -> DealerChannel:
    """Connect to the scheduler's echo. While it is absent, another process at its port may refuse."""
    return DealerChannel(context, address, _zmq_identity(f"{name}/echo"), insists=True, watched=True)


def _zmq_identity(name: str) -> bytes:
    """Shorten a name to the 255 bytes of a ZeroMQ identity; names differ at their end."""
    return b"k" + name.encode(errors="replace")[-254:]


def _with_packed_payloads(message: Message) -> Message:
    """Put small payloads of a batch into one frame."""
    if type(message) is not Batch or not message.frames:
        return message
    frames, places = pack_payloads(message.frames)
    records = [
        record._replace(frame=places[record.frame][0], offset=places[record.frame][1])
        if record.place == _FRAME
        else record
        for record in message.records
    ]
    return message._replace(records=records, frames=tuple(frames))


def _decode_or_refuse(codec: MessageCodec, frames: list[Any], peer: str) -> Message | None:
    """Read a message; a message of another job is dropped, with a line in the log."""
    try:
        return codec.decode(frames)
    except ProtocolError as error:
        _strangers.note_refusal("a message", f"{error}; its sender is {peer[:120]}")
        return None


#: One line a minute for all senders together, because strangers choose their own names.
_strangers = RefusalLog()
