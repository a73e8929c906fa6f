"""Links between hosts of one machine: data arrives whole, also after losses, and memory is not shared."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bench import ROOT
from bench.cases.hosts import Link
from bench.peers.dist.hosts import ADDRESSES, LINK, Hosts
from bench.peers.dist.link_probe import probe
from bench.runner import compiled

pytestmark = [
    pytest.mark.bench,
    pytest.mark.skipif(compiled.compiler() is None, reason="the relay is C"),
]

#: Sends so many numbered words, or checks them; says when it listens.
_SEND = """
import socket, sys, numpy as np
with socket.create_connection((sys.argv[1], 5000), 60) as line:
    line.sendall(np.arange(int(sys.argv[2]), dtype=np.int32))
    line.shutdown(socket.SHUT_WR)
    assert line.recv(4) == b"done"
"""
_CHECK = """
import socket, sys, numpy as np
with socket.create_server(("0.0.0.0", 5000)) as listener:
    print("ready", flush=True)
    line, _ = listener.accept()
    found = b"".join(iter(lambda: line.recv(1 << 20), b""))
    assert (np.frombuffer(found, np.int32) == np.arange(int(sys.argv[1]))).all()
    line.sendall(b"done")
"""
_OFFER = """
import sys
from kvstore.stores.parameter_server.transport.shared_buffers import SharedBufferPool
pool = SharedBufferPool()
pool.allocate(4096)[0][:] = 7
print(pool.handle(), flush=True)
sys.stdin.read()
"""
_OPEN = """
import sys
from kvstore.stores.parameter_server.transport.shared_buffers import PeerBuffers
print(PeerBuffers.open(sys.argv[1]) is not None)
"""


@contextlib.contextmanager
def entered(count: int, link: Link) -> Iterator[Hosts]:
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(count, link))
        except OSError as error:
            pytest.skip(str(error))
        yield hosts


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "link", [Link(1), Link(10), Link(1, 0.05), Link(1, 1, 0.02), Link(10, 20), Link(10, 0, 0.001)], ids=str
)
def test_what_is_sent_arrives(link: Link) -> None:
    words = 2_000_003
    with entered(3, link) as hosts:
        check = [*hosts.command(2), sys.executable, "-c", _CHECK, str(words)]
        with subprocess.Popen(check, stdout=subprocess.PIPE) as receiver:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == b"ready\n"
            send = [*hosts.command(0), sys.executable, "-c", _SEND, ADDRESSES[2], str(words)]
            subprocess.run(send, check=True, timeout=100)
        assert receiver.returncode == 0
        assert hosts.sent()[0] > 4 * words
        assert hosts.received()[2] > 4 * words
        assert hosts.sent()[1] < 4 * words


def test_hosts_have_names_interfaces_and_shared_memory_of_their_own() -> None:
    with entered(2, Link(1)) as hosts:
        for host in range(2):
            ask = f"hostname; ip -o address show {LINK}; ls /dev/shm; touch /dev/shm/kvhost"
            done = subprocess.run(
                [*hosts.command(host), "sh", "-c", ask], capture_output=True, text=True, check=True
            )
            name, interface = done.stdout.splitlines()  # nothing in /dev/shm
            assert name == f"kvhost{host}"
            assert ADDRESSES[host] in interface


@pytest.mark.parametrize(("host", "opens"), [(0, True), (1, False)])
def test_memory_is_read_on_its_own_host_alone(host: int, opens: bool) -> None:
    with entered(2, Link(1)) as hosts:
        offer = [*hosts.command(0), sys.executable, "-c", _OFFER]
        with subprocess.Popen(
            offer, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
        ) as owner:
            assert owner.stdout is not None
            handle = owner.stdout.readline().strip()
            assert handle
            reader = [*hosts.command(host), sys.executable, "-c", _OPEN, handle]
            done = subprocess.run(reader, capture_output=True, text=True, check=True, cwd=ROOT)
            assert done.stdout.strip() == str(opens)
            owner.communicate()


@pytest.mark.parametrize("gbit", [1, 10])
def test_a_delay_holds_both_ways(gbit: float) -> None:
    with entered(2, Link(gbit, 5)) as hosts:
        found = probe(hosts, 100_000)
        assert found.round_trip >= 0.01
        assert found.bits < 8 * 100_000 / 0.01
        assert found.relay > 0


def test_nothing_of_the_relay_is_left() -> None:
    with entered(2, Link(1, 1)) as hosts:
        relay = hosts._relay
        assert relay is not None
        assert hosts.relay_cpu() >= 0
    assert relay.poll() is not None
    assert hosts.relay_cpu() == 0
