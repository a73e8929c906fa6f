"""The floor of the wire: bare sockets, C, and servers that send back each block as it arrives, without a sum.

In two calls a server stores the received bytes, acknowledges them, and sends them back on request.

A parameter server moves as many bytes, four times the payload with two workers. Its workers too read
gradients from memory and write the received values to memory; a server may keep the current block in a cache.

With an update, the workers compute it after the trip: in a sync case each its share of the weights, in an
async case each all weights, as each push is an update, and in a sparse case each its own rows.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
from dataclasses import replace
from functools import partial
from typing import Any

import numpy.typing as npt

from bench.cases import dist as dist_cases
from bench.cases import local as cases
from bench.cases.common import KB, LINE, MB, memory
from bench.cases.dist import DistCase, Inputs
from bench.peers.base import Array, Call, all_of
from bench.peers.dist.base import PAIR, DistPeer
from bench.peers.group.link import HOST, Place, own_address
from bench.peers.worker import fork

IN_TURN, POLLING, THREAD, WINDOW, TWO_CALLS = range(5)
BLOCKS = {"64 KB": 64 * KB, "256 KB": 256 * KB, "1 MB": MB}
LARGE = 4 * MB  # from this size on the smallest block is never the fastest
SMALL = 64 * KB  # bytes that always fit into the buffers of a connection, both ways


def _blocks(nbytes: int, few: bool) -> list[str]:
    if few:
        return ["64 KB"]
    return [name for name, block in BLOCKS.items() if nbytes < LARGE or block > SMALL]


def _pushed(case: DistCase) -> DistCase:
    """Return the rows of a table that a worker pushes."""
    return replace(case, shapes=((case.rows, *case.shapes[0][1:]),), rows=0) if case.rows else case


class Sockets(DistPeer):
    """A round trip of all bytes, spread over the servers."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.code = ctypes.CDLL(place.limits)
        self.family = socket.AF_UNIX if self.entry.transport == "ipc" else socket.AF_INET
        self.lines: dict[str, list[socket.socket]] = {}
        self.keeping: list[socket.socket] = []
        self.addresses: list[str] = []
        self.state: list[npt.NDArray[Any]] = []

    def prepare(self, case: DistCase) -> list[Array]:
        if not self.addresses:
            self._start(case.servers)
            self.lines = {
                name: [self._line(a, size.to_bytes(8, "little")) for a in self.addresses]
                for name, size in BLOCKS.items()
            }
        data = self.dense(_pushed(case))
        few = case.nbytes <= SMALL * case.servers
        ways = {"in turn": IN_TURN} if few else {"polling": POLLING, "a thread that sends": THREAD}
        for block in _blocks(case.nbytes, few):
            lines = [line.fileno() for line in self.lines[block]]
            fds = (ctypes.c_int * len(lines))(*lines)
            for way, number in ways.items():
                call = partial(self._trip, fds, data.flat, data.flat_outs, BLOCKS[block], number)
                self.variants[f"{way}, {block}"] = call
        if not self.entry.hot:  # only one block of it is sent
            self._add_pair(data)
            self.check_ways(sent=True)
        if case.update:
            update = (self._update_rows if case.rows else self._update)(case, data)
            self.variants = {name: all_of([call, update]) for name, call in self.variants.items()}
        return []

    def _add_pair(self, data: Inputs) -> None:
        cuts = self._cuts(data.flat.nbytes)
        self.keeping = [
            self._line(address, (start - end).to_bytes(8, "little", signed=True))
            for address, start, end in zip(self.addresses, cuts, cuts[1:], strict=False)
        ]
        fds = (ctypes.c_int * len(self.keeping))(*(line.fileno() for line in self.keeping))
        self.variants[PAIR] = partial(self._trip, fds, data.flat, data.flat_outs, MB, TWO_CALLS)

    def _cuts(self, nbytes: int) -> list[int]:
        """Return the offset of the bytes of each server, and the end of the last server's."""
        servers = len(self.addresses)
        return [nbytes * s // servers // 4 * 4 for s in range(servers)] + [nbytes]

    def _start(self, servers: int) -> None:
        """Start the servers, one on each of several hosts, and send their addresses to all workers."""
        serving = 1 if HOST in os.environ else servers if self.place.rank == 0 else 0
        own = [self._serve() for _ in range(serving)]
        self.addresses = [address for some in self.place.link.gather(own) for address in some]

    def _update(self, case: DistCase, data: Inputs) -> Call:
        """Update the weights by the received values."""
        self.state = weights, momentum = [memory(data.flat.size, "huge") for _ in range(2)]
        weights.fill(1)
        momentum.fill(0)
        parts, part = (case.workers, self.place.rank) if case.mode == "sync" else (1, 0)
        lines = data.flat.size // LINE
        own = slice(lines * part // parts * LINE, lines * (part + 1) // parts * LINE)
        w, v, g = (ctypes.c_void_p(flat[own].ctypes.data) for flat in (weights, momentum, data.flat_outs))
        n, rate = ctypes.c_int64(own.stop - own.start), ctypes.c_float(dist_cases.LEARNING_RATE)
        if case.update == "sgd":
            return partial(self.code.floor_sgd, w, g, n, rate)
        more = ctypes.c_float(cases.MOMENTUM), ctypes.c_float(cases.WEIGHT_DECAY)
        return partial(self.code.floor_sgd_momentum, w, v, g, n, rate, *more)

    def _update_rows(self, case: DistCase, data: Inputs) -> Call:
        """Update this worker's rows by the received values."""
        own = dist_cases.sparse_inputs(case, self.place.rank)
        self.state = [own.table, own.ids]
        table, ids, rows = (ctypes.c_void_p(a.ctypes.data) for a in (own.table, own.ids, data.flat_outs))
        width = ctypes.c_int64(own.rows.shape[1])
        rate = ctypes.c_float(dist_cases.LEARNING_RATE)
        return partial(self.code.floor_sgd_rows, table, ids, rows, ctypes.c_int64(case.rows), width, rate)

    def release(self) -> None:
        super().release()
        self.state = []
        for line in self.keeping:
            line.close()
        self.keeping = []

    def _serve(self) -> str:
        listener = socket.socket(self.family)
        name = f"\0kvstore-bench-{secrets.token_hex(16)}"
        listener.bind(name if self.family == socket.AF_UNIX else (own_address(), 0))
        self._unpace(listener)
        listener.listen()
        fork(partial(self._answer, listener.fileno()))
        address = name if self.family == socket.AF_UNIX else "{}:{}".format(*listener.getsockname())
        listener.close()
        return address

    def _answer(self, listener: int) -> None:
        """Run as the server, until the process ends."""
        self.code.floor_serve(listener)

    def _line(self, address: str, hello: bytes) -> socket.socket:
        line = socket.socket(self.family)
        if self.family == socket.AF_UNIX:
            line.connect(address)
        else:
            self._unpace(line)
            host, _, port = address.rpartition(":")
            line.connect((host, int(port)))
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(hello)
        return line

    def _unpace(self, line: socket.socket) -> None:
        """Set the congestion control before a connection; accepted connections inherit it."""
        if self.entry.unpaced and self.family == socket.AF_INET:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")

    def _trip(
        self,
        fds: ctypes.Array[ctypes.c_int],
        source: Array,
        target: Array,
        block: int,
        way: int,
        window: int = 0,
    ) -> None:
        hot = int(self.entry.hot)
        n, cut, most = (ctypes.c_int64(size) for size in (source.nbytes, block, window or source.nbytes))
        here, there = (ctypes.c_void_p(array.ctypes.data) for array in (source, target))
        if self.code.floor_trip(fds, len(fds), here, there, n, cut, most, way, hot):
            raise ConnectionError("a server has ended")
