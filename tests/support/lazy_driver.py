"""A CUDA driver that does nothing until it must, and then in an order that is only just allowed.

Its devices' memory is memory of this process, between guard zones. Work is queued on streams and done when
the caller waits for it, streams taking turns at random, so that a missing event shows as a wrong result.
Memory is poisoned when it is allocated and when it is freed, pinned memory is read when the copy is done and
not before, and everything is counted.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import itertools
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.devices import driver
from kvstore.errors import ArrayError
from kvstore.kernels import cuda

Array = npt.NDArray[Any]

_GUARD = 256
_POISON = 0xA5
_HOST = -1


class _Block:
    """Memory of a device, or pinned memory."""

    def __init__(self, device: int, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self._whole = np.full(nbytes + 3 * _GUARD, _POISON, np.uint8)
        base = self._whole.ctypes.data
        self.address = -(-(base + _GUARD) // 256) * 256
        self._at = self.address - base
        self.live = True

    def poison(self) -> None:
        self._whole[self._at : self._at + self.nbytes] = _POISON

    def is_sound(self) -> bool:
        """Whether the guard zones are unchanged."""
        before, after = self._whole[: self._at], self._whole[self._at + self.nbytes :]
        return bool((before == _POISON).all() and (after == _POISON).all())


class LazyDriver:
    """Takes the place of `kvstore.devices.driver.CudaDriver`."""

    def __init__(self, count: int = 1, seed: int = 0, peers: bool = True, compiled: bool = False) -> None:
        self.count, self.peers = count, peers
        self.pid = os.getpid()
        self._compiled = compiled
        self._random = random.Random(seed)
        self._blocks: list[_Block] = []
        self._addresses: list[int] = []
        self._streams: dict[tuple[int, int], deque[Callable[[], bool]]] = {}
        self._owned: set[int] = set()
        self._events: dict[int, list[int]] = {}  # event -> [times recorded, times reached]
        self._names = itertools.count(0x1000)
        self._opened: set[tuple[int, int]] = set()
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._locked: dict[int, int] = {}  # memory of the process whose pages are locked
        self.launches: list[tuple[str, int]] = []
        self.uploads = 0
        self.waits = 0  # of the host
        self.capacity: int | None = None
        self.broken: Exception | None = None

    # ---------------------------------------------------------------------------------------- devices

    def capability(self, device: int) -> tuple[int, int]:
        return (9, 0)

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        self.enter(device)
        try:
            yield
        finally:
            self.leave()

    def enter(self, device: int) -> bool:
        self._contexts.append(device)
        return True

    def leave(self) -> None:
        self._contexts.pop()

    @property
    def _contexts(self) -> list[int]:
        """The devices that the thread has entered, the current one last."""
        if not hasattr(self._thread, "contexts"):
            self._thread.contexts = []
        contexts: list[int] = self._thread.contexts
        return contexts

    def reaches(self, device: int, other: int) -> bool:
        if device != other and self.peers:
            self._opened.add((device, other))
        return device == other or self.peers

    def device_of(self, address: int) -> int:
        block = self._block(address)
        if block is None or block.device == _HOST:
            raise ArrayError("memory of the host")
        return block.device

    def memory(self, device: int) -> tuple[int, int]:
        return (1 << 30) - self.in_use(device), 1 << 30

    # ----------------------------------------------------------------------------------------- memory

    def allocate(self, device: int, nbytes: int) -> int:
        assert nbytes > 0
        if self.capacity is not None and self.in_use(device) + nbytes > self.capacity:
            raise MemoryError("the GPU has no memory left")
        return self._new(device, nbytes).address

    def free(self, device: int, address: int) -> None:
        self._run_all()
        self._end(address, device)

    def allocate_on_stream(self, device: int, nbytes: int, stream: int) -> int:
        block = self._new(device, nbytes)
        self._put(device, stream, block.poison)
        return block.address

    def free_on_stream(self, device: int, address: int, stream: int) -> None:
        self._put(device, stream, lambda: self._end(address, device))

    def pin(self, nbytes: int) -> int:
        return self._new(_HOST, nbytes).address

    def unpin(self, address: int) -> None:
        self._end(address, _HOST)

    def register(self, address: int, nbytes: int) -> None:
        assert address % 4096 == nbytes % 4096 == 0
        self._locked[address] = nbytes

    def unregister(self, address: int) -> None:
        self._run_all()
        del self._locked[address]

    def copy(self, target: int, source: int, nbytes: int, stream: int, device: int) -> None:
        self._check(device, target, nbytes)
        self._check(device, source, nbytes)
        self._copy(target, source, nbytes, stream, device)

    def copy_between(
        self, target: tuple[int, int], source: tuple[int, int], nbytes: int, stream: int, device: int
    ) -> None:
        for where, address in (target, source):
            assert self.device_of(address) == where
        self._copy(target[1], source[1], nbytes, stream, device)

    def _copy(self, target: int, source: int, nbytes: int, stream: int, device: int) -> None:
        assert nbytes > 0
        locked = any(start <= source < start + size for start, size in self._locked.items())
        if self._block(source) is None and not locked:  # pageable: read before the call returns
            held = ctypes.string_at(source, nbytes)
            self._put(device, stream, lambda: self._move(target, held, nbytes))
        else:
            block = self._block(source)
            self.uploads += block is not None and block.device == _HOST
            self._put(device, stream, lambda: self._move(target, source, nbytes))

    def _move(self, target: int, source: int | bytes, nbytes: int) -> None:
        for address in (target, source):
            if isinstance(address, int):
                self._check_live(address)
        ctypes.memmove(target, source, nbytes)

    def fill(self, target: int, byte: int, nbytes: int, stream: int, device: int) -> None:
        self._check(device, target, nbytes)
        self._put(device, stream, lambda: ctypes.memset(target, byte, nbytes))

    # ------------------------------------------------------------------------------ streams and events

    def stream(self, device: int) -> int:
        name = next(self._names)
        self._owned.add(name)
        return name

    def drop_stream(self, stream: int, device: int) -> None:
        self._owned.remove(stream)

    def event(self, device: int) -> int:
        name = next(self._names)
        self._events[name] = [0, 0]
        return name

    def record(self, event: int, stream: int, device: int) -> None:
        counts = self._events[event]
        counts[0] += 1
        number = counts[0]

        def reach() -> None:
            counts[1] = max(counts[1], number)

        self._put(device, stream, reach)

    def wait(self, stream: int, event: int, device: int) -> None:
        counts = self._events[event]
        number = counts[0]
        self._queue(device, stream).append(lambda: counts[1] >= number)

    def is_done(self, event: int, device: int) -> bool:
        if self._random.random() < 0.3:
            self._step()
        recorded, reached = self._events[event]
        return reached >= recorded

    def finish(self, event: int, device: int) -> None:
        self.waits += 1
        counts = self._events[event]
        while counts[1] < counts[0]:
            self._step()

    def drop_event(self, event: int, device: int) -> None:
        del self._events[event]

    def synchronize(self, stream: int, device: int) -> None:
        self.waits += 1
        while self._queue(device, stream):
            self._step()
        if self.broken is not None:
            raise self.broken

    # ---------------------------------------------------------------------------------------- kernels

    def kernel(self, spec: cuda.KernelSpec, device: int) -> Callable[..., None]:
        host = cuda.HostKernel(spec, compiled=self._compiled)

        def launch(stream: int, image: int, chunks: int, *scalars: Any) -> None:
            assert self._contexts[-1] == device
            self.launches.append((spec.name, chunks))

            def work() -> None:
                self._check_image(image, device)
                host(None, image, chunks, *scalars)

            self._put(device, stream, work)

        return launch

    def _check_image(self, image: int, device: int) -> None:
        """Every address in an image is of live memory that the device can reach."""
        block = self._check_live(image)
        words = (ctypes.c_uint64 * (block.nbytes // 8)).from_address(block.address)
        for word in words:
            found = self._block(word)
            if found is not None:
                assert found.live, f"a kernel of device {device} uses freed memory of device {found.device}"
                self._check(device, word, 0)

    # --------------------------------------------------------------------------------------- for tests

    def run_all(self) -> None:
        """Do all that is queued."""
        self._run_all()

    def in_use(self, device: int) -> int:
        """Bytes of a device that are allocated."""
        return sum(block.nbytes for block in self._blocks if block.live and block.device == device)

    def leftovers(self) -> dict[str, int]:
        """The resources that were not released."""
        self._run_all()
        live = [block for block in self._blocks if block.live]
        return {
            "bytes": sum(block.nbytes for block in live),
            "events": len(self._events),
            "streams": len(self._owned),
        }

    def assert_sound(self) -> None:
        """Check that no access wrote outside of the allocated memory."""
        self._run_all()
        assert all(block.is_sound() for block in self._blocks)

    # --------------------------------------------------------------------------------------- plumbing

    def _new(self, device: int, nbytes: int) -> _Block:
        block = _Block(device, nbytes)
        at = bisect.bisect(self._addresses, block.address)
        self._addresses.insert(at, block.address)
        self._blocks.insert(at, block)
        return block

    def _block(self, address: int) -> _Block | None:
        at = bisect.bisect(self._addresses, address) - 1
        if at < 0 or address >= self._blocks[at].address + max(1, self._blocks[at].nbytes):
            return None
        return self._blocks[at]

    def _check_live(self, address: int) -> _Block:
        block = self._block(address)
        assert block is None or block.live, (
            f"{block.nbytes} bytes of device {block.device} at {address:#x} are used after they went back"
        )
        return block  # type: ignore[return-value]

    def _check(self, device: int, address: int, nbytes: int) -> None:
        """Memory of another device is used only where a way is open, and never beyond its end."""
        block = self._block(address)
        if block is None:
            return
        assert block.live
        assert address + nbytes <= block.address + block.nbytes
        assert block.device in (_HOST, device) or (device, block.device) in self._opened

    def _end(self, address: int, device: int) -> None:
        block = self._block(address)
        assert block is not None and block.live and block.device == device and block.address == address
        assert block.is_sound()
        block.live = False
        block.poison()

    def _queue(self, device: int, stream: int) -> deque[Callable[[], bool]]:
        assert stream in (1, 2) or stream in self._owned or stream >= 1 << 40, "an unknown stream"
        return self._streams.setdefault((device, stream), deque())

    def _put(self, device: int, stream: int, work: Callable[[], Any]) -> None:
        def run() -> bool:
            work()
            return True

        self._queue(device, stream).append(run)

    def _step(self) -> None:
        """Run one operation of some stream that can continue."""
        queues = [queue for queue in self._streams.values() if queue]
        self._random.shuffle(queues)
        for queue in queues:
            if queue[0]():
                queue.popleft()
                return
        assert not queues, "streams wait for each other"

    def _run_all(self) -> None:
        while any(self._streams.values()):
            self._step()


def _one_thread_at_a_time(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def locked(self: LazyDriver, *arguments: Any, **options: Any) -> Any:
        with self._lock:
            return method(self, *arguments, **options)

    return locked


for _name, _method in list(vars(LazyDriver).items()):
    if callable(_method) and _name not in ("__init__", "on", "enter", "leave"):
        setattr(LazyDriver, _name, _one_thread_at_a_time(_method))

#: Streams of users, which the driver has not made.
_user_streams = itertools.count(1 << 40)


class GpuArray:
    """An array on a fake GPU with ``__cuda_array_interface__`` and nothing else.

    Its content is written on its stream, which is the caller's current one if it is given.
    """

    def __init__(
        self,
        driver: LazyDriver,
        content: Any,
        device: int = 0,
        stream: int | None = None,
        readonly: bool = False,
        offset: int = 0,
    ) -> None:
        array = np.ascontiguousarray(content).reshape(np.shape(content))
        self._driver, self.device, self.stream, self._readonly = driver, device, stream, readonly
        self.shape, self.dtype = array.shape, array.dtype
        self._strides: tuple[int, ...] | None = None
        self._base = driver.allocate(device, array.nbytes + offset) if array.nbytes else 0
        self.address = self._base + offset if array.nbytes else 0
        if array.nbytes:
            driver.copy(self.address, array.ctypes.data, array.nbytes, stream or 1, device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": "<V2" if self.dtype.name == "bfloat16" else self.dtype.str,
            "data": (self.address, self._readonly),
            "strides": self._strides,
            "version": 3,
            "stream": self.stream,
        }

    def get(self) -> Array:
        """Wait as the array's owner would, on its stream, and copy."""
        array = np.empty(self.shape, self.dtype)
        if array.nbytes:
            self._driver.copy(array.ctypes.data, self.address, array.nbytes, self.stream or 1, self.device)
            self._driver.synchronize(self.stream or 1, self.device)
        return array

    def set(self, content: Any) -> None:
        """Write on the array's stream."""
        array = np.ascontiguousarray(content, self.dtype)
        if array.nbytes:
            self._driver.copy(self.address, array.ctypes.data, array.nbytes, self.stream or 1, self.device)

    def release(self) -> None:
        """Give the memory back."""
        if self._base:
            self._driver.free(self.device, self._base)
        self._base = self.address = 0


def new_stream() -> int:
    """Name a stream of the user's."""
    return next(_user_streams)


@contextmanager
def installed(count: int) -> Iterator[LazyDriver]:
    """Put such a driver in the place of the process's own; at the end it must have been used soundly."""
    made = LazyDriver(count=count)
    before = driver.replace_driver(made)
    yield made
    driver.replace_driver(before)
    made.assert_sound()
