"""The calls of the CUDA driver: no other module calls the driver.

Addresses, streams and events are plain integers. `get_driver` makes the `CudaDriver` of the process at the
first array on a GPU; tests replace it with `replace_driver`.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import ArrayError, KVStoreError, MissingBackendError
from ..settings.environment import text_of

log = logging.getLogger("kvstore.device")

#: The legacy default stream, as the driver and DLPack number it.
LEGACY_STREAM = 1

#: Called as ``kernel(stream, image address, chunks, *scalars)`` with the current device of the thread.
Kernel = Callable[..., None]

#: Size in bytes of a handle of memory for other processes.
IPC_HANDLE_BYTES = 64

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NOT_READY = 600
_OUT_OF_MEMORY = 2
_PEER_ENABLED = 704


class CudaDriver:
    """The CUDA driver by cuda-bindings; kernels by `kvstore.kernels.cuda`.

    Raises
    ------
    MissingBackendError
        The ``cuda`` extra is not installed, or a driver or a GPU is missing.
    """

    def __init__(self) -> None:
        try:
            self._api: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise MissingBackendError(
                f"arrays on a GPU need the cuda extra: pip install 'kvstore-train[cuda]' ({error})"
            ) from error
        try:
            self._call_driver("cuInit", 0)
            self.count: int = self._call_driver("cuDeviceGetCount")
        except Exception as error:  # without a library, the bindings raise their own errors
            raise MissingBackendError(f"no usable NVIDIA driver or GPU was found: {error}") from error
        self.pid = os.getpid()
        self._contexts: dict[int, Any] = {}
        self._handles: dict[int, int] = {}
        self._kernels: dict[tuple[Any, int], Kernel] = {}
        self._peers: dict[tuple[int, int], bool] = {}
        self._lock = threading.Lock()

    # ---------------------------------------------------------------------------------------- devices

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Return a context in which the primary context of a device is current.

        At its end the old one is restored.
        """
        entered = self.enter(device)
        try:
            yield
        finally:
            if entered:
                self.leave()

    def enter(self, device: int) -> bool:
        """Make a device's context current; return False if it is already, else `leave` must follow."""
        context = self._contexts.get(device) or self._primary_context(device)
        status, current = self._api.cuCtxGetCurrent()
        if not status and int(current) == self._handles[device]:
            return False
        self._check_status("cuCtxGetCurrent", status)
        self._call_driver("cuCtxPushCurrent", context)
        return True

    def leave(self) -> None:
        """Restore the context that was current before `enter`."""
        self._call_driver("cuCtxPopCurrent")

    def reaches(self, device: int, other: int) -> bool:
        """Return whether kernels of `device` can use memory of `other`; enables peer access if possible."""
        if device == other:
            return True
        known = self._peers.get((device, other))
        if known is None:
            known = self._peers[device, other] = self._enable_peer_access(device, other)
        return known

    def device_of(self, address: int) -> int:
        """Return the number of the device that has this memory.

        Raises
        ------
        ArrayError
            The address is host memory.
        """
        names = self._api.CUpointer_attribute
        with self.on(0):
            kind = int(
                self._call_driver("cuPointerGetAttribute", names.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
            )
            if kind == 1:
                raise ArrayError("a __cuda_array_interface__ shows memory of the host; pass a host array")
            place = names.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
            return int(self._call_driver("cuPointerGetAttribute", place, address))

    def memory(self, device: int) -> tuple[int, int]:
        """Return the free bytes and all bytes of a device."""
        with self.on(device):
            free, total = self._call_driver("cuMemGetInfo")
        return int(free), int(total)

    # ----------------------------------------------------------------------------------------- memory

    def allocate(self, device: int, nbytes: int) -> int:
        """Return the address of new memory of a device.

        Raises
        ------
        MemoryError
        """
        return int(self._call_on(device, "cuMemAlloc", nbytes))

    def free(self, device: int, address: int) -> None:
        """Free memory that no work on the device uses any more."""
        self._call_on(device, "cuMemFree", address)

    def allocate_on_stream(self, device: int, nbytes: int, stream: int) -> int:
        """Allocate memory for work on one stream from the driver's pool, and return its address."""
        return int(self._call_on(device, "cuMemAllocAsync", nbytes, stream))

    def free_on_stream(self, device: int, address: int, stream: int) -> None:
        """Free memory of `allocate_on_stream`, in the order of the stream."""
        self._call_on(device, "cuMemFreeAsync", address, stream)

    def pin(self, nbytes: int) -> int:
        """Return the address of new host memory that devices can read and write."""
        with self.on(0):
            return int(self._call_driver("cuMemHostAlloc", nbytes, 1))  # portable: for all devices

    def unpin(self, address: int) -> None:
        """Free memory of `pin`."""
        self._call_on(0, "cuMemFreeHost", address)

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock whole pages of this process, so that devices can read and write them.

        Raises
        ------
        KVStoreError, MemoryError
            The driver cannot page-lock this memory, or this amount.
        """
        with self.on(0):
            self._call_driver("cuMemHostRegister", address, nbytes, 1)  # portable: for all devices

    def unregister(self, address: int) -> None:
        """Undo `register` at this address; no copy may be running."""
        self._call_on(0, "cuMemHostUnregister", address)

    def export(self, device: int, address: int) -> bytes:
        """Return a handle of memory of `allocate`, with which other processes can `open` it.

        Free the memory only after all of these processes have closed it.

        Raises
        ------
        KVStoreError
            The driver cannot export memory here.
        """
        with self.on(device):
            handle = self._call_driver("cuIpcGetMemHandle", address)
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)

    def open(self, device: int, name: bytes) -> int:
        """Return the address, for work on `device`, of memory that another process has exported.

        Raises
        ------
        KVStoreError, MemoryError
            The driver cannot open the memory here, or the memory was freed.
        """
        handle = self._api.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), name, IPC_HANDLE_BYTES)
        return int(self._call_on(device, "cuIpcOpenMemHandle", handle, _LAZY_PEER_ACCESS))

    def close(self, device: int, address: int) -> None:
        """Undo `open`, when no work on the device uses the memory any more."""
        self._call_on(device, "cuIpcCloseMemHandle", address)

    def copy(self, target: int, source: int, nbytes: int, stream: int, device: int) -> None:
        """Copy between two addresses, of which at most one is on a device, in the order of the stream."""
        self._call_on(device, "cuMemcpyAsync", target, source, nbytes, stream)

    def copy_between(
        self, target: tuple[int, int], source: tuple[int, int], nbytes: int, stream: int, device: int
    ) -> None:
        """Copy between two devices; each place is (device, address). The stream belongs to `device`."""
        to, at = self._primary_context(target[0]), self._primary_context(source[0])
        self._call_on(device, "cuMemcpyPeerAsync", target[1], to, source[1], at, nbytes, stream)

    def fill(self, target: int, byte: int, nbytes: int, stream: int, device: int) -> None:
        """Set all bytes of a piece of memory to one value, in the order of the stream."""
        self._call_on(device, "cuMemsetD8Async", target, byte, nbytes, stream)

    # ------------------------------------------------------------------------------ streams and events

    def stream(self, device: int) -> int:
        """Make a stream that does not synchronise with other streams."""
        return int(self._call_on(device, "cuStreamCreate", 1))

    def drop_stream(self, stream: int, device: int) -> None:
        """Destroy a stream; work on it is still completed."""
        self._call_on(device, "cuStreamDestroy", stream)

    def event(self, device: int) -> int:
        """Make an event that orders streams and measures no time."""
        return int(self._call_on(device, "cuEventCreate", _NO_TIMING))

    def record(self, event: int, stream: int, device: int) -> None:
        """Record the present end of a stream in an event."""
        self._call_on(device, "cuEventRecord", event, stream)

    def wait(self, stream: int, event: int, device: int) -> None:
        """Let later work on a stream of the device wait for an event."""
        self._call_on(device, "cuStreamWaitEvent", stream, event, 0)

    def is_done(self, event: int, device: int) -> bool:
        """Return whether an event is complete."""
        with self.on(device):
            (status,) = self._api.cuEventQuery(event)
        if int(status) == _NOT_READY:
            return False
        self._check_status("cuEventQuery", status)
        return True

    def finish(self, event: int, device: int) -> None:
        """Block until an event is complete."""
        self._call_on(device, "cuEventSynchronize", event)

    def drop_event(self, event: int, device: int) -> None:
        """Destroy an event, which need not be complete."""
        self._call_on(device, "cuEventDestroy", event)

    def synchronize(self, stream: int, device: int) -> None:
        """Block until a stream has no work left."""
        self._call_on(device, "cuStreamSynchronize", stream)

    # ---------------------------------------------------------------------------------------- kernels

    def kernel(self, spec: Any, device: int) -> Kernel:
        """Load a kernel: compiled at build time, found on disk, or compiled now."""
        known = self._kernels.get((spec, device))
        if known is None:
            with self.on(device):
                known = self._kernels[spec, device] = self._load_kernel(spec, device)
        return known

    @staticmethod
    def _load_kernel(spec: Any, device: int) -> Kernel:
        from cuda.core import Stream

        from ..kernels import cuda

        launch = cuda.load_kernel(spec, device)
        streams: dict[int, Any] = {}

        def kernel(stream: int, image: int, chunks: int, *scalars: Any) -> None:
            known = streams.get(stream)
            if known is None:
                known = streams[stream] = Stream.from_handle(stream)
            launch(known, image, chunks, *scalars)

        return kernel

    # --------------------------------------------------------------------------------------- helpers

    def _primary_context(self, device: int) -> Any:
        context = self._contexts.get(device)
        if context is None:
            with self._lock:
                context = self._contexts[device] = self._call_driver("cuDevicePrimaryCtxRetain", device)
                self._handles[device] = int(context)
        return context

    def _enable_peer_access(self, device: int, other: int) -> bool:
        if text_of("gpu_p2p") == "0":
            return False
        if not self._call_driver("cuDeviceCanAccessPeer", device, other):
            log.info("cuda:%d cannot reach the memory of cuda:%d; values are copied", device, other)
            return False
        peer = self._primary_context(other)
        with self.on(device):
            (status,) = self._api.cuCtxEnablePeerAccess(peer, 0)
        if int(status) != _PEER_ENABLED:
            self._check_status("cuCtxEnablePeerAccess", status)
        return True

    def _call_driver(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._api, name)(*arguments)
        if status:
            self._check_status(name, status)
        return results[0] if len(results) == 1 else results

    def _call_on(self, device: int, name: str, *arguments: Any) -> Any:
        with self.on(device):
            return self._call_driver(name, *arguments)

    def _check_status(self, name: str, status: Any) -> None:
        code = int(status)
        if code == 0:
            return
        if code == _OUT_OF_MEMORY:
            raise MemoryError(f"the GPU has no memory left ({name})")
        _, text = self._api.cuGetErrorString(status)
        reason = text.decode() if isinstance(text, bytes) else str(status)
        raise KVStoreError(
            f"{name}: the CUDA driver says {reason!r} (error {code}); an error of earlier work on the GPU "
            "may show only now"
        )


_driver: Any = None


def get_driver() -> CudaDriver:
    """Return the process's driver."""
    global _driver
    if _driver is None:
        _driver = CudaDriver()
    driver: CudaDriver = _driver
    if driver.pid != os.getpid():
        raise KVStoreError(
            "CUDA was in use when this process was forked, and cannot be used in the child; start it with "
            "spawn instead"
        )
    return driver


def replace_driver(driver: Any) -> Any:
    """Replace the driver, for tests; return the previous one."""
    global _driver
    _driver, before = driver, _driver
    return before
