"""The speed and the round trip of links between hosts, measured by a bare stream, and the cost of a relay."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import NamedTuple

from bench.peers.dist.hosts import ADDRESSES, Hosts

_PORT = 5000
_TRIPS = 50
#: The receiver: it returns single bytes first, and then acknowledges the end of the stream.
_SERVE = f"""
import socket
with socket.create_server(("0.0.0.0", {_PORT})) as listener:
    print("ready", flush=True)
    line, _ = listener.accept()
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range({_TRIPS}):
        line.sendall(line.recv(1))
    while line.recv(1 << 20):
        pass
    line.sendall(b"e")
"""
_ASK = f"""
import json, socket, sys, time
with socket.create_connection((sys.argv[1], {_PORT}), 60) as line:
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips = []
    for _ in range({_TRIPS}):
        start = time.perf_counter()
        line.sendall(b"a")
        line.recv(1)
        trips.append(time.perf_counter() - start)
    start = time.perf_counter()
    line.sendall(bytes(int(sys.argv[2])))
    line.shutdown(socket.SHUT_WR)
    line.recv(1)
    print(json.dumps([sorted(trips)[{_TRIPS} // 2], time.perf_counter() - start]))
"""


class LinkProbe(NamedTuple):
    """A stream's bits a second, the median round trip in seconds, the relay's seconds for a gigabyte."""

    bits: float
    round_trip: float
    relay: float


def probe(hosts: Hosts, nbytes: int) -> LinkProbe:
    """Send `nbytes` from the first host to the second."""
    serve = [*hosts.command(1), sys.executable, "-c", _SERVE]
    ask = [*hosts.command(0), sys.executable, "-c", _ASK, ADDRESSES[1], str(nbytes)]
    with subprocess.Popen(serve, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        before = hosts.relay_cpu()
        try:
            told = subprocess.run(ask, check=True, capture_output=True, timeout=120).stdout
        finally:
            server.kill()
    trip, seconds = json.loads(told)
    return LinkProbe(8 * nbytes / seconds, trip, (hosts.relay_cpu() - before) / (nbytes / 1e9))
