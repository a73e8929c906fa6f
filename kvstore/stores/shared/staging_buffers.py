"""Buffers in the region for copies to and from GPUs: page-locked if the driver can, and reused.

The memory is that of `KVStore.empty`, so a round uses it like that: workers read and write it in place.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...arrays.grouping import Key
from ...devices.driver import CudaDriver
from ...devices.memory import may_free
from ...devices.streams import DeviceStream
from ...errors import KVStoreError
from ..entry import Array
from .native import _shared as shm

log = logging.getLogger("kvstore.shared")

_PAGE = mmap.PAGESIZE
_CHUNK = 1 << 20  # bytes that small arrays share
_LINE = 256  # bytes: the alignment of arrays in a chunk
_MOST = 3  # buffers of a key before the host waits for one


class PinnedArena:
    """Arrays in the region, on pages that the driver has locked, if it can."""

    def __init__(self, job: shm.Job, driver: CudaDriver) -> None:
        self._job, self._driver = job, driver
        self._locked: list[int] = []
        #: The driver's reason why pages are not locked; None if they are.
        self.refusal: str | None = None
        self._rest = self._page_chunk(_CHUNK)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array in memory that belongs to the arena until `close`."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > _CHUNK // 4:
            return self._page_chunk(nbytes).view(dtype).reshape(shape)
        taken = -(-max(nbytes, 1) // _LINE) * _LINE
        if self._rest.size < taken:
            self._rest = self._page_chunk(_CHUNK)
        part, self._rest = self._rest[:nbytes], self._rest[taken:]
        return part.view(dtype).reshape(shape)

    def _page_chunk(self, nbytes: int) -> Array:
        """Return bytes on pages that hold nothing else; the region chooses their offset in a page."""
        chunk = self._job.empty((nbytes + 2 * _PAGE,), np.dtype(np.uint8))[_PAGE : _PAGE + nbytes]
        if self.refusal is None:
            start = chunk.ctypes.data // _PAGE * _PAGE
            end = -(-(chunk.ctypes.data + nbytes) // _PAGE) * _PAGE
            self._lock_pages(start, end - start)
        return chunk

    def _lock_pages(self, start: int, nbytes: int) -> None:
        try:
            self._driver.register(start, nbytes)
        except (KVStoreError, MemoryError) as error:
            self.refusal = str(error)
            if self._locked:
                log.info("from now on, copies to and from GPUs use pages that are not locked: %s", error)
        else:
            self._locked.append(start)

    def close(self) -> None:
        """Unlock all pages; no copy is in progress."""
        while self._locked:
            self._driver.unregister(self._locked.pop())


class StagingBuffer:
    """An array of the arena, and its users: a round, a call, or copies on GPUs."""

    __slots__ = ("_driver", "_events", "array", "held", "in_use", "round")

    def __init__(self, driver: CudaDriver, array: Array) -> None:
        self._driver, self.array = driver, array
        self._events: dict[int, int] = {}  # device -> event behind the last copy there
        #: The last round that reads or writes it.
        self.round = 0
        self.in_use = False
        #: An object that a copy in progress needs.
        self.held: Any = None

    def note_copy(self, stream: DeviceStream, held: Any = None) -> None:
        """Record that a copy was put on a stream."""
        event = self._events.get(stream.device)
        if event is None:
            event = self._events[stream.device] = self._driver.event(stream.device)
        self.held = held
        self._driver.record(event, stream.handle, stream.device)

    def hold_stream(self, stream: DeviceStream) -> None:
        """Let a stream wait for the copies so far."""
        for event in self._events.values():
            self._driver.wait(stream.handle, event, stream.device)

    def is_idle(self) -> bool:
        """Return whether no copy is in progress."""
        return all(self._driver.is_done(event, device) for device, event in self._events.items())

    def wait_until_idle(self) -> None:
        """Wait until no copy is in progress."""
        for device, event in self._events.items():
            self._driver.finish(event, device)

    def close(self) -> None:
        """Wait for the copies, and free the events."""
        self.wait_until_idle()
        while self._events:
            device, event = self._events.popitem()
            self._driver.drop_event(event, device)
        self.held = None


class BufferLease:
    """A buffer in use by a call, until its last reference is dropped."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: StagingBuffer) -> None:
        self.buffer = buffer
        buffer.in_use = True

    @property
    def array(self) -> Array:
        """The array of the buffer."""
        return self.buffer.array

    def __del__(self) -> None:
        self.buffer.in_use = False


class StagingBuffers:
    """The buffers of all keys: for each key as many as are in use at once."""

    def __init__(self, job: shm.Job, driver: CudaDriver) -> None:
        self._driver, self.arena = driver, PinnedArena(job, driver)
        self._made: dict[tuple[Key, str], list[StagingBuffer]] = {}

    def for_copy(self, handle: shm.Handle, stream: DeviceStream) -> BufferLease:
        """Lease a buffer for a copy on this stream; the host does not wait."""
        free = list(self._free_buffer(handle, handle.dtype))
        found = next((one for one in free if one.is_idle()), free[0] if free else None)
        lease = BufferLease(found or self._new_buffer(handle, handle.dtype))
        lease.buffer.hold_stream(stream)
        return lease

    def for_host(self, handle: shm.Handle, dtype: np.dtype[Any]) -> BufferLease:
        """Lease a buffer that processes may write now; waits for a copy only if many are in progress."""
        free = list(self._free_buffer(handle, dtype))
        found = next((one for one in free if one.is_idle()), None)
        if found is None and free and len(self._made[handle.key, dtype.name]) >= _MOST:
            found = free[0]
            found.wait_until_idle()
        return BufferLease(found or self._new_buffer(handle, dtype))

    def _free_buffer(self, handle: shm.Handle, dtype: np.dtype[Any]) -> Iterator[StagingBuffer]:
        complete = handle.complete
        made = self._made.get((handle.key, dtype.name), ())
        return (one for one in made if not one.in_use and one.round <= complete)

    def _new_buffer(self, handle: shm.Handle, dtype: np.dtype[Any]) -> StagingBuffer:
        made = StagingBuffer(self._driver, self.arena.array(handle.shape, dtype))
        self._made.setdefault((handle.key, dtype.name), []).append(made)
        return made

    def close(self) -> None:
        """Wait for all copies, and unlock the memory. A second call does nothing."""
        if not may_free(self._driver):
            return
        try:
            for made in self._made.values():
                for buffer in made:
                    buffer.close()
        finally:
            self._made.clear()
            self.arena.close()
