"""The limit of a server that sums: bare sockets, C, the same bytes as a parameter server's, and their sum.

Unlike the floor, its server waits for the parts of a block of all workers, and writes the sum, which it
keeps. Only payload is sent: worker and server know the length of an array, and its blocks.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import struct
from functools import partial

from bench.cases.common import KB
from bench.cases.dist import DistCase
from bench.peers.base import Array
from bench.peers.dist.base import PAIR
from bench.peers.dist.sockets import IN_TURN, SMALL, TWO_CALLS, WINDOW, Sockets
from bench.peers.group.link import Place
from bench.runner import machine

#: The waits of the server: by epoll, or in a thread for each connection, on the core of its worker; and by
#: such threads where parts and sums are sent in two calls.
EPOLL, THREADS = "epoll", "threads"
SERVERS = (EPOLL, THREADS, f"{PAIR}, {THREADS}")
BLOCKS = {"64 KB": 64 * KB, "128 KB": 128 * KB, "256 KB": 256 * KB}
#: Blocks of a worker in flight. With threads a block is received before the sum of the last one is sent.
WINDOWS = (2, 4)


class SocketsSum(Sockets):
    """Separate connections for each case, each way of its server and each size of its blocks."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.groups = itertools.count()
        self.cpus = machine.cpus()

    def prepare(self, case: DistCase) -> list[Array]:
        if not self.addresses:
            self._start(case.servers)
        data = self.dense(case)
        for block in BLOCKS:
            for server in SERVERS:
                self._add(case, server, block)
            if BLOCKS[block] * case.servers >= case.nbytes:
                break  # one block: larger ones are the same
        self.check_ways()
        return data.outs

    def _add(self, case: DistCase, server: str, block: str) -> None:
        assert self.data is not None
        source, target, group = self.data.flat, self.data.flat_outs, next(self.groups)
        cuts = self._cuts(source.nbytes)
        lines = []
        for address, start, end in zip(self.addresses, cuts, cuts[1:], strict=False):
            hello = group, self.place.rank, SERVERS.index(server), BLOCKS[block], end - start
            lines.append(self._line(address, struct.pack("5q", *hello)))
        self.lines[f"{server} {block}"] = lines
        fds = (ctypes.c_int * len(lines))(*(line.fileno() for line in lines))
        trip = partial(self._trip, fds, source, target, BLOCKS[block])
        if server.startswith(PAIR):
            self.variants[f"{server}, {block}"] = partial(trip, TWO_CALLS)
            return
        if source.nbytes <= SMALL * case.servers:
            self.variants[f"{server}, {block}, in turn"] = partial(trip, IN_TURN)
            return
        for blocks in WINDOWS:
            name = f"{server}, {block}, {blocks} on the way"
            self.variants[name] = partial(trip, WINDOW, blocks * BLOCKS[block])

    def _cuts(self, nbytes: int) -> list[int]:
        """Return the offset of the bytes of each server; a small array has one server, like a small key."""
        return [0, nbytes] if nbytes <= SMALL else super()._cuts(nbytes)

    def _line(self, address: str, hello: bytes) -> socket.socket:
        line = super()._line(address, hello)
        room = max(WINDOWS) * max(BLOCKS.values())  # for all sums in flight: the server never waits
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        return line

    def _answer(self, listener: int) -> None:
        self.code.socket_sum_serve(listener, self.place.workers)

    def run(self, variant: str, repeats: int) -> list[float]:
        own = {self.cpus[self.place.rank % len(self.cpus)]}
        os.sched_setaffinity(0, own if THREADS in variant else self.cpus)
        return super().run(variant, repeats)

    def release(self) -> None:
        super().release()
        for line in itertools.chain(*self.lines.values()):
            line.close()
        self.lines = {}
