"""Streams: on which one the caller works, and the order between several of them."""

from __future__ import annotations

import os
import sys
from typing import Any

from .driver import LEGACY_STREAM, Driver


class Stream:
    """A stream of a device.

    Attributes
    ----------
    device, handle : int
    owner : object
        Keeps the stream alive; None where nobody promises that it lives on.
    """

    __slots__ = ("device", "handle", "owner")

    def __init__(self, device: int, handle: int, owner: Any = None) -> None:
        self.device = device
        self.handle = handle or LEGACY_STREAM
        self.owner = owner

    def __repr__(self) -> str:
        return f"<stream {self.handle:#x} of cuda:{self.device}>"


class StreamCursor:
    """The end of what the store has put on a stream; others can wait for it.

    Where the stream lives on, an event is recorded only when somebody waits: it then stands for a little
    more than was asked, never for less. Else it is recorded with each piece of work.
    """

    __slots__ = ("__weakref__", "_driver", "_eager", "_event", "stream")

    def __init__(self, driver: Driver, stream: Stream) -> None:
        self._driver, self.stream = driver, stream
        self._eager = stream.owner is None and stream.handle > 2  # the default streams are always there
        self._event = driver.event(stream.device)

    def moved(self) -> None:
        """Say that there is new work at the end."""
        if self._eager:
            self._driver.record(self._event, self.stream.handle, self.stream.device)

    def hold(self, other: Stream) -> None:
        """Let `other` wait for what is here."""
        mine = self.stream
        if not self._eager:
            if mine.handle == other.handle and mine.device == other.device:
                return
            self._driver.record(self._event, mine.handle, mine.device)
        self._driver.wait(other.handle, self._event, other.device)

    def finish(self) -> None:
        """Block until what is here is done."""
        if not self._eager:
            self._driver.record(self._event, self.stream.handle, self.stream.device)
        self._driver.finish(self._event, self.stream.device)

    def __del__(self) -> None:
        if not sys.is_finalizing() and self._driver.pid == os.getpid():
            self._driver.drop_event(self._event, self.stream.device)


def order(driver: Driver, first: Stream | None, then: Stream) -> None:
    """Let a stream wait for what is on another one now; None: for nothing."""
    if first is not None and (first.device, first.handle) != (then.device, then.handle):
        tail = StreamCursor(driver, first)
        tail.moved()
        tail.hold(then)


def of_torch(device: int) -> Stream:
    """PyTorch's current stream of a device; PyTorch never destroys its streams."""
    torch = sys.modules["torch"]
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    handle = raw(device) if raw is not None else torch.cuda.current_stream(device).cuda_stream
    return Stream(device, handle, torch)


def of_cupy(device: int) -> Stream:
    """CuPy's current stream of a device."""
    current = sys.modules["cupy"].cuda.get_current_stream(device)
    return Stream(device, current.ptr, current)
