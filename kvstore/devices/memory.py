"""Memory of stores on GPUs, and pinned host memory for uploads."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import deque
from typing import Any

import numpy.typing as npt

from .driver import CudaDriver

_SMALLEST = 4096


def may_free(driver: CudaDriver) -> bool:
    """Return whether the driver can be called: not in a forked child, nor at the interpreter's end."""
    return not sys.is_finalizing() and driver.pid == os.getpid()


class DeviceMemory:
    """Memory of one device; it is freed when the last reference is deleted."""

    __slots__ = ("__weakref__", "_driver", "address", "device", "nbytes")

    def __init__(self, driver: CudaDriver, device: int, nbytes: int) -> None:
        self._driver, self.device, self.nbytes = driver, device, nbytes
        self.address = 0
        self.address = driver.allocate(device, nbytes) if nbytes else 0

    def __del__(self) -> None:
        address, self.address = self.address, 0
        if address and may_free(self._driver):
            self._driver.free(self.device, address)


class PinnedMemory:
    """Pinned host memory in blocks; a block is free again when its copy is complete.

    The host never waits for a block: if none is free, a new block is allocated.
    """

    def __init__(self, driver: CudaDriver, device: int) -> None:
        self._driver, self._device = driver, device
        self._blocks: deque[tuple[int, int, int]] = deque()  # address, bytes, event; oldest copy first

    def upload(self, target: int, content: npt.NDArray[Any], stream: int) -> None:
        """Copy an array to a device in the order of the stream.

        The array can be changed when this returns.
        """
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
        """Free all blocks; all copies are complete."""
        while self._blocks:
            address, _, event = self._blocks.popleft()
            self._driver.drop_event(event, self._device)
            self._driver.unpin(address)


def host_copy(driver: CudaDriver, address: int, array: npt.NDArray[Any], stream: int, device: int) -> None:
    """Copy from a device to a contiguous host array, and wait for the copy."""
    if array.nbytes:
        driver.copy(array.ctypes.data, address, array.nbytes, stream, device)
        driver.synchronize(stream, device)
