"""Limits of a server that sums and has its payloads in shared memory: copied in, summed, copied out, in C."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from functools import partial

import numpy as np

from bench.cases.common import KB, LINE, MB
from bench.cases.dist import DistCase
from bench.peers.base import Array, fields
from bench.peers.dist.base import PAIR, DistPeer
from bench.peers.group.link import Place
from bench.peers.shared.limit import common
from bench.peers.worker import fork

GATE = 1024  # its place in the group's shared page, behind the barrier
BLOCKS = {"whole": 0, "by 256 KB": 256 * KB, "by 1 MB": MB}
LOOKS = {"asleep": 0, "looking": 400}  # the beginning of a wait
MAX_WORKERS = 64


class _Trip(ctypes.Structure):
    _fields_ = fields(
        ("gate", ctypes.c_void_p),
        ("rank workers", ctypes.c_int),
        ("parts", ctypes.c_void_p * MAX_WORKERS),
        ("sum source target", ctypes.c_void_p),
        ("n block", ctypes.c_ssize_t),
        ("sleeps streams", ctypes.c_int),
    )


class _Visit(ctypes.Structure):
    _fields_ = fields(
        ("bell", ctypes.c_void_p),
        ("rank workers", ctypes.c_int),
        ("parts", ctypes.c_void_p * MAX_WORKERS),
        ("sums", ctypes.c_void_p * 2),
        ("source target", ctypes.c_void_p),
        ("n", ctypes.c_ssize_t),
        ("looks streams", ctypes.c_int),
    )


class InMemory(DistPeer):
    """Arrays in memory that all workers have mapped, and C that sums them."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.code = ctypes.CDLL(place.limits)
        self.kept: list[Array] = []

    def release(self) -> None:
        super().release()
        self.kept = []


class MemorySum(InMemory):
    """Each worker sums a share: no server could be faster than all workers together."""

    def prepare(self, case: DistCase) -> list[Array]:
        data = self.dense(case)
        self.kept = common(self.place, self.place.workers + 1, data.flat.size)
        for label, block in BLOCKS.items():
            if block < data.flat.nbytes:
                for waiting in ("spinning", "futex"):
                    for stores in ("", ", streamed"):
                        trip = self._trip(block // 4 or data.flat.size, waiting == "futex", bool(stores))
                        call = partial(self._call, trip)
                        self.variants[f"{label}, {waiting}{stores}"] = call
                        if not block:  # also the limit of two calls: after the first call the sum is complete
                            self.variants[f"{PAIR}, {waiting}{stores}"] = call
        self.check_ways()
        return data.outs

    def _trip(self, block: int, sleeps: bool, streams: bool) -> _Trip:
        assert self.data is not None
        assert block % LINE == 0
        *parts, total = (array.ctypes.data for array in self.kept)
        trip = _Trip(self.place.gate.address + GATE, self.place.rank, self.place.workers)
        trip.parts[: len(parts)] = parts
        trip.sum, trip.source, trip.target = (
            total,
            self.data.flat.ctypes.data,
            self.data.flat_outs.ctypes.data,
        )
        trip.n, trip.block, trip.sleeps, trip.streams = self.data.flat.size, block, sleeps, streams
        return trip

    def _call(self, trip: _Trip) -> None:
        if self.code.memory_sum_trip(ctypes.byref(trip)):
            raise TimeoutError("another worker has ended")


class MemoryServer(InMemory):
    """A separate server sums whole arrays: two calls cost as much as one."""

    _server = 0

    def prepare(self, case: DistCase) -> list[Array]:
        data = self.dense(case)
        self.kept = common(self.place, self.place.workers + 3, data.flat.size)
        self.kept[-1].fill(0)  # before the barrier of any worker
        self.place.link.gather(None)
        if self.place.rank == 0:
            self._server = fork(partial(self.code.memory_sum_serve, ctypes.byref(self._visit(0, False))))
        for waiting, looks in LOOKS.items():
            for stores in ("", ", streamed"):
                call = partial(self._call, self._visit(looks, bool(stores)))
                self.variants[f"{waiting}{stores}"] = self.variants[f"{PAIR}, {waiting}{stores}"] = call
        self.check_ways()
        return data.outs

    def _visit(self, looks: int, streams: bool) -> _Visit:
        assert self.data is not None
        *parts, first, second, bell = (array.ctypes.data for array in self.kept)
        visit = _Visit(bell, self.place.rank, self.place.workers)
        visit.parts[: len(parts)], visit.sums[:] = parts, (first, second)
        visit.source, visit.target = self.data.flat.ctypes.data, self.data.flat_outs.ctypes.data
        visit.n, visit.looks, visit.streams = self.data.flat.size, looks, streams
        return visit

    def _call(self, visit: _Visit) -> None:
        if self.code.memory_sum_visit(ctypes.byref(visit)):
            raise TimeoutError("the server has ended")

    def release(self) -> None:
        if self._server:
            os.kill(self._server, signal.SIGKILL)
            os.waitpid(self._server, 0)
            self._server = 0
        super().release()


BLOCKS = {"whole": 0, "by 256 KB": 256 * KB, "by 1 MB": MB}


class Memcpy(DistPeer):
    """Two copies, and no sum; by blocks the second copy reads its block from a cache."""

    def prepare(self, case: DistCase) -> list[Array]:
        data = self.dense(case)
        middle = np.frombuffer(mmap.mmap(-1, data.flat.nbytes), np.float32)
        middle[:] = 1  # touched
        for label, block in BLOCKS.items():
            if block < data.flat.nbytes:
                cut = (block or data.flat.nbytes) // 4
                triples = [
                    tuple(flat[at : at + cut] for flat in (data.flat, middle, data.flat_outs))
                    for at in range(0, data.flat.size, cut)
                ]
                self.variants[label] = partial(_copy, triples)
        self.variants[PAIR] = self.variants["whole"]
        return []


def _copy(triples: list[tuple[Array, ...]]) -> None:
    for source, middle, target in triples:
        np.copyto(middle, source)
        np.copyto(target, middle)
