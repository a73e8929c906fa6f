"""Channels: a sent message arrives, an impossible send raises, and each wait ends at its deadline."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pace
import pytest
import zmq

from kvstore.errors import ClosedError, ConfigError, KVStoreError
from kvstore.settings.keys import JobKeys
from kvstore.stores.parameter_server.transport.channel import (
    ChannelPoller,
    DealerChannel,
    NotSentError,
    RouterChannel,
    ZmqChannel,
)
from kvstore.stores.parameter_server.transport.context import ZmqContext
from kvstore.stores.parameter_server.transport.frames import MessageLimits
from kvstore.stores.parameter_server.transport.options import BORROWED, tune_malloc

Contexts = Callable[..., ZmqContext]
PATIENCE = 20.0


def bytes_of(frames: list[zmq.Frame] | None) -> list[bytes]:
    assert frames is not None, "nothing came"
    return [frame.bytes for frame in frames]


def pair(context: Contexts, address: str, **options: object) -> tuple[RouterChannel, DealerChannel]:
    made = context(**options)
    router = RouterChannel(made, address)
    return router, DealerChannel(made, router.address, b"worker 0")


def until(true: Callable[[], Any]) -> Any:
    end = pace.deadline(PATIENCE)
    while not (found := true()):
        assert time.monotonic() < end, "the expected state was not reached"
        time.sleep(0.01)
    return found


def test_messages_go_both_ways(context: Contexts, address: str) -> None:
    router, dealer = pair(context, address)
    dealer.send([b"to", b"", b"you"])
    found = router.receive(PATIENCE)
    assert found is not None
    assert found[0] == b"worker 0"
    assert bytes_of(found[1]) == [b"to", b"", b"you"]
    router.send(b"worker 0", [b"back"])
    assert bytes_of(dealer.receive(PATIENCE)) == [b"back"]
    assert dealer.receive() is None
    assert router.receive(0.01) is None


def test_the_address_taken_has_its_port(context: Contexts) -> None:
    router = RouterChannel(context(), "tcp://127.0.0.1:0")
    assert router.address.startswith("tcp://127.0.0.1:")
    assert int(router.address.rpartition(":")[2]) > 0


def test_ipv6(context: Contexts) -> None:
    try:
        router, dealer = pair(context, "tcp://[::1]:0")
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    dealer.send([b"six"])
    assert router.receive(PATIENCE)


def test_a_unix_socket_leaves_no_file(context: Contexts) -> None:
    name = f"kvstore/test/{os.getpid()}/file"
    before = set(os.listdir("/tmp"))
    router = RouterChannel(context(), f"ipc://@{name}")
    assert router.address == f"ipc://@{name}"
    with open("/proc/net/unix") as table:
        assert any(line.endswith(f"@{name}\n") for line in table)
    assert not {one for one in set(os.listdir("/tmp")) - before if "kvstore" in one}


# ---------------------------------------------------------------------------------------------- borrowing


def test_large_buffers_are_lent_and_small_ones_copied(context: Contexts, address: str) -> None:
    router, dealer = pair(context, address)
    dealer.send([b"hello"])
    assert router.receive(PATIENCE)
    small, large = bytearray(BORROWED - 1), np.arange(1 << 20, dtype=np.uint8)
    dealer.send([b"head", small, memoryview(large)])
    small[:] = b"1" * len(small)
    found = router.receive(PATIENCE)
    assert found is not None
    assert bytes_of(found[1])[1] == bytes(BORROWED - 1)
    np.testing.assert_array_equal(np.frombuffer(found[1][2].buffer, np.uint8), large)


# ------------------------------------------------------------------------------------------- no peer


def test_a_router_reports_an_absent_peer(context: Contexts, address: str) -> None:
    router, dealer = pair(context, address)
    with pytest.raises(NotSentError, match=r"b'worker 9'.*not connected"):
        router.send(b"worker 9", [b"x"])
    dealer.send([b"hello"])
    assert router.receive(PATIENCE)
    dealer.close()
    until(lambda: raises_not_sent(router))


def raises_not_sent(router: RouterChannel) -> bool:
    try:
        router.send(b"worker 0", [b"x"])
    except NotSentError:
        return True
    return False


def test_a_full_queue_says_so(context: Contexts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.stores.parameter_server.transport.options._WAITING", 5)
    dealer = DealerChannel(context(), f"tcp://127.0.0.1:{free_port()}", b"nobody listens")
    for _ in range(5):
        dealer.send([b"x"])
    with pytest.raises(NotSentError, match="queue is full"):
        dealer.send([b"x"])


def test_a_dealer_comes_before_its_router(context: Contexts) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    dealer = DealerChannel(context(), address, b"early")
    dealer.send([b"hello"])
    time.sleep(0.1)
    router = RouterChannel(context(), address)
    found = router.receive(PATIENCE)
    assert found is not None
    assert found[0] == b"early"


def test_a_dealer_finds_a_router_that_has_started_again(context: Contexts) -> None:
    first = context()
    router, dealer = RouterChannel(first, "tcp://127.0.0.1:0"), None
    dealer = DealerChannel(context(), router.address, b"faithful")
    dealer.send([b"one"])
    assert router.receive(PATIENCE)
    first.close()
    router = RouterChannel(context(), router.address)
    end = pace.deadline(PATIENCE)
    while (found := router.receive(0.1)) is None:  # messages in flight when it ended are lost
        assert time.monotonic() < end
        dealer.send([b"two"])
    assert found[0] == b"faithful"


def listening(address: str) -> socket.socket:
    """Listen in place of a router."""
    listener, end = socket.socket(), pace.deadline(PATIENCE)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    while True:
        try:
            listener.bind(("127.0.0.1", int(address.rpartition(":")[2])))
            break
        except OSError:  # the earlier peer has not ended yet
            assert time.monotonic() < end
            time.sleep(0.01)
    listener.listen()
    listener.settimeout(pace.deadline(PATIENCE) - time.monotonic())
    return listener


def mirror(address: str) -> None:
    """Accept one connection in place of a router, and echo its data: so it is connected with itself."""
    with contextlib.closing(listening(address)) as listener:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(ConnectionError):
            while data := connection.recv(1000):
                connection.sendall(data)


def meets_deaths(dealer: DealerChannel) -> None:
    """The peer dies repeatedly, before its first message."""
    for _ in range(4):
        with contextlib.closing(listening(dealer.address)) as listener:
            listener.accept()[0].close()
        assert dealer.receive(0.4) is None  # it has found no peer in this time


def meets_itself(dealer: DealerChannel) -> None:
    mirror(dealer.address)
    assert dealer.receive(0.3) is None


@pytest.mark.parametrize("meets", [meets_deaths, meets_itself])
@pytest.mark.parametrize("secure", [False, True])
def test_a_dealer_that_is_there_before_its_router_refuses_none(
    context: Contexts, job_keys: dict[str, JobKeys], secure: bool, meets: Callable[[DealerChannel], None]
) -> None:
    keys = {name: job_keys[name] if secure else None for name in ("worker", "scheduler")}
    address = f"tcp://127.0.0.1:{free_port()}"
    dealer = DealerChannel(context(keys["worker"]), address, b"patient")
    meets(dealer)
    router = RouterChannel(context(keys["scheduler"]), address)
    dealer.send([b"hello"])
    found = until(lambda: dealer.receive(0.0) or router.receive(0.1))
    assert found[0] == b"patient"


def test_a_dealer_comes_back_though_it_has_met_something_else(context: Contexts) -> None:
    first = context()
    router = RouterChannel(first, "tcp://127.0.0.1:0")
    dealer = DealerChannel(context(), router.address, b"faithful")
    dealer.send([b"one"])
    assert router.receive(PATIENCE)
    assert dealer.receive(0.0) is None and dealer.handshake_monitor is None
    first.close()
    mirror(router.address)
    router, end = RouterChannel(context(), router.address), pace.deadline(PATIENCE)
    while (found := router.receive(0.1)) is None:
        assert time.monotonic() < end
        with contextlib.suppress(NotSentError):
            dealer.send([b"two"])
    assert found[0] == b"faithful"


def test_free_ports_are_none_that_the_system_gives_to_connections(context: Contexts) -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first < 20_000:
        pytest.skip("this system gives almost all of its ports to connections")
    ports = [int(RouterChannel(context(), "tcp://127.0.0.1:0").address.rpartition(":")[2]) for _ in range(5)]
    assert max(ports) < first and len(set(ports)) == 5


def test_messages_over_the_limit_never_reach_the_receiver(context: Contexts, address: str) -> None:
    router = RouterChannel(context(limits=MessageLimits(frame=10_000, control=10_000, records=10)), address)
    dealer = DealerChannel(context(), router.address, b"too large")
    dealer.send([b"hello"])
    assert router.receive(PATIENCE)
    dealer.send([b"head", bytes(100_000)])
    dealer.send([b"again"])  # lost with it, or sent over the new connection
    until(lambda: try_once(dealer, router))


def try_once(dealer: DealerChannel, router: RouterChannel) -> bool:
    dealer.send([b"small"])
    found = router.receive(0.2)
    assert found is None or len(found[1]) == 1, "the large message came"
    return found is not None


# -------------------------------------------------------------------------------------------- connections


class Cut:
    """A relay between a dealer and its router, which can be broken on one side only."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._target = port
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self._relaying: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            self.pairs.append((client, server))
            for one, other in ((client, server), (server, client)):
                thread = threading.Thread(target=self._relay, args=(one, other), daemon=True)
                self._relaying.append(thread)
                thread.start()

    @staticmethod
    def _relay(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            pass

    def break_client_side(self) -> None:
        """The client sees a reset; the server sees nothing at all."""
        client, _ = self.pairs[-1]
        client.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close every socket, also of a connection that is being made: threads end before their sockets."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        ends = [one for pair in self.pairs for one in pair]
        for one in ends:
            with contextlib.suppress(OSError):  # its other side is gone already
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._relaying:
            thread.join()
        for one in ends:
            one.close()


def test_a_dealer_whose_old_connection_looks_alive_is_heard_on_its_new_one(context: Contexts) -> None:
    router = RouterChannel(context(), "tcp://127.0.0.1:0")
    relay = Cut(int(router.address.rpartition(":")[2]))
    try:
        dealer = DealerChannel(context(), f"tcp://127.0.0.1:{relay.port}", b"worker 0")
        for turn in range(5):
            end = pace.deadline(PATIENCE)
            while (found := router.receive(0.05)) is None:
                assert time.monotonic() < end, f"connection {turn + 1} is not heard"
                dealer.send([b"hello"])
            assert found[0] == b"worker 0"
            assert bytes_of(found[1]) == [b"hello"]
            while router.receive(0.05):
                pass
            router.send(b"worker 0", [b"%d" % turn])
            assert bytes_of(dealer.receive(PATIENCE)) == [b"%d" % turn]
            relay.break_client_side()
    finally:
        relay.close()


def test_many_messages_keep_their_order(context: Contexts, address: str) -> None:
    router, dealer = pair(context, address)
    for number in range(2000):
        dealer.send([number.to_bytes(4, "little"), bytes(number % 100)])
    for number in range(2000):
        found = router.receive(PATIENCE)
        assert found is not None
        assert bytes_of(found[1]) == [number.to_bytes(4, "little"), bytes(number % 100)]


# ------------------------------------------------------------------------------------------------ addresses


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def test_a_taken_port_is_named(context: Contexts) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} is taken.*KVSTORE_PORT"):
            RouterChannel(context(), f"tcp://127.0.0.1:{port}")


def test_a_taken_unix_socket_is_named(context: Contexts) -> None:
    name = f"ipc://@kvstore/test/{os.getpid()}/taken"
    kept = RouterChannel(context(), name)
    with pytest.raises(ConfigError, match="is taken"):
        RouterChannel(context(), name)
    assert kept.address == name


def test_an_address_of_another_machine_is_told_with_those_of_this_one(context: Contexts) -> None:
    with pytest.raises(
        ConfigError, match=r"192\.0\.2\.77:0 is not an address of this machine \(.*127\.0\.0\.1"
    ):
        RouterChannel(context(), "tcp://192.0.2.77:0")


@pytest.mark.parametrize(
    "wrong", ["tcp://nowhere", "pigeon://x", "tcp://127.0.0.1:99999", "", "tcp://127.0.0.1"]
)
def test_what_is_no_address_is_refused_on_both_sides(context: Contexts, wrong: str) -> None:
    with pytest.raises(ConfigError):
        RouterChannel(context(), wrong)
    with pytest.raises(ConfigError):
        DealerChannel(context(), wrong, b"lost")


def test_a_port_is_free_again_once_its_router_is_closed(context: Contexts) -> None:
    made = context()
    router = RouterChannel(made, "tcp://127.0.0.1:0")
    router.close()

    def taken() -> bool:
        try:
            RouterChannel(made, router.address)
        except ConfigError:
            return False
        return True

    until(taken)


# -------------------------------------------------------------------------------------------------- waiting


def test_a_poller_finds_those_with_messages(context: Contexts, address: str) -> None:
    router, dealer = pair(context, address)
    other = DealerChannel(context(), router.address, b"worker 1")
    poller = ChannelPoller()
    channels: list[ZmqChannel] = [router, dealer, other]
    for channel in channels:
        poller.add_channel(channel)
    assert poller.wait(0.02) == []
    dealer.send([b"x"])
    other.send([b"x"])
    assert poller.wait(PATIENCE) == [router]
    for _ in range(2):
        found = router.receive(PATIENCE)
        assert found is not None
        router.send(found[0], [b"back"])
    ready = set()
    while len(ready) < 2:
        for one in poller.wait(PATIENCE):
            ready.add(one)
            assert isinstance(one, DealerChannel)
            one.receive()
    assert ready == {dealer, other}
    poller.remove_channel(dealer)
    poller.remove_channel(dealer)
    router.send(b"worker 0", [b"unheard"])
    assert poller.wait(0.1) == []
    poller.close()
    poller.close()


def test_a_poller_is_woken_by_another_thread(context: Contexts) -> None:
    poller = ChannelPoller()
    poller.add_channel(RouterChannel(context(), "tcp://127.0.0.1:0"))
    waker = threading.Timer(0.1, poller.wake)
    waker.start()
    start = time.monotonic()
    assert poller.wait(PATIENCE) == []
    assert time.monotonic() - start < PATIENCE / 2
    assert poller.wait(0.01) == [], "one wake ends one wait"
    waker.join()
    poller.close()


# ------------------------------------------------------------------------------------------------------ end


def test_a_closed_context_says_so(context: Contexts) -> None:
    made = context()
    router = RouterChannel(made, "tcp://127.0.0.1:0")
    made.close()
    made.close()
    for attempt in (
        router.receive,
        lambda: router.send(b"x", [b"x"]),
        lambda: RouterChannel(made, "tcp://127.0.0.1:0"),
    ):
        with pytest.raises(ClosedError):
            attempt()


def test_unsent_messages_hold_up_the_end_for_as_long_as_told(context: Contexts) -> None:
    made = context()
    DealerChannel(made, f"tcp://127.0.0.1:{free_port()}", b"nobody listens").send([b"x"])
    start = time.monotonic()
    made.close(0.3)
    assert 0.2 < time.monotonic() - start < PATIENCE


def test_last_words_arrive(context: Contexts) -> None:
    router = RouterChannel(context(), "tcp://127.0.0.1:0")
    made = context()
    DealerChannel(made, router.address, b"last").send([b"words"])
    made.close(PATIENCE)
    assert router.receive(PATIENCE)


def test_nothing_is_left_of_a_context(context: Contexts, address: str) -> None:
    def once() -> None:
        made = context()
        router, dealer = RouterChannel(made, address), None
        dealer = DealerChannel(made, router.address, b"worker 0")
        poller = ChannelPoller()
        poller.add_channel(dealer)
        dealer.send([b"x", bytes(1 << 20)])
        assert router.receive(PATIENCE)
        made.close()
        poller.close()

    once()  # a resource that a process makes once: pyzmq's thread for lent buffers
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        once()
    until(lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) == before)


def test_dealers_that_come_and_go_leave_nothing(context: Contexts) -> None:
    made = context()
    router = RouterChannel(made, "tcp://127.0.0.1:0")

    def once(number: int) -> None:
        dealer = DealerChannel(made, router.address, b"worker %d" % number)
        dealer.send([b"x"])
        assert router.receive(PATIENCE)
        dealer.close()

    once(0)
    until(lambda: raises_not_sent(router))
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1, 20):
        once(number)
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_malloc_can_be_tuned() -> None:
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("AddressSanitizer's malloc has no knobs")
    assert tune_malloc() in (True, False)  # musl has no knobs
    assert tune_malloc() == os.path.exists("/lib64/ld-linux-x86-64.so.2") or os.uname().machine != "x86_64"


def test_threads_may_hand_a_channel_on(context: Contexts, address: str) -> None:
    router, dealer = pair(context, address)
    lock = threading.Lock()

    def speak() -> None:
        for _ in range(100):
            with lock:
                dealer.send([b"x"])

    threads = [threading.Thread(target=speak) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(400):
        assert router.receive(PATIENCE)
    for thread in threads:
        thread.join()


def test_the_error_for_what_is_not_sent_is_one_of_ours() -> None:
    assert issubclass(NotSentError, KVStoreError)
