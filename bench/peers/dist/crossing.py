"""The limit of hosts: bare sockets move the bytes of each link, twice the model less a host's share.

Each worker sends its part of the values of its host, divided over the other hosts, and receives as much,
without a sum. Each of several workers of a host moves its part, as workers share the work of hosts that sum
first.
"""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np

from bench.cases.common import KB, LINE, MB, memory
from bench.cases.dist import DistCase
from bench.peers.base import Array, Unsupported
from bench.peers.dist.sockets import BLOCKS, IN_TURN, POLLING, SMALL, THREAD, Sockets, _blocks
from bench.peers.group.link import own_address


class Crossing(Sockets):
    """A round trip of a worker's part to the servers of other hosts."""

    def prepare(self, case: DistCase) -> list[Array]:
        if not self.addresses:
            self._meet()
        data = self.dense(case)
        part, start = self._part(case, data.flat.size)
        few = 4 * part <= SMALL
        ways = {"in turn": IN_TURN} if few else {"polling": POLLING, "a thread that sends": THREAD}
        source, target = (flat[start : start + part] for flat in (data.flat, data.flat_outs))
        for block in _blocks(4 * part, few):
            lines = [line.fileno() for line in self.lines[block]]
            fds = (ctypes.c_int * len(lines))(*lines)
            for way, number in ways.items():
                self.variants[f"{way}, {block}"] = partial(
                    self._trip, fds, source, target, BLOCKS[block], number
                )
        for call in self.variants.values():
            target.fill(-1)
            call()
            if not (target == source).all():
                raise RuntimeError("the reply differs from the sent bytes")
        return []

    def _meet(self) -> None:
        """Start a server in each worker, and connect to those of the other hosts with the same index."""
        everybody = self.place.link.gather([own_address(), self._serve()])
        hosts = list(dict.fromkeys(host for host, _ in everybody))
        self.hosts = len(hosts)
        self.each = self.place.workers // self.hosts
        mine, self.index = divmod(self.place.rank, self.each)
        others = [host for host in range(self.hosts) if host != mine]
        self.addresses = [everybody[host * self.each + self.index][1] for host in others]
        self.lines = {
            name: [self._line(address, size.to_bytes(8, "little")) for address in self.addresses]
            for name, size in BLOCKS.items()
        }

    def _part(self, case: DistCase, size: int) -> tuple[int, int]:
        """Return the count of the numbers that this worker moves, and their offset."""
        lines = size // LINE
        start, end = (lines * n // self.each * LINE for n in (self.index, self.index + 1))
        return max((end - start) * (self.hosts - 1) // self.hosts, 1), start


#: Of the array of a worker; each host receives its piece of this worker's share of a block.
STEPS = {"256 KB": 256 * KB, "1 MB": MB, "4 MB": 4 * MB}


class CrossingSum(Crossing):
    """A worker's part of a step, without waits for other workers."""

    def prepare(self, case: DistCase) -> list[Array]:
        if not self.addresses:
            self._meet()
        if self.each == 1:
            raise Unsupported("a host of one worker has no sum")
        data = self.dense(case)
        n = data.flat.size
        self.state = shared, total, back = [
            memory(size, "huge") for size in (n, n // self.each, n // self.each)
        ]
        few = data.flat.nbytes <= SMALL
        lines = [line.fileno() for line in next(iter(self.lines.values()))]
        fds = (ctypes.c_int * len(lines))(*lines)
        arrays = [
            ctypes.c_void_p(one.ctypes.data) for one in (data.flat, shared, total, back, data.flat_outs)
        ]
        for name, size in {"all": data.flat.nbytes}.items() if few else STEPS.items():
            sizes = ctypes.c_int64(n), ctypes.c_int64(size // 4)
            self.variants[name] = partial(self._step, fds, arrays, sizes, int(not few))
        for call in self.variants.values():
            data.flat_outs.fill(-1)
            back.fill(-1)
            call()
            came = back != -1
            if not (np.array_equal(data.flat_outs, data.flat) and came.any() and (back == total)[came].all()):
                raise RuntimeError("the reply differs from the sent bytes")
        return []

    def _step(
        self,
        fds: ctypes.Array[ctypes.c_int],
        arrays: list[ctypes.c_void_p],
        sizes: tuple[ctypes.c_int64, ctypes.c_int64],
        threads: int,
    ) -> None:
        if self.code.crossing_step(fds, len(fds), self.each, *arrays, *sizes, threads):
            raise ConnectionError("a server has ended")
