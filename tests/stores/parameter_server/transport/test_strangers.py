"""Strangers connect to a router: it serves the job on, and its state stays."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from faults.strangers import KINDS, begin, command, greeting

from kvstore.errors import ConfigError, ProtocolError
from kvstore.settings.keys import JobKeys
from kvstore.stores.parameter_server.protocol.messages import Batch, Record, RecordKind
from kvstore.stores.parameter_server.transport import new_connections
from kvstore.stores.parameter_server.transport.channel import DealerChannel, RouterChannel
from kvstore.stores.parameter_server.transport.context import ZmqContext
from kvstore.stores.parameter_server.transport.frames import MessageCodec
from kvstore.stores.parameter_server.transport.zmq_auth import job_password

Contexts = Callable[..., ZmqContext]
PATIENCE = 30.0

GREETING = greeting(b"PLAIN")
_TYPE = b"\x0bSocket-Type\x00\x00\x00\x06DEALER"
INITIATE = command(b"\x08INITIATE" + _TYPE)


def hello(job: str) -> bytes:
    """Say of which job one is."""
    return command(b"\x05HELLO\x07kvstore\x40" + job_password(job))


def noise(number: int) -> list[bytes]:
    """The data of the `number`-th stranger, in pieces."""
    return [
        [os.urandom(200)],
        [b"GET / HTTP/1.1\r\nHost: parameters\r\n\r\n"],
        [b"\xff" + bytes(8) + b"\x7f\x01\x00" + b"garbage" * 20],  # a version long gone
        [greeting(b"EVIL")],
        [greeting(b"NULL")],
        [GREETING, os.urandom(100)],
        [GREETING, hello(""), INITIATE, b"\x00\x05hello"],  # the right name; a message too early
        [GREETING, hello(""), INITIATE, b"\x02" + (1 << 62).to_bytes(8, "big")],  # and one of 4 EiB
        [GREETING, hello("another"), INITIATE, b"\x00\x05hello"],
        [b"\xff"],
    ][number % 10]


@contextlib.contextmanager
def strangers(port: int, count: int) -> Iterator[list[int]]:
    """Connect so many times, and say something silly each time; counts those that are done."""
    done = [0]
    stop = threading.Event()

    def intrude() -> None:
        kept: list[socket.socket] = []
        for number in range(count):
            if stop.is_set():
                break
            one = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
            with contextlib.suppress(OSError):
                for piece in noise(number):
                    one.sendall(piece)
            kept.append(one)
            if len(kept) > 100:  # some stay connected for a while
                kept.pop(0).close()
            done[0] += 1
        for one in kept:
            one.close()

    thread = threading.Thread(target=intrude)
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join(PATIENCE)


def memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("secured", [False, True])
def test_a_router_serves_among_2000_strangers(
    context: Contexts, job_keys: dict[str, JobKeys], caplog: pytest.LogCaptureFixture, secured: bool
) -> None:
    codec = MessageCodec("a job")
    router = RouterChannel(context(job_keys["scheduler"] if secured else None), "tcp://127.0.0.1:0")
    dealer = DealerChannel(context(job_keys["worker"] if secured else None), router.address, b"worker")
    question = codec.encode(Batch(0, 0, 1, 1, [Record(RecordKind.PULL, 1, 1)]))
    served = 0
    before = memory()
    with strangers(int(router.address.rpartition(":")[2]), 2000) as done:
        while done[0] < 2000:
            dealer.send(question)
            answered = False
            while not answered:
                found = router.receive(PATIENCE)
                assert found is not None, f"nothing came after {served} messages and {done[0]} strangers"
                try:
                    codec.decode(found[1])
                except ProtocolError:
                    assert not secured, "only where there are no keys do messages of strangers come so far"
                    continue
                assert found[0] == b"worker"
                router.send(b"worker", question)
                answered = True
            assert dealer.receive(PATIENCE) is not None
            served += 1
    assert served >= 20
    assert memory() - before < 100 << 20
    lines = [one.getMessage() for one in caplog.records if one.name == "kvstore.wire"]
    assert 1 <= len(lines) <= 2, lines


def connected(router: RouterChannel) -> socket.socket:
    host, _, port = router.address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), PATIENCE)


@pytest.mark.parametrize("job", ["a job", "another job"])
def test_a_stranger_to_the_job_gets_no_message_in(
    context: Contexts, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    """And the messages of other processes reach the codec, and no further."""
    monkeypatch.setattr("kvstore.stores.parameter_server.transport.options._HANDSHAKE", 1000)
    router = RouterChannel(context(job="a job"), "tcp://127.0.0.1:0")
    with connected(router) as one:
        one.sendall(GREETING + hello(job))
        heard = b""
        while b"WELCOME" not in heard and (more := one.recv(1000)):
            heard += more
        assert (b"WELCOME" in heard) == (job == "a job")
        with contextlib.suppress(ConnectionError):
            one.sendall(INITIATE + b"\x00\x05hello")
        found = router.receive(PATIENCE if job == "a job" else 0.1)
        if job != "a job":
            assert found is None
            return
        assert found is not None
        with pytest.raises(ProtocolError):
            MessageCodec("a job").decode(found[1])


def taken(one: socket.socket) -> int:
    """Bytes of ours that the other side has taken."""
    return int(struct.unpack_from("Q", one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128), 120)[0])


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_little_is_taken_of_a_stranger(context: Contexts, kind: str, host: str) -> None:
    """Data after a handshake is not read, or the connection is closed at once."""
    try:
        router = RouterChannel(context(), f"tcp://{host}:0")
    except ConfigError:
        pytest.skip("no IPv6")
    first, body = KINDS[kind]
    with connected(router) as one:
        one.setblocking(False)
        quiet, last, closed = 0, -1, False
        with contextlib.suppress(ConnectionError):
            begin(one, first)
            while quiet < 10 and not closed:
                time.sleep(0.05)
                with contextlib.suppress(BlockingIOError):
                    for _ in range(300 if len(body) < 100 else 1):
                        one.send(body)
                with contextlib.suppress(BlockingIOError):
                    closed = one.recv(1000) == b""
                quiet, last = (quiet + 1 if taken(one) == last else 0), taken(one)
        # Small pieces may be more until we have heard of the connection.
        assert last <= 2 * new_connections.MOST, last
    assert router.receive(0.0) is None


def test_a_first_message_may_be_large(context: Contexts, job_keys: dict[str, JobKeys]) -> None:
    """Events that the kernel has left out are read again."""
    for secured in (False, True):
        router = RouterChannel(context(job_keys["scheduler"] if secured else None), "tcp://127.0.0.1:0")
        payloads = [os.urandom(new_connections.MOST * 10) for _ in range(10)]
        for number, payload in enumerate(payloads):
            dealer = DealerChannel(
                context(job_keys["worker"] if secured else None), router.address, b"w%d" % number
            )
            dealer.send([payload])
        found = dict(router.receive(PATIENCE) or pytest.fail("lost") for _ in payloads)
        assert {name: frames[0].bytes for name, frames in found.items()} == {
            b"w%d" % number: payload for number, payload in enumerate(payloads)
        }


def test_a_connection_that_ends_at_once_is_read_to_its_end(context: Contexts) -> None:
    router = RouterChannel(context(), "tcp://127.0.0.1:0")
    payload = os.urandom(new_connections.MOST * 10)
    for number in range(20):
        dealer = DealerChannel(context(), router.address, b"w%d" % number)
        dealer.send([payload])
        dealer.close(linger=PATIENCE)
        found = router.receive(PATIENCE)
        assert found is not None
        assert found[1][0].bytes == payload


@pytest.mark.parametrize("secured", [False, True])
@pytest.mark.parametrize("revision", [0, 1, None])
def test_old_protocols_are_refused(
    context: Contexts, job_keys: dict[str, JobKeys], secured: bool, revision: int | None
) -> None:
    """ZMTP 1.0 (with a signature, or none at all) and 2.0: a socket that is closed during it would abort."""
    router = RouterChannel(context(job_keys["scheduler"] if secured else None), "tcp://127.0.0.1:0")
    begin = b"\x08" + bytes(8) if revision is None else GREETING[:10] + bytes([revision, 5])
    with socket.create_connection(("127.0.0.1", int(router.address.rpartition(":")[2])), PATIENCE) as old:
        old.sendall(begin + b"\0\x03old\0\5hello")
        with contextlib.suppress(ConnectionResetError):
            while old.recv(1000):  # its greeting, and then the end
                pass
    assert router.receive(0.1) is None


def test_connections_that_say_nothing_are_closed(context: Contexts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.stores.parameter_server.transport.options._HANDSHAKE", 300)
    router = RouterChannel(context(), "tcp://127.0.0.1:0")
    port = int(router.address.rpartition(":")[2])
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
    for one in silent:
        one.settimeout(PATIENCE / 3)  # ZeroMQ's own limit is 30 s
        while one.recv(1000):  # its greeting, and then the end
            pass
        one.close()
    dealer = DealerChannel(context(), router.address, b"worker")
    dealer.send([b"hello"])
    assert router.receive(PATIENCE)


def test_a_slow_connection_stops_no_other(context: Contexts) -> None:
    router = RouterChannel(context(), "tcp://127.0.0.1:0")
    port = int(router.address.rpartition(":")[2])
    slow = socket.create_connection(("127.0.0.1", port))
    dealer = DealerChannel(context(), router.address, b"worker")
    for byte in GREETING[:40]:
        slow.sendall(bytes([byte]))
        dealer.send([b"hello"])
        assert router.receive(PATIENCE)
        time.sleep(0.005)
    slow.close()


def test_a_unix_socket_admits_its_user_only(context: Contexts) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    name = f"ipc://@kvstore/test/{os.getpid()}/mine"
    router = RouterChannel(context(), name)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        with zmq.Context() as other, other.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 300)
            dealer.connect(name)
            dealer.send(b"from another user")
        os._exit(0)
    assert router.receive(1.0) is None
    os.waitpid(child, 0)
    dealer = DealerChannel(context(), name, b"worker")
    dealer.send([b"from me"])
    found = router.receive(PATIENCE)
    assert found is not None
    assert found[1][0].bytes == b"from me"
