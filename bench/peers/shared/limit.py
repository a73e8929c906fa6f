"""The compiled limits: bare C over memory that all processes map, or over the memory of other processes."""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import partial
from time import process_time

import numpy as np

from bench.cases import shared as shared_cases
from bench.cases.common import LINE, memory, pieces
from bench.cases.shared import SharedCase
from bench.peers.base import Array, Call, fields
from bench.peers.group.base import GroupPeer
from bench.peers.group.link import Place
from bench.peers.local.limit import MAX_VALUES, PARAMS, UPDATES, Item, Params, fill

MARKS = 1024  # their place in the group's shared page, behind the barrier
ORDINARY, STREAMING = 0, 1
SHARED, PRIVATE, MEMCPY, BALL, FUTEX = range(5)


class _Place(ctypes.Structure):
    _fields_ = fields(
        ("gate marks", ctypes.c_void_p),
        ("rank size", ctypes.c_int),
        ("epoch calls", ctypes.c_long),
        ("grows", ctypes.c_int),
        ("work", Item),
        ("own bounce", ctypes.c_void_p),
        ("n start end block", ctypes.c_ssize_t),
        ("params", ctypes.POINTER(Params)),
        ("pids", ctypes.c_int * MAX_VALUES),
        ("remote", ctypes.c_void_p * MAX_VALUES),
    )


class _Compiled(GroupPeer):
    """Timed in C."""

    kind = SHARED

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.code = ctypes.CDLL(place.limits)
        self.code.place_open()
        here = place.gate.address
        self.c = _Place(gate=here, marks=here + MARKS, rank=place.rank, size=place.workers)
        self.c.params = ctypes.pointer(PARAMS)
        self.since = ctypes.c_long(0)
        self.update = 0
        self.kept: list[Array] = []

    def begin(self, case: SharedCase, own: Array, kept: list[Array], ways: dict[str, Call]) -> None:
        """Keep a worker's own array and the other arrays, and make the first call in the first way."""
        self.kept, self.variants, self.update = [own, *kept], ways, UPDATES.index(case.update)
        self.c.own, self.c.n, self.c.grows = own.ctypes.data, own.size, int(not case.update)
        self.c.calls = self.since.value = 0
        self._run(next(iter(ways)), 1, 1)

    def run(self, variant: str, repeats: int) -> list[float]:
        return self._run(variant, repeats, self.case.links)

    def _run(self, variant: str, repeats: int, links: int) -> list[float]:
        self.variants[variant]()
        seconds = (ctypes.c_double * repeats)()
        how = self.how if self.kind == SHARED else 0
        where, since = ctypes.byref(self.c), ctypes.byref(self.since)
        begin = process_time()
        failed = self.code.place_run(where, self.kind, self.update, how, links, repeats, seconds, since)
        self.cpu = process_time() - begin
        if failed:
            raise TimeoutError("another worker has ended, or its memory is not accessible")
        return list(seconds)

    how = ORDINARY

    def share(self, n: int) -> tuple[int, int]:
        """Return first and last number of this worker's share, cut at cache lines."""
        lines = -(-n // LINE)
        cuts = [min(n, lines * rank // self.place.workers * LINE) for rank in range(self.place.workers)]
        return [*cuts, n][self.place.rank], [*cuts, n][self.place.rank + 1]

    def release(self) -> None:
        super().release()
        self.kept = []


class Kept(_Compiled):
    """Arrays that all processes map, in place; a copy of the sums is written, as in a store."""

    keeps = 1

    def prepare(self, case: SharedCase) -> list[Array]:
        data = shared_cases.inputs(case, self.place.rank)
        workers, n = self.place.workers, data.flat.size
        arrays = common(self.place, workers + (3 if case.update else self.keeps), n)
        own = arrays[self.place.rank]
        np.copyto(own, data.flat)
        if case.update:
            self._plan_update(arrays, data.flat_weights)
            self.begin(case, own, arrays, {"": partial(self._set, ORDINARY, 0)})
            return pieces(arrays[workers], case.shapes)
        self._plan(arrays)
        self.begin(case, own, arrays, self._ways())
        return pieces(own, case.shapes)

    def _plan(self, arrays: list[Array]) -> None:
        start, end = self.share(arrays[0].size)
        parts = [array[start:end] for array in arrays]
        workers = self.place.workers
        fill(self.c.work, parts[:workers], [*parts[workers:], *parts[:workers]])

    def _plan_update(self, arrays: list[Array], weights: Array) -> None:
        start, end = self.share(weights.size)
        parts = [array[start:end] for array in arrays]
        stored, first, second = parts[self.place.workers :]
        np.copyto(stored, weights[start:end])
        for state in (first, second):
            state.fill(0)
        fill(self.c.work, parts[: self.place.workers], [])
        self.c.work.w, self.c.work.s1, self.c.work.s2 = (part.ctypes.data for part in (stored, first, second))

    def _ways(self) -> dict[str, Call]:
        ways = {"ordinary stores": partial(self._set, ORDINARY, 0)}
        if self.keeps:
            ways["the kept sum streamed"] = partial(self._set, STREAMING, 1)
        ways["streaming stores"] = partial(self._set, STREAMING, self.keeps + self.place.workers)
        return ways

    def _set(self, how: int, streamed: int) -> None:
        self.how, self.c.work.streamed = how, streamed


class Bare(Kept):
    """Without the copy that a store keeps."""

    keeps = 0


class Private(_Compiled):
    """Ordinary arrays, read and written by the other processes through the kernel, block by block."""

    kind = PRIVATE

    def prepare(self, case: SharedCase) -> list[Array]:
        data = shared_cases.inputs(case, self.place.rank)
        start, end = self.share(data.flat.size)
        self.c.start, self.c.end = start, end
        for rank, (pid, address) in enumerate(self.place.link.gather([os.getpid(), data.flat.ctypes.data])):
            self.c.pids[rank], self.c.remote[rank] = pid, address
        sizes = [kb for kb in (128, 256, 512, 1024) if kb * 256 < end - start] or [128]
        bounce = memory(self.place.workers * sizes[-1] * 256, "huge")
        bounce.fill(1)
        self.c.bounce = bounce.ctypes.data
        ways: dict[str, Call] = {f"blocks of {kb} KB": partial(self._block, kb * 256) for kb in sizes}
        self.begin(case, data.flat, [bounce], ways)
        return data.values

    def _block(self, n: int) -> None:
        self.c.block = n


class Memcpy(_Compiled):
    """Each process copies its own array once, without a sum."""

    kind = MEMCPY

    def prepare(self, case: SharedCase) -> list[Array]:
        data = shared_cases.inputs(case, self.place.rank)
        target = np.ones_like(data.flat)
        self.c.bounce = target.ctypes.data
        self.begin(case, data.flat, [target], {"": _nothing})
        self.c.grows = 0
        return []


class Line(_Compiled):
    """One cache line moves to another process and back; both processes spin."""

    kind = BALL

    def prepare(self, case: SharedCase) -> list[Array]:
        self.begin(case, np.ones(LINE, np.float32), [], {"": _nothing})
        self.c.grows = 0
        return []


class Futex(Line):
    """The same with sleeping processes: 50 microseconds before each trip are not counted."""

    kind = FUTEX


def common(place: Place, count: int, n: int) -> list[Array]:
    """Make arrays of `n` float32 that all workers of the group have mapped."""
    stride = -(-4 * n // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = os.memfd_create("bench") if place.rank == 0 else -1
    if place.rank == 0:
        os.posix_fallocate(descriptor, 0, count * stride)
    pid, number = place.link.gather([os.getpid(), descriptor])[0]
    if place.rank:
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    memory = mmap.mmap(descriptor, count * stride)
    place.link.gather(None)  # all have it
    os.close(descriptor)
    arrays = [np.frombuffer(memory, np.float32, n, at * stride) for at in range(count)]
    if place.rank == 0:
        for array in arrays[place.workers :]:
            array.fill(-1)
    place.link.gather(None)
    return arrays


def _nothing() -> None:
    """Set nothing."""
