"""Memory with guards and a kernel to run on it: on the processor, compiled or interpreted, or on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.kernels.cuda import HostKernel, KernelRow, KernelSpec, launch_image, load_kernel

Array = npt.NDArray[Any]

GUARD = 64  # bytes before and behind each array that no access may touch
_GUARDED, POISON = 0xC7, 0xA5
_LINE = 64


class Place(Protocol):
    """An array that a kernel can reach."""

    address: int

    def read(self) -> Array:
        """Return a copy of the array; raise if a guard was overwritten."""


class Target(Protocol):
    """Where kernels run."""

    def put(self, values: Array, offset: int = 0) -> Place:
        """Copy an array to a place that begins `offset` elements behind a multiple of 64 bytes."""

    def run(self, spec: KernelSpec, rows: Sequence[KernelRow], *scalars: Any) -> None:
        """Launch, and wait."""


def fresh(target: Target, n: int, dtype: Any, offset: int = 0) -> Place:
    """Place full of poison, for results."""
    size = np.dtype(dtype).itemsize
    return target.put(np.full(n * size, POISON, np.uint8).view(dtype), offset)


def _guarded(values: Array) -> Array:
    fence = np.full(GUARD, _GUARDED, np.uint8)
    return np.concatenate([fence, np.ascontiguousarray(values).reshape(-1).view(np.uint8), fence])


def _opened(memory: Array, dtype: np.dtype[Any]) -> Array:
    assert (memory[:GUARD] == _GUARDED).all(), "something was written before an array"
    assert (memory[-GUARD:] == _GUARDED).all(), "something was written behind an array"
    return memory[GUARD:-GUARD].copy().view(dtype)


class HostPlace:
    """Memory of this process."""

    def __init__(self, values: Array, offset: int) -> None:
        self._dtype = values.dtype
        content = _guarded(values)
        self._memory = np.empty(content.size + 2 * _LINE + offset * values.itemsize, np.uint8)
        start = -(self._memory.ctypes.data + GUARD) % _LINE + offset * values.itemsize
        self._part = self._memory[start : start + content.size]
        self._part[:] = content
        self.address = self._part.ctypes.data + GUARD

    def read(self) -> Array:
        return _opened(self._part, self._dtype)


class HostTarget:
    """The processor."""

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled

    def put(self, values: Array, offset: int = 0) -> HostPlace:
        return HostPlace(values, offset)

    def run(self, spec: KernelSpec, rows: Sequence[KernelRow], *scalars: Any) -> None:
        words, chunks = launch_image(spec, rows)
        HostKernel(spec, self.compiled)(None, words.ctypes.data, chunks, *scalars)


class DevicePlace:
    """Memory of a device, made and read through the driver's plainest calls."""

    def __init__(self, values: Array, offset: int) -> None:
        self._dtype = values.dtype
        content = _guarded(values)
        self._bytes = content.size
        before = offset * values.itemsize
        self._base = _driver("cuMemAlloc", content.size + 2 * _LINE + before)
        start = -(int(self._base) + GUARD) % _LINE + before
        self._start = int(self._base) + start
        _driver("cuMemcpyHtoD", self._start, content.ctypes.data, content.size)
        self.address = self._start + GUARD

    def read(self) -> Array:
        memory = np.empty(self._bytes, np.uint8)
        _driver("cuMemcpyDtoH", memory.ctypes.data, self._start, memory.size)
        return _opened(memory, self._dtype)

    def free(self) -> None:
        _driver("cuMemFree", self._base)


def _driver(call: str, *arguments: Any) -> Any:
    from cuda.bindings import driver

    error, *results = getattr(driver, call)(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{call}{arguments}: {error}")
    return results[0] if results else None


class DeviceTarget:
    """A device, real or fake; close it."""

    def __init__(self, ordinal: int = 0) -> None:
        from cuda.core import Device

        self.device = Device(ordinal)
        self.device.set_current()
        self.stream = self.device.create_stream()
        self._places: list[DevicePlace] = []

    def put(self, values: Array, offset: int = 0) -> DevicePlace:
        place = DevicePlace(values, offset)
        self._places.append(place)
        return place

    def run(self, spec: KernelSpec, rows: Sequence[KernelRow], *scalars: Any) -> None:
        words, chunks = launch_image(spec, rows)
        place = self.put(words)
        load_kernel(spec, self.device)(self.stream, place.address, chunks, *scalars)
        self.stream.sync()

    def close(self) -> None:
        for place in self._places:
            place.free()
        self._places.clear()
        self.stream.close()
