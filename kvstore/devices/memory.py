"""Memory of GPUs that the stores own, and pinned memory on its way up."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import deque
from typing import Any

import numpy.typing as npt

from .driver import Driver

_SMALLEST = 4096


def may_free(driver: Driver) -> bool:
    """Whether the driver can be asked: not in the child of a fork, nor at the end of the interpreter."""
    return not sys.is_finalizing() and driver.pid == os.getpid()


class Memory:
    """Bytes of one device; they go back when the last reference is gone."""

    __slots__ = ("__weakref__", "_driver", "address", "device", "nbytes")

    def __init__(self, driver: Driver, device: int, nbytes: int) -> None:
        self._driver, self.device, self.nbytes = driver, device, nbytes
        self.address = 0
        self.address = driver.allocate(device, nbytes) if nbytes else 0

    def __del__(self) -> None:
        address, self.address = self.address, 0
        if address and may_free(self._driver):
            self._driver.free(self.device, address)


class Pinned:
    """Pinned host memory in blocks, each free again when its copy has been made.

    The host never waits for a block: where none is free, there is one more.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver, self._device = driver, device
        self._blocks: deque[tuple[int, int, int]] = deque()  # address, bytes, event; oldest copy first

    def upload(self, target: int, content: npt.NDArray[Any], stream: int) -> None:
        """Copy an array to a device in the order of the stream; it may be changed when this returns."""
        nbytes = content.nbytes
        if not nbytes:
            return
        address, size, event = self._free_block(nbytes)
        self._blocks.append((address, size, event))
        ctypes.memmove(address, content.ctypes.data, nbytes)
        self._driver.copy(target, address, nbytes, stream, self._device)
        self._driver.record(event, stream, self._device)

    def _free_block(self, nbytes: int) -> tuple[int, int, int]:
        if self._blocks and self._blocks[0][1] >= nbytes:
            oldest = self._blocks[0]
            if self._driver.is_done(oldest[2], self._device):
                return self._blocks.popleft()
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        return self._driver.pin(size), size, self._driver.event(self._device)

    def close(self) -> None:
        """Give all blocks back; the copies have been made."""
        while self._blocks:
            address, _, event = self._blocks.popleft()
            self._driver.drop_event(event, self._device)
            self._driver.unpin(address)


def host_copy(driver: Driver, address: int, array: npt.NDArray[Any], stream: int, device: int) -> None:
    """Fill a contiguous host array from a device, and wait until it is there."""
    if array.nbytes:
        driver.copy(array.ctypes.data, address, array.nbytes, stream, device)
        driver.synchronize(stream, device)
