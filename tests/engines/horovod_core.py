"""Real Horovod without a framework, under the names of `horovod.torch` that the store calls.

`install` puts it in the place of `horovod.torch`, and a stand-in for the one function of PyTorch that the
store calls. The tests cover the store and Horovod's core, not Horovod's binding to PyTorch.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import horovod

_DTYPES = {"uint8": 0, "int8": 1, "int32": 4, "int64": 5, "float32": 7, "float64": 8}
_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


class HorovodInternalError(RuntimeError):
    """As Horovod's own."""


class _Core:
    """The library, and the arrays of the sums in flight."""

    Sum = "sum"

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.horovod_shim_error.restype = ctypes.c_char_p
        self.library.horovod_shim_broadcast.argtypes = [
            *(_POINTER, _INT64, _INT64),
            *(ctypes.c_int, ctypes.c_int, ctypes.c_char_p),
        ]
        self.library.horovod_is_initialized.restype = ctypes.c_bool
        self.library.horovod_init.restype = ctypes.c_bool
        self._arrays: dict[int, Any] = {}

    def init(self) -> None:
        if not self.library.horovod_init(None, 0, None, None, 0):
            raise ValueError("Horovod initialization failed")
        atexit.register(self.library.horovod_shutdown)

    def is_initialized(self) -> bool:
        return bool(self.library.horovod_is_initialized())

    def rank(self) -> int:
        return int(self.library.horovod_rank())

    def size(self) -> int:
        return int(self.library.horovod_size())

    def local_rank(self) -> int:
        return int(self.library.horovod_local_rank())

    def mpi_enabled(self) -> bool:
        return False

    def allreduce_async_(self, array: Any, name: str, op: str) -> int:
        return self.grouped_allreduce_async_([array], name, op)

    def grouped_allreduce_async_(self, arrays: Sequence[Any], name: str, op: str) -> int:
        assert op == self.Sum
        assert len({array.dtype for array in arrays}) == 1
        count = len(arrays)
        handle = self.library.horovod_shim_allreduce(
            (_POINTER * count)(*(array.ctypes.data for array in arrays)),
            (_INT64 * count)(*(array.size for array in arrays)),
            (_INT64 * count)(*(array.nbytes for array in arrays)),
            count,
            _DTYPES[arrays[0].dtype.name],
            f"allreduce.{name}".encode(),
        )
        return self._begun(handle, arrays)

    def broadcast_async_(self, array: Any, root_rank: int, name: str) -> int:
        handle = self.library.horovod_shim_broadcast(
            array.ctypes.data,
            array.size,
            array.nbytes,
            _DTYPES[array.dtype.name],
            root_rank,
            f"broadcast.{name}".encode(),
        )
        return self._begun(handle, array)

    def poll(self, handle: int) -> bool:
        return bool(self.library.horovod_shim_poll(handle))

    def synchronize(self, handle: int) -> None:
        assert self.poll(handle), "the store must not wait inside Horovod, where there is no deadline"
        failed = self.library.horovod_shim_take(handle)
        del self._arrays[handle]
        if failed:
            raise HorovodInternalError(self._error())

    def _begun(self, handle: int, arrays: Any) -> int:
        if handle < 0:
            raise HorovodInternalError(self._error())
        self._arrays[handle] = arrays
        return handle

    def _error(self) -> str:
        return self.library.horovod_shim_error().decode()


def install() -> None:
    """Make ``import horovod.torch`` and ``import torch`` find this module's stand-ins."""
    core = _Core(Path(os.environ["KVSTORE_TEST_HOROVOD_CORE"]) / "horovod_shim.so")
    binding: Any = types.ModuleType("horovod.torch")
    binding.HorovodInternalError = HorovodInternalError
    for name in dir(core):
        if not name.startswith("_"):
            setattr(binding, name, getattr(core, name))
    horovod.torch = binding
    framework: Any = types.ModuleType("torch")
    framework.from_numpy, framework.__version__ = lambda array: array, "a stand-in"
    sys.modules.update({"horovod.torch": binding, "torch": framework})
