"""Streams of workers and servers: which processes may open one, and the effects of a broken one."""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pace
import pytest

from kvstore.stores.parameter_server.native._native import (
    Effects,
    Link,
    Members,
    Session,
    SliceState,
    SliceTable,
    Sums,
)
from kvstore.stores.parameter_server.transport import server_streams, stream_client, stream_listener, streams
from kvstore.stores.parameter_server.transport.channel import ChannelPoller
from kvstore.stores.parameter_server.transport.native._streams import Sender
from kvstore.stores.parameter_server.transport.refusals import RefusalLog
from kvstore.stores.parameter_server.transport.server_streams import ServerStreams
from kvstore.stores.parameter_server.transport.stream_client import StreamClient
from kvstore.stores.parameter_server.transport.streams import open_stream

PEER = b"worker 0"


class End:
    """One process's end: a poller, and the received messages."""

    def __init__(self) -> None:
        self.poller, self.sender = ChannelPoller(), Sender()
        self.streams: Any = None
        self.came: list[tuple[Any, bytes]] = []

    def turn(self, timeout: float = 0.0) -> None:
        if isinstance(self.streams, ServerStreams):
            for item in self.poller.wait(0.0):
                self.streams.handle_item(item)
            self.streams.close_late()
            self.came += [(peer, bytes(memoryview(f[0]))) for peer, _, f in self.streams.receive(timeout)]
            return
        for item in self.poller.wait(timeout):
            self.came += [("server", bytes(memoryview(frames[0]))) for frames in item.receive()]


@pytest.fixture(params=["tcp", "ipc", "tcp with keys", "ipc with keys"])
def server(request: pytest.FixtureRequest) -> Iterator[End]:
    end = End()
    ipc, keys = request.param.startswith("ipc"), object() if "keys" in request.param else None
    roles: Any = SimpleNamespace(ipc=ipc, host="127.0.0.1", keys=keys)
    end.streams = ServerStreams(roles, end.poller)
    yield end
    end.streams.close(0.0)
    end.sender.close()
    end.poller.close()


@pytest.fixture
def worker() -> Iterator[End]:
    end = End()
    yield end
    if end.streams is not None:
        end.streams.close()
    end.sender.close()
    end.poller.close()


def opened(worker: End, offer: str) -> StreamClient:
    worker.streams = client(worker, offer)
    worker.streams.advance_open()
    return worker.streams


def client(worker: End, offer: str) -> StreamClient:
    return StreamClient(offer, lambda: worker.sender, worker.poller, "-" in offer.rpartition("/")[2])


def until(true: Callable[[], object], *ends: End) -> None:
    end = pace.deadline(20)
    while not true():
        assert time.monotonic() < end
        for one in ends:
            one.turn(0.005)


def test_messages_go_both_ways(server: End, worker: End) -> None:
    stream = opened(worker, server.streams.offer_stream(PEER))
    until(lambda: stream.send([b"up"]), server)
    until(lambda: server.came, server)
    assert server.came == [(PEER, b"up")]
    assert server.streams.send(PEER, [b"down"]) and not server.streams.send(b"other", [b""])
    until(lambda: worker.came, worker)
    assert worker.came == [("server", b"down")]


def test_a_link_knows_that_its_worker_is_on_this_host(server: End, worker: End) -> None:
    """Workers of this host need cores: `Sums` leaves them some. They know that they are near, too."""
    stream = opened(worker, server.streams.offer_stream(PEER))
    until(lambda: stream.send([b"up"]), server)
    until(lambda: server.came, server)
    assert stream.stream is not None and stream.stream.is_near
    sums, session = Sums(), Session(0, 0, 9, 0)
    first, second = (link(session, sums) for _ in range(2))
    for one in (first, second):  # the second one takes the first one's place
        server.streams.set_link(PEER, one)
        assert (one.near, sums.near) == (True, 1)
    assert not first.near
    server.streams.forget_worker(PEER)
    assert (second.near, sums.near) == (False, 0)


def link(session: Session, sums: Sums) -> Link:
    members, slices = Members(), SliceTable[SliceState]()
    members.set([session.rank], True)
    return Link(Effects(), members, session, slices, sums, 0, 3, 77)


def test_an_offer_is_the_same_until_it_is_withdrawn(server: End, worker: End) -> None:
    offer = server.streams.offer_stream(PEER)
    assert server.streams.offer_stream(PEER) == offer != server.streams.offer_stream(b"other")
    stream = opened(worker, offer)
    until(lambda: stream.send([b"up"]), server)
    until(lambda: server.came, server)
    server.streams.forget_worker(PEER)
    assert not server.streams.send(PEER, [b"down"])
    assert server.streams.offer_stream(PEER) != offer


def test_a_stream_that_breaks_is_opened_again(
    server: End, worker: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_client, "_MISTRUST", 0.1)
    stream = opened(worker, server.streams.offer_stream(PEER))
    until(lambda: stream.send([b"one"]), server)
    until(lambda: server.came, server)
    server.streams._close_stream(PEER)
    until(lambda: worker.turn(0.005) or stream._stream is None, server)
    until(lambda: stream.send([b"two"]), server)
    until(lambda: len(server.came) == 2, server)
    assert server.came[1] == (PEER, b"two")
    assert server.streams.send(PEER, [b"down"])


def test_a_server_without_descriptors_refuses_streams_and_takes_them_later(
    server: End, worker: End, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody may wait at a door that stays shut: data goes over ZeroMQ meanwhile.
    monkeypatch.setattr(stream_listener, "_refusals", RefusalLog())
    stream = opened(worker, server.streams.offer_stream(PEER))

    def refused() -> bool:
        with no_descriptors():
            server.turn(0.005)
            worker.turn(0.005)
        return stream._connecting is None and stream._stream is None

    until(refused)
    assert "could not be accepted: Too many open files. Its worker uses ZeroMQ" in caplog.text
    until(lambda: stream.send([b"up"]), server, worker)
    until(lambda: server.came, server)
    assert server.came[-1] == (PEER, b"up")


class Full:
    """A set of streams that has room for no other one, the first time."""

    def __init__(self, there: Any) -> None:
        self._there, self.refused = there, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._there, name)

    def add(self, stream: Any) -> None:
        self.refused += 1
        if self.refused == 1:
            raise OSError(errno.ENOSPC, "on demand")
        self._there.add(stream)


@pytest.mark.parametrize("memory", [True, False])
def test_a_stream_that_cannot_be_taken_in_is_taken_later(
    server: End, worker: End, monkeypatch: pytest.MonkeyPatch, memory: bool
) -> None:
    monkeypatch.setattr(stream_client, "_MISTRUST", 0.1)
    monkeypatch.setattr(server.streams, "_all", full := Full(server.streams._all))
    tries = []

    def opening(*arguments: Any) -> Any:
        tries.append(arguments)
        if memory and len(tries) == 1:
            raise MemoryError
        return open_stream(*arguments)

    monkeypatch.setattr(server_streams, "open_stream", opening)
    stream = opened(worker, server.streams.offer_stream(PEER))
    until(lambda: worker.turn(0.005) or (stream.send([b"up"]) and server.came), server)
    assert server.came[-1] == (PEER, b"up")
    assert full.refused >= 2


def test_a_listener_that_can_refuse_no_connection_is_left_alone_for_a_while(server: End, worker: End) -> None:
    stream = opened(worker, server.streams.offer_stream(PEER))
    listener = server.streams._listener
    os.close(listener._spare)
    listener._spare = -1
    select.select([listener], [], [], 20)
    with no_descriptors():
        server.turn()
        assert server.poller.wait(0.0) == []
    until(lambda: stream.send([b"up"]), server, worker)
    until(lambda: server.came, server)
    assert server.came[-1] == (PEER, b"up") and not listener.is_stuck


@contextmanager
def no_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_new_stream_takes_the_place_of_the_old_one(server: End, worker: End) -> None:
    offer = server.streams.offer_stream(PEER)
    first = client(worker, offer)
    until(lambda: first.send([b"one"]), server)
    until(lambda: server.came, server)
    second = opened(worker, offer)
    until(lambda: second.send([b"two"]), server)
    until(lambda: len(server.came) == 2, server)
    assert server.streams.send(PEER, [b"down"])
    until(lambda: worker.came, worker)
    assert len(server.streams._streams) == 1
    first.close()


def test_without_a_server_nothing_is_sent_and_nothing_waits(worker: End) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    stream = opened(worker, f"tcp://127.0.0.1:{port}/{'00' * 16}")
    for _ in range(20):
        assert not stream.send([b"x"])
        time.sleep(0.01)
    assert stream.receive() == []


@pytest.mark.parametrize(
    "text", [b"KVSTREAM" + bytes(16), b"KVCIPHER" + bytes(49), b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b""]
)
def test_strangers_are_closed(server: End, text: bytes) -> None:
    server.streams.offer_stream(PEER)
    with connected(server) as stranger:
        stranger.sendall(text)
        if not text:
            stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(0.01)
        until(lambda: is_closed(stranger), server)
    assert not server.came and not server.streams._listener._strangers


def hello(server: End) -> bytes:
    """Send the first data of a worker."""
    encrypted = server.streams._listener._encrypted
    offer = streams.StreamOffer.parse_text(server.streams.offer_stream(PEER), encrypted)
    assert offer is not None
    if not encrypted:
        return streams.MAGIC + offer.token
    text = streams.ENCRYPTED_MAGIC + offer.token + bytes(offer.ciphers[:1])
    return text.ljust(streams.ENCRYPTED_HELLO_BYTES, b"\0")


@pytest.mark.parametrize("answered", [False, True])
def test_a_worker_that_leaves_while_it_opens_a_stream_is_no_stranger(
    server: End, answered: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_listener, "_refusals", RefusalLog())
    listener = server.streams._listener
    says = hello(server)
    with connected(server) as leaver:
        if not answered:
            server.streams.forget_worker(PEER)
        leaver.sendall(says)
        if answered:
            until(lambda: listener._unproven or server.streams.has_stream(PEER), server)
        leaver.shutdown(socket.SHUT_WR)
        leaver.settimeout(0.01)
        until(lambda: is_closed(leaver), server)
    assert caplog.text == ""


def test_a_worker_that_is_gone_when_its_hello_is_read_is_no_stranger(
    server: End, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a unix socket the answer then raises; on TCP it is lost."""
    monkeypatch.setattr(stream_listener, "_refusals", RefusalLog())
    listener = server.streams._listener
    with connected(server) as leaver:
        leaver.sendall(hello(server))
    for _ in range(5):  # it is accepted, and read
        server.turn(0.005)
    until(lambda: not listener._strangers and not listener._unproven, server)
    assert not server.came and caplog.text == ""


def test_a_silent_connection_is_closed_in_time(server: End, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_listener, "HANDSHAKE", 0.05)
    with connected(server) as slow:
        slow.send(b"KV")
        until(lambda: server.streams._listener._strangers, server)
        slow.settimeout(0.01)
        until(lambda: is_closed(slow), server)


def test_only_so_many_strangers_are_let_in(server: End, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_listener, "_STRANGERS", 3)
    many = [connected(server) for _ in range(6)]
    until(lambda: len(server.streams._listener._strangers) == 3, server)
    for one in many:
        one.settimeout(0.01)
    until(lambda: sum(map(is_closed, many)) == 3, server)
    for one in many:
        one.close()


@pytest.mark.parametrize(
    ("family", "address", "own"),
    [
        (socket.AF_INET, "127.0.0.1", True),
        (socket.AF_INET, "127.0.0.7", True),
        (socket.AF_INET, "192.0.2.1", False),
        (socket.AF_INET, "", False),
        (socket.AF_INET6, "2001:db8::1", False),
        (socket.AF_INET, "2001:db8::1", False),
    ],
)
def test_own_addresses(family: int, address: str, own: bool) -> None:
    assert streams.is_own_address(family, address) is own


def test_nothing_is_paced_within_the_host() -> None:
    roles: Any = SimpleNamespace(ipc=False, host="127.0.0.1", keys=None)
    listener = stream_listener.StreamListener(roles)
    with socket.socket() as usual, socket.socket() as worker, socket.socket() as far:
        streams.tune_connection(worker, "127.0.0.1")
        streams.tune_connection(far, "192.0.2.1")
        with suppress(BlockingIOError):
            worker.connect(("127.0.0.1", int(listener.address.rpartition(":")[2])))
        select.select([listener], [], [], 20)
        [accepted] = listener.accept_connections()
        controls = [control(one) for one in (worker, accepted, far)]
        assert controls == [b"reno", b"reno", control(usual)]
        accepted.close()
    listener.close()


def control(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def connected(server: End) -> socket.socket:
    address = server.streams._listener.address
    if address.startswith("ipc://@"):
        made = socket.socket(socket.AF_UNIX)
        made.connect("\0" + address.removeprefix("ipc://@"))
        return made
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True
