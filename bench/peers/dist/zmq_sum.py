"""The limit of ZeroMQ: workers and a server that sums, in C on the libzmq of pyzmq."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import zmq
import zmq.backend.cython._zmq as binding

from bench.cases.common import KB, MB
from bench.cases.dist import DistCase
from bench.peers.base import Array
from bench.peers.dist.bare_zmq import ZeroMQPeer
from bench.peers.group.link import Place

SLICES = {"256 KB": 256 * KB, "1 MB": MB}
WINDOW = 32  # slices in flight


class ZeroMQSum(ZeroMQPeer):
    """DEALER to ROUTER, a small header and the payload, slice by slice."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        ctypes.CDLL(binding.__file__, ctypes.RTLD_GLOBAL)  # its dependencies become visible, too
        self.code = ctypes.CDLL(place.limits)

    def prepare(self, case: DistCase) -> list[Array]:
        self.connect(case.servers)
        data = self.dense(case)
        handles = (ctypes.c_void_p * len(self.sockets))(*(line.underlying for line in self.sockets))
        for label, size in SLICES.items():
            self.variants[label] = partial(self._trip, handles, data.flat, data.flat_outs, size)
            if data.flat.nbytes <= size:
                break  # one slice: larger ones are the same
        self.check_ways()
        return data.outs

    def answer(self, line: zmq.Socket[bytes]) -> None:
        self.code.zmq_sum_serve(ctypes.c_void_p(line.underlying), self.place.workers)
        raise ConnectionError("the server has failed")

    def _trip(self, handles: ctypes.Array[Any], source: Array, target: Array, size: int) -> None:
        n, cut = (ctypes.c_int64(number) for number in (source.nbytes, size))
        here, there = (ctypes.c_void_p(array.ctypes.data) for array in (source, target))
        if self.code.zmq_sum_trip(handles, len(handles), self.place.rank, here, there, n, cut, WINDOW):
            raise ConnectionError("the server has ended, or sent another message")
