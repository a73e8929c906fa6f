"""The state of a store on one GPU: the end of its work on each stream, uploads, temporary memory."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy.typing as npt

from .driver import CudaDriver
from .memory import PinnedMemory, may_free
from .streams import DeviceStream, StreamCursor


class GpuContext:
    """A GPU, with the store's work in progress there."""

    def __init__(self, driver: CudaDriver, device: int) -> None:
        self.driver, self.device = driver, device
        self._tails: weakref.WeakValueDictionary[int, StreamCursor] = weakref.WeakValueDictionary()
        self._last: StreamCursor | None = None
        #: Increased whenever the last work on a key can be on another stream than before.
        self.moves = 0
        self._pinned = PinnedMemory(driver, device)
        self._loans: weakref.WeakSet[StreamBuffer] = weakref.WeakSet()
        self._kept: deque[tuple[int, list[Any]]] = deque()  # event, objects; oldest first
        #: A stream of the store; temporary memory is freed in its order.
        self.own = DeviceStream(device, driver.stream(device), self)

    def stream_cursor(self, stream: DeviceStream) -> StreamCursor:
        """Return the end of the store's work on a stream.

        The same object as long as a reference to it exists.
        """
        last = self._last
        if last is not None and last.stream.handle == stream.handle:
            return last
        tail = self._tails.get(stream.handle)
        if tail is None:
            tail = self._tails[stream.handle] = StreamCursor(self.driver, stream)
        self._last = tail
        return tail

    def upload(self, target: int, content: npt.NDArray[Any], stream: DeviceStream) -> None:
        """Copy a host array to the GPU, in the order of the stream.

        The array can be changed when this returns.
        """
        self._pinned.upload(target, content, stream.handle)

    def hold_references(self, objects: list[Any], stream: DeviceStream) -> None:
        """Keep references to objects until the present work on the stream is complete."""
        self._drop_done()
        event = self.driver.event(self.device)
        self._kept.append((event, objects))
        self.driver.record(event, stream.handle, self.device)

    def _drop_done(self) -> None:
        while self._kept and self.driver.is_done(self._kept[0][0], self.device):
            event, _ = self._kept.popleft()
            self.driver.drop_event(event, self.device)

    def allocate_temporary(self, nbytes: int, stream: DeviceStream) -> int:
        """Return the address of temporary memory for later work on a stream; see `free_temporary`."""
        return self.driver.allocate_on_stream(self.device, nbytes, stream.handle) if nbytes else 0

    def free_temporary(self, address: int, stream: DeviceStream) -> None:
        """Free memory of `allocate_temporary`, in the order of the stream."""
        if address:
            self.driver.free_on_stream(self.device, address, stream.handle)

    def register_loan(self, loan: StreamBuffer) -> None:
        """Register temporary memory, which is freed at the latest when the store is closed."""
        self._loans.add(loan)

    def close(self) -> None:
        """Wait for the store's work and free all memory."""
        self._last = None
        for tail in list(self._tails.values()):
            tail.finish()
        while self._kept:
            event, _ = self._kept.popleft()
            self.driver.finish(event, self.device)
            self.driver.drop_event(event, self.device)
        for loan in list(self._loans):
            loan.end()
        self._pinned.close()
        self.driver.synchronize(self.own.handle, self.device)
        self.driver.drop_stream(self.own.handle, self.device)


class StreamBuffer:
    """Memory from the driver's pool that several pieces of work use, one after the other.

    It is freed, without a wait of the host, when the last of them is complete.
    """

    __slots__ = ("__weakref__", "_place", "address", "nbytes", "tail")

    def __init__(self, place: GpuContext, nbytes: int, stream: DeviceStream) -> None:
        self._place, self.nbytes = place, nbytes
        #: The end of the stream that used it last.
        self.tail = place.stream_cursor(stream)
        self.address = 0
        self.address = place.allocate_temporary(nbytes, stream)
        place.register_loan(self)

    def end(self) -> None:
        """Free the memory when its present work is complete."""
        address, self.address = self.address, 0
        place = self._place
        if address and may_free(place.driver):
            self.tail.hold_stream(place.own)
            place.free_temporary(address, place.own)

    def __del__(self) -> None:
        self.end()
