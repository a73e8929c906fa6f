"""Streams: the current stream of the caller, and the order between streams."""

from __future__ import annotations

import os
import sys
from typing import Any

from .driver import LEGACY_STREAM, CudaDriver


class DeviceStream:
    """A stream of a device.

    Attributes
    ----------
    device, handle : int
    owner : object
        Keeps the stream alive; None if the stream can be destroyed at any time.
    """

    __slots__ = ("device", "handle", "owner")

    def __init__(self, device: int, handle: int, owner: Any = None) -> None:
        self.device = device
        self.handle = handle or LEGACY_STREAM
        self.owner = owner

    def __repr__(self) -> str:
        return f"<stream {self.handle:#x} of cuda:{self.device}>"


class StreamCursor:
    """The end of the store's work on a stream; other streams can wait for it.

    If the stream stays alive, an event is recorded only for a wait; it can include later work, and never less
    than the requested work. Else an event is recorded with each piece of work.
    """

    __slots__ = ("__weakref__", "_driver", "_eager", "_event", "stream")

    def __init__(self, driver: CudaDriver, stream: DeviceStream) -> None:
        self._driver, self.stream = driver, stream
        self._eager = stream.owner is None and stream.handle > 2  # the default streams always exist
        self._event = driver.event(stream.device)

    def note_work(self) -> None:
        """Record that the store has put new work on the stream."""
        if self._eager:
            self._driver.record(self._event, self.stream.handle, self.stream.device)

    def hold_stream(self, other: DeviceStream) -> None:
        """Let the stream `other` wait for the store's work on this stream."""
        mine = self.stream
        if not self._eager:
            if mine.handle == other.handle and mine.device == other.device:
                return
            self._driver.record(self._event, mine.handle, mine.device)
        self._driver.wait(other.handle, self._event, other.device)

    def finish(self) -> None:
        """Block until the store's work on this stream is complete."""
        if not self._eager:
            self._driver.record(self._event, self.stream.handle, self.stream.device)
        self._driver.finish(self._event, self.stream.device)

    def __del__(self) -> None:
        if not sys.is_finalizing() and self._driver.pid == os.getpid():
            self._driver.drop_event(self._event, self.stream.device)


def order_streams(driver: CudaDriver, first: DeviceStream | None, then: DeviceStream) -> None:
    """Let a stream wait for the present work on another one; None: for no work."""
    if first is not None and (first.device, first.handle) != (then.device, then.handle):
        tail = StreamCursor(driver, first)
        tail.note_work()
        tail.hold_stream(then)


def of_torch(device: int) -> DeviceStream:
    """Return PyTorch's current stream of a device; PyTorch never destroys its streams."""
    torch = sys.modules["torch"]
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    handle = raw(device) if raw is not None else torch.cuda.current_stream(device).cuda_stream
    return DeviceStream(device, handle, torch)


def of_cupy(device: int) -> DeviceStream:
    """Return CuPy's current stream of a device."""
    current = sys.modules["cupy"].cuda.get_current_stream(device)
    return DeviceStream(device, current.ptr, current)
