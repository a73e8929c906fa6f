"""The limit of hosts that sum first: what must cross each link, and what its workers copy and add up."""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np

from bench.cases.common import KB, MB, memory
from bench.cases.dist import DistCase
from bench.peers.base import Array, Unsupported
from bench.peers.dist.crossing import Crossing
from bench.peers.dist.sockets import SMALL

#: Of the array of a worker; each host gets its piece of this worker's share of a block.
STEPS = {"256 KB": 256 * KB, "1 MB": MB, "4 MB": 4 * MB}


class CrossingSum(Crossing):
    """A worker's part of a step, which waits for no other worker's."""

    def prepare(self, case: DistCase) -> list[Array]:
        if not self.addresses:
            self._meet()
        if self.each == 1:
            raise Unsupported("a host of one worker sums nothing")
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
                raise RuntimeError("what came back is not what was sent")
        return []

    def _step(
        self,
        fds: ctypes.Array[ctypes.c_int],
        arrays: list[ctypes.c_void_p],
        sizes: tuple[ctypes.c_int64, ctypes.c_int64],
        threads: int,
    ) -> None:
        if self.code.crossing_step(fds, len(fds), self.each, *arrays, *sizes, threads):
            raise ConnectionError("a process that sends back has gone")
