"""What the stores ask of the CUDA driver, and nothing else asks the driver.

Addresses, streams and events are plain integers. `get` makes the one `Driver` of the process when the first
array of a GPU is met; a test may put another one in its place with `use`.
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

#: The stream that all others wait for, as the driver and DLPack name it.
LEGACY_STREAM = 1

#: Called as ``kernel(stream, image address, chunks, *scalars)``, where the device is the thread's.
Kernel = Callable[..., None]

#: Bytes of what names memory between processes.
IPC_HANDLE_BYTES = 64

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NOT_READY = 600
_OUT_OF_MEMORY = 2
_PEER_ENABLED = 704


class Driver:
    """The CUDA driver by cuda-bindings; kernels by `kvstore.kernels.cuda`.

    Raises
    ------
    MissingBackendError
        The ``cuda`` extra is not installed, or there is no driver or no GPU.
    """

    def __init__(self) -> None:
        try:
            self._api: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise MissingBackendError(
                f"arrays on a GPU need the cuda extra: pip install 'kvstore-train[cuda]' ({error})"
            ) from error
        try:
            self._call("cuInit", 0)
            self.count: int = self._call("cuDeviceGetCount")
        except Exception as error:  # where there is no library at all, the bindings raise errors of their own
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
        """Make a device's primary context the thread's; afterwards the old one is back."""
        entered = self.enter(device)
        try:
            yield
        finally:
            if entered:
                self.leave()

    def enter(self, device: int) -> bool:
        """Begin what `on` does: False if the context is there already, else `leave` must follow."""
        context = self._contexts.get(device) or self._context(device)
        status, current = self._api.cuCtxGetCurrent()
        if not status and int(current) == self._handles[device]:
            return False
        self._check("cuCtxGetCurrent", status)
        self._call("cuCtxPushCurrent", context)
        return True

    def leave(self) -> None:
        """Put back the context that was the thread's before `enter`."""
        self._call("cuCtxPopCurrent")

    def reaches(self, device: int, other: int) -> bool:
        """Whether kernels of `device` can use memory of `other`; opens the way where there is one."""
        if device == other:
            return True
        known = self._peers.get((device, other))
        if known is None:
            known = self._peers[device, other] = self._open_way(device, other)
        return known

    def device_of(self, address: int) -> int:
        """Return the number of the device whose memory this is.

        Raises
        ------
        ArrayError
            It is memory of the host.
        """
        names = self._api.CUpointer_attribute
        with self.on(0):
            kind = int(self._call("cuPointerGetAttribute", names.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address))
            if kind == 1:
                raise ArrayError("a __cuda_array_interface__ shows memory of the host; pass a host array")
            place = names.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
            return int(self._call("cuPointerGetAttribute", place, address))

    def memory(self, device: int) -> tuple[int, int]:
        """Bytes of a device that are free, and all of them."""
        with self.on(device):
            free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    # ----------------------------------------------------------------------------------------- memory

    def allocate(self, device: int, nbytes: int) -> int:
        """Address of new memory of a device.

        Raises
        ------
        MemoryError
        """
        return int(self._on(device, "cuMemAlloc", nbytes))

    def free(self, device: int, address: int) -> None:
        """Give memory back, once the device has done with it."""
        self._on(device, "cuMemFree", address)

    def lend(self, device: int, nbytes: int, stream: int) -> int:
        """Address of memory for work on one stream, from the driver's pool."""
        return int(self._on(device, "cuMemAllocAsync", nbytes, stream))

    def take_back(self, device: int, address: int, stream: int) -> None:
        """End a loan when the stream comes to this point."""
        self._on(device, "cuMemFreeAsync", address, stream)

    def pin(self, nbytes: int) -> int:
        """Address of new host memory that devices read and write by themselves."""
        with self.on(0):
            return int(self._call("cuMemHostAlloc", nbytes, 1))  # portable: for all devices

    def unpin(self, address: int) -> None:
        """Give back what `pin` has returned."""
        self._on(0, "cuMemFreeHost", address)

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock whole pages of this process, so that devices read and write them by themselves.

        Raises
        ------
        KVStoreError, MemoryError
            The driver does not do that with this memory, or not with so much.
        """
        with self.on(0):
            self._call("cuMemHostRegister", address, nbytes, 1)  # portable: for all devices

    def unregister(self, address: int) -> None:
        """End what `register` began at this address; no copy may be under way."""
        self._on(0, "cuMemHostUnregister", address)

    def export(self, device: int, address: int) -> bytes:
        """Name memory that `allocate` made, so that other processes can `open` it.

        It may be freed when all of them have closed it, and not before.

        Raises
        ------
        KVStoreError
            The driver does not do that here.
        """
        with self.on(device):
            handle = self._call("cuIpcGetMemHandle", address)
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)

    def open(self, device: int, name: bytes) -> int:
        """Address, for work on `device`, of memory that another process has exported.

        Raises
        ------
        KVStoreError, MemoryError
            The driver does not do that here, or the memory is gone.
        """
        handle = self._api.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), name, IPC_HANDLE_BYTES)
        return int(self._on(device, "cuIpcOpenMemHandle", handle, _LAZY_PEER_ACCESS))

    def close(self, device: int, address: int) -> None:
        """End what `open` began, once the device has done with it."""
        self._on(device, "cuIpcCloseMemHandle", address)

    def copy(self, target: int, source: int, nbytes: int, stream: int, device: int) -> None:
        """Copy between any two places but two devices, in the order of the stream."""
        self._on(device, "cuMemcpyAsync", target, source, nbytes, stream)

    def copy_between(
        self, target: tuple[int, int], source: tuple[int, int], nbytes: int, stream: int, device: int
    ) -> None:
        """Copy between two devices; each place is (device, address). `device` is the stream's."""
        to, at = self._context(target[0]), self._context(source[0])
        self._on(device, "cuMemcpyPeerAsync", target[1], to, source[1], at, nbytes, stream)

    def fill(self, target: int, byte: int, nbytes: int, stream: int, device: int) -> None:
        """Set all bytes of a piece of memory to one value, in the order of the stream."""
        self._on(device, "cuMemsetD8Async", target, byte, nbytes, stream)

    # ------------------------------------------------------------------------------ streams and events

    def stream(self, device: int) -> int:
        """Make a stream that waits for no other."""
        return int(self._on(device, "cuStreamCreate", 1))

    def drop_stream(self, stream: int, device: int) -> None:
        """Give back a stream; what is on it is still done."""
        self._on(device, "cuStreamDestroy", stream)

    def event(self, device: int) -> int:
        """Make an event that orders streams and measures no time."""
        return int(self._on(device, "cuEventCreate", _NO_TIMING))

    def record(self, event: int, stream: int, device: int) -> None:
        """Let an event stand for all that is on a stream now."""
        self._on(device, "cuEventRecord", event, stream)

    def wait(self, stream: int, event: int, device: int) -> None:
        """Let what follows on a stream, which is the device's, wait for an event."""
        self._on(device, "cuStreamWaitEvent", stream, event, 0)

    def is_done(self, event: int, device: int) -> bool:
        """Whether the device has come to an event."""
        with self.on(device):
            (status,) = self._api.cuEventQuery(event)
        if int(status) == _NOT_READY:
            return False
        self._check("cuEventQuery", status)
        return True

    def finish(self, event: int, device: int) -> None:
        """Block until the device has come to an event."""
        self._on(device, "cuEventSynchronize", event)

    def drop_event(self, event: int, device: int) -> None:
        """Give back an event, which need not have come."""
        self._on(device, "cuEventDestroy", event)

    def synchronize(self, stream: int, device: int) -> None:
        """Block until a stream has nothing left to do."""
        self._on(device, "cuStreamSynchronize", stream)

    # ---------------------------------------------------------------------------------------- kernels

    def kernel(self, spec: Any, device: int) -> Kernel:
        """Load a kernel, built ahead, found on disk, or compiled now."""
        known = self._kernels.get((spec, device))
        if known is None:
            with self.on(device):
                known = self._kernels[spec, device] = self._load(spec, device)
        return known

    @staticmethod
    def _load(spec: Any, device: int) -> Kernel:
        from cuda.core import Stream

        from ..kernels import cuda

        launch = cuda.load(spec, device)
        streams: dict[int, Any] = {}

        def kernel(stream: int, image: int, chunks: int, *scalars: Any) -> None:
            known = streams.get(stream)
            if known is None:
                known = streams[stream] = Stream.from_handle(stream)
            launch(known, image, chunks, *scalars)

        return kernel

    # --------------------------------------------------------------------------------------- plumbing

    def _context(self, device: int) -> Any:
        context = self._contexts.get(device)
        if context is None:
            with self._lock:
                context = self._contexts[device] = self._call("cuDevicePrimaryCtxRetain", device)
                self._handles[device] = int(context)
        return context

    def _open_way(self, device: int, other: int) -> bool:
        if text_of("gpu_p2p") == "0":
            return False
        if not self._call("cuDeviceCanAccessPeer", device, other):
            log.info("cuda:%d cannot reach the memory of cuda:%d; values are copied", device, other)
            return False
        peer = self._context(other)
        with self.on(device):
            (status,) = self._api.cuCtxEnablePeerAccess(peer, 0)
        if int(status) != _PEER_ENABLED:
            self._check("cuCtxEnablePeerAccess", status)
        return True

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._api, name)(*arguments)
        if status:
            self._check(name, status)
        return results[0] if len(results) == 1 else results

    def _on(self, device: int, name: str, *arguments: Any) -> Any:
        with self.on(device):
            return self._call(name, *arguments)

    def _check(self, name: str, status: Any) -> None:
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


def get() -> Driver:
    """Return the process's driver."""
    global _driver
    if _driver is None:
        _driver = Driver()
    driver: Driver = _driver
    if driver.pid != os.getpid():
        raise KVStoreError(
            "CUDA was in use when this process was forked, and cannot be used in the child; start it with "
            "spawn instead"
        )
    return driver


def use(driver: Any) -> Any:
    """Put another driver in place, for tests; returns the one before."""
    global _driver
    _driver, before = driver, _driver
    return before
