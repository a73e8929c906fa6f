"""Arrays of a real GPU for tests marked `gpu`, without any framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.devices import driver
from kvstore.errors import MissingBackendError

Array = npt.NDArray[Any]


def needs_gpu() -> None:
    """Skip the test where there is none."""
    try:
        driver.get_driver()
    except MissingBackendError as error:
        pytest.skip(str(error))


class RealArray:
    """An array with ``__cuda_array_interface__``, between guard zones, and poisoned before it is written."""

    _GUARD = 256
    _POISON = 0xA5

    def __init__(
        self,
        content: Any,
        device: int = 0,
        stream: int | None = None,
        readonly: bool = False,
        offset: int = 0,
    ) -> None:
        array = np.ascontiguousarray(content).reshape(np.shape(content))
        self._driver, self.device, self.stream, self._readonly = driver.get_driver(), device, stream, readonly
        self.shape, self.dtype, self._offset = array.shape, array.dtype, offset
        self._size = array.nbytes + offset + 2 * self._GUARD
        self._base = self._driver.allocate(device, self._size)
        self.address = self._base + self._GUARD + offset
        self._driver.fill(self._base, self._POISON, self._size, stream or 1, device)
        self.set(array)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": "<V2" if self.dtype.name == "bfloat16" else self.dtype.str,
            "data": (self.address, self._readonly),
            "strides": None,
            "version": 3,
            "stream": self.stream,
        }

    def get(self) -> Array:
        """Wait on the array's stream, copy, and look at the guard zones."""
        whole = np.empty(self._size, np.uint8)
        handle = self.stream or 1
        self._driver.copy(whole.ctypes.data, self._base, self._size, handle, self.device)
        self._driver.synchronize(handle, self.device)
        start = self._GUARD + self._offset
        end = start + self._nbytes()
        assert (whole[:start] == self._POISON).all()
        assert (whole[end:] == self._POISON).all()
        return whole[start:end].copy().view(self.dtype).reshape(self.shape)

    def set(self, content: Any) -> None:
        """Write on the array's stream."""
        array = np.ascontiguousarray(content, self.dtype)
        if array.nbytes:
            self._driver.copy(self.address, array.ctypes.data, array.nbytes, self.stream or 1, self.device)

    def _nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def release(self) -> None:
        """Give the memory back."""
        if self._base:
            self._driver.free(self.device, self._base)
        self._base = 0

    def __del__(self) -> None:
        self.release()
