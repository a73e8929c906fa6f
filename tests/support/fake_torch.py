"""As much of PyTorch as the stores look at, with tensors on a fake GPU."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from lazy_driver import GpuArray, LazyDriver


class _Device:
    def __init__(self, index: int) -> None:
        self.index, self.type = index, "cuda"


class _Storage:
    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def nbytes(self) -> int:
        return self._nbytes


class Tensor:
    """A tensor; its memory holds the transposed values, or the values with the other sign."""

    def __init__(
        self,
        fake: Any,
        content: Any,
        device: int = 0,
        requires_grad: bool = False,
        transposed: bool = False,
        negated: bool = False,
    ) -> None:
        array = -np.asarray(content) if negated else np.asarray(content)
        stored = np.ascontiguousarray(array.T) if transposed else array
        self._fake, self._transposed = fake, transposed
        self._memory = GpuArray(fake.driver, stored, device, fake.current(device))
        self.device, self.is_cuda, self.requires_grad = _Device(device), True, requires_grad
        self.shape, self.layout, self.is_cpu = array.shape, "torch.strided", False
        self.nbytes, self.itemsize, self.negated = array.nbytes, array.itemsize, negated
        self.storage_bytes = array.nbytes
        self.dtype = f"torch.{array.dtype.name}"

    def data_ptr(self) -> int:
        return self._memory.address if self.storage_bytes else 0

    def untyped_storage(self) -> _Storage:
        if self.layout != "torch.strided":
            raise NotImplementedError("Cannot access storage")
        return _Storage(self.storage_bytes)

    def storage_offset(self) -> int:
        return 0

    def stride(self) -> tuple[int, ...]:
        steps = np.empty(self.shape[::-1] if self._transposed else self.shape, np.int8).strides
        return steps[::-1] if self._transposed else steps

    def is_complex(self) -> bool:
        return "complex" in self.dtype

    is_quantized = is_nested = False

    def get_device(self) -> int:
        return self.device.index

    def is_contiguous(self) -> bool:
        return not self._transposed

    def is_neg(self) -> bool:
        return self.negated

    def detach(self) -> Tensor:
        return self

    def resolve_neg(self) -> Tensor:
        return Tensor(self._fake, self.get(), self.device.index) if self.negated else self

    def contiguous(self) -> Tensor:
        return Tensor(self._fake, self.get(), self.device.index) if self._transposed else self

    def __setitem__(self, where: Any, other: Tensor) -> None:
        """Copy on the current stream; here in NumPy, when the driver runs it."""
        driver, stream = self._fake.driver, self._fake.current(self.device.index)
        target, source = self._memory, other._memory
        assert where is Ellipsis
        buffer = np.empty(other.shape, other._memory.dtype)
        driver.copy(buffer.ctypes.data, source.address, buffer.nbytes, stream, self.device.index)
        driver.synchronize(stream, self.device.index)
        turned = np.ascontiguousarray(buffer.T) if self._transposed else buffer
        turned = -turned if self.negated else turned
        driver.copy(target.address, turned.ctypes.data, turned.nbytes, stream, self.device.index)

    def get(self) -> Any:
        """Wait on the current stream, and copy to the host."""
        driver, device = self._fake.driver, self.device.index
        stream = self._fake.current(device)
        array = np.empty(self._memory.shape, self._memory.dtype)
        driver.copy(array.ctypes.data, self._memory.address, array.nbytes, stream, device)
        driver.synchronize(stream, device)
        array = -array if self.negated else array
        return array.T.copy() if self._transposed else array


class Parameter(Tensor):
    """As torch.nn.Parameter."""


Tensor.__module__ = "torch"
Parameter.__module__ = "torch.nn.parameter"


class FakeTorch(types.ModuleType):
    """The module, with a current stream for each device."""

    def __init__(self, driver: LazyDriver) -> None:
        super().__init__("torch")
        self.driver = driver
        self._streams: dict[int, int] = {}
        self._C = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda device: self._streams.get(device, 0))
        self.cuda = types.SimpleNamespace(
            stream=self.use, ExternalStream=lambda handle, device: (device, handle),
            default_stream=lambda device: (device, 0),
        )  # fmt: skip

    def current(self, device: int) -> int:
        return self._streams.get(device, 0) or 1

    @contextmanager
    def use(self, stream: tuple[int, int]) -> Iterator[None]:
        """Let a stream be the current one; a pair of device and handle."""
        device, handle = stream
        before = self._streams.get(device, 0)
        self._streams[device] = handle
        yield
        self._streams[device] = before

    def tensor(self, content: Any, **options: Any) -> Tensor:
        return Tensor(self, np.asarray(content, np.float32), **options)

    def empty(self, shape: tuple[int, ...], dtype: str, device: _Device) -> Tensor:
        return Tensor(self, np.full(shape, 77, np.dtype(dtype.partition(".")[2])), device.index)
