"""The floor of ZeroMQ: a DEALER sends messages to a ROUTER, which sends the frames back, without a sum."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from functools import partial

import zmq

from bench.cases.common import KB, MB
from bench.cases.dist import DistCase
from bench.peers.base import Array
from bench.peers.dist.base import DistPeer
from bench.peers.group.link import Place
from bench.peers.worker import fork

CHUNKS = {"256 KB": 256 * KB, "1 MB": MB}
LARGE = 16 * MB  # from this size on small chunks are slower
WINDOWS = {"8 on the way": 8, "all on the way": sys.maxsize}

#: The server, the bytes to send, and the memory of the reply.
Piece = tuple[int, memoryview, memoryview]


class ZeroMQPeer(DistPeer):
    """A worker's DEALER for each server. The first worker starts the servers, each with a ROUTER."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.sockets: list[zmq.Socket[bytes]] = []

    def answer(self, line: zmq.Socket[bytes]) -> None:
        """Run as the server at this ROUTER, until the process ends."""
        raise NotImplementedError

    def connect(self, servers: int) -> None:
        """Start the servers and connect to them, once."""
        if self.sockets:
            return
        own = [self._serve() for _ in range(servers)] if self.place.rank == 0 else []
        context = zmq.Context.instance()
        for address, key in self.place.link.gather(own)[0]:
            line = context.socket(zmq.DEALER)
            line.set_hwm(0)  # none
            line.linger = 0
            if key:
                line.curve_serverkey = key.encode()
                line.curve_publickey, line.curve_secretkey = zmq.curve_keypair()
            line.connect(address)
            self.sockets.append(line)

    def _serve(self) -> tuple[str, str]:
        """Start a server; return its address and its public key."""
        public, secret = zmq.curve_keypair() if self.entry.secure else (b"", b"")
        ipc = f"ipc://@kvstore-bench-{secrets.token_hex(16)}"
        reading, writing = os.pipe()
        address = ipc if self.entry.transport == "ipc" else "tcp://127.0.0.1:*"
        fork(partial(self._listen, address, secret, writing))
        os.close(writing)
        with os.fdopen(reading) as pipe:
            return pipe.read(), public.decode()

    def _listen(self, address: str, secret: bytes, report: int) -> None:
        line = zmq.Context().socket(zmq.ROUTER)
        line.set_hwm(0)
        if secret:
            line.curve_secretkey, line.curve_server = secret, True
        line.bind(address)
        with os.fdopen(report, "w") as pipe:
            pipe.write(line.last_endpoint.decode().rstrip("\0"))
        self.answer(line)


class BareZeroMQ(ZeroMQPeer):
    """Zero copy where pyzmq can: chunks are sent from one array, and received into another."""

    def prepare(self, case: DistCase) -> list[Array]:
        self.connect(case.servers)
        data = self.dense(case)
        source, target = (memoryview(flat).cast("B") for flat in (data.flat, data.flat_outs))
        for label, chunk in CHUNKS.items():
            if case.nbytes >= LARGE and chunk < MB:
                continue
            pieces = [(s, source[a:b], target[a:b]) for s, a, b in _cuts(len(source), case.servers, chunk)]
            for window, most in WINDOWS.items():
                self.variants[f"{label}, {window}"] = partial(self._trip, pieces, min(most, len(pieces)))
            if len(pieces) <= case.servers:
                break  # one message for each server: larger chunks are the same
        self.check_ways(sent=True)
        return []

    def answer(self, line: zmq.Socket[bytes]) -> None:
        while True:
            who, what = line.recv(), line.recv(copy=False)
            line.send(who, zmq.SNDMORE)
            line.send(what, copy=False)

    def _trip(self, pieces: list[Piece], window: int) -> None:
        """Keep `window` pieces in flight; the replies of one server have the order of the requests."""
        lines = self.sockets
        for server, source, _ in pieces[:window]:
            lines[server].send(source, copy=False)
        for number, (server, _, target) in enumerate(pieces, start=window):
            lines[server].recv_into(target)
            if number < len(pieces):
                server, source, _ = pieces[number]
                lines[server].send(source, copy=False)


def _cuts(n: int, servers: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """Divide n bytes: return server, start and end of each chunk, so that all servers have work."""
    shares = [(n * s // servers, n * (s + 1) // servers) for s in range(servers)]
    for at in range(0, -(-n // servers), chunk):
        for server, (start, end) in enumerate(shares):
            if start + at < end:
                yield server, start + at, min(start + at + chunk, end)
