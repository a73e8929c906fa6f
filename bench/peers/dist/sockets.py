"""The floor of the wire: bare sockets, C, and servers that send back each block as it comes, without a sum.

A parameter server moves as many bytes, four times the payload with two workers. Its workers too read
gradients from memory and write what they get to memory; a server may keep the block at hand in a cache.
"""

from __future__ import annotations

import ctypes
import secrets
import socket
from functools import partial

from bench.cases.common import KB, MB
from bench.cases.dist import DistCase

from bench.peers.dist import echo
from bench.peers.base import Array
from bench.peers.dist.base import DistPeer
from bench.peers.group.link import Place

IN_TURN, POLLING, THREAD = range(3)
BLOCKS = {"64 KB": 64 * KB, "256 KB": 256 * KB, "1 MB": MB}
LARGE = 4 * MB  # from here on the smallest block has no chance
SMALL = 64 * KB  # so much is sure to fit into the buffers of a connection, both ways


def _blocks(nbytes: int, few: bool) -> list[str]:
    if few:
        return ["64 KB"]
    return [name for name, block in BLOCKS.items() if nbytes < LARGE or block > SMALL]


class Sockets(DistPeer):
    """A round trip of all bytes, spread over the servers."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.code = ctypes.CDLL(place.limits)
        self.family = socket.AF_UNIX if self.entry.transport == "ipc" else socket.AF_INET
        self.lines: dict[str, list[socket.socket]] = {}
        self.addresses: list[str] = []

    def prepare(self, case: DistCase) -> list[Array]:
        if not self.addresses:
            own = [self._serve() for _ in range(case.servers)] if self.place.rank == 0 else []
            self.addresses = self.place.link.gather(own)[0]
            self.lines = {
                name: [self._line(a, size) for a in self.addresses] for name, size in BLOCKS.items()
            }
        data = self.dense(case)
        few = case.nbytes <= SMALL * case.servers
        ways = {"in turn": IN_TURN} if few else {"polling": POLLING, "a thread that sends": THREAD}
        for block in _blocks(case.nbytes, few):
            lines = [line.fileno() for line in self.lines[block]]
            fds = (ctypes.c_int * len(lines))(*lines)
            for way, number in ways.items():
                call = partial(self._trip, fds, data.flat, data.flat_outs, BLOCKS[block], number)
                self.variants[f"{way}, {block}"] = call
        for call in self.variants.values():
            data.flat_outs.fill(-1)
            call()
            if not self.entry.hot and not (data.flat_outs == data.flat).all():
                raise RuntimeError("what came back is not what was sent")
        return []

    def _serve(self) -> str:
        listener = socket.socket(self.family)
        name = f"\0kvstore-bench-{secrets.token_hex(16)}"
        listener.bind(name if self.family == socket.AF_UNIX else ("127.0.0.1", 0))
        listener.listen()
        echo.fork(partial(self.code.floor_serve, listener.fileno()))
        address = name if self.family == socket.AF_UNIX else str(listener.getsockname()[1])
        listener.close()
        return address

    def _line(self, address: str, block: int) -> socket.socket:
        line = socket.socket(self.family)
        if self.family == socket.AF_UNIX:
            line.connect(address)
        else:
            line.connect(("127.0.0.1", int(address)))
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(block.to_bytes(8, "little"))
        return line

    def _trip(
        self, fds: ctypes.Array[ctypes.c_int], source: Array, target: Array, block: int, way: int
    ) -> None:
        n, hot = ctypes.c_int64(source.nbytes), int(self.entry.hot)
        here, there = (ctypes.c_void_p(array.ctypes.data) for array in (source, target))
        if self.code.floor_trip(fds, len(fds), here, there, n, ctypes.c_int64(block), way, hot):
            raise ConnectionError("a process that sends back has gone")
