"""The Python half of the fake driver: it is compiled and loaded here, and launches are passed back here."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import traceback
from functools import cache as once
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore.kernels.cuda import BLOCK, HostKernel, KernelSpec
from kvstore.kernels.cuda import cache as cubins
from kvstore.kernels.cuda.cubin import KernelCubin
from kvstore.kernels.cuda.provenance import source_key

SOURCE = Path(__file__).with_name("libcuda.c")
#: How many devices a process with the fake driver has: cuda.core asks once.
DEVICES = 4
_ILLEGAL_ADDRESS = 700

_OnLaunch = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_uint64), ctypes.c_int
)
_CountParameters = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)


class Live(NamedTuple):
    """The resources not released: memory, pinned bytes, streams, events, locked pages, IPC handles."""

    blocks: int
    device_bytes: tuple[int, ...]
    pinned_bytes: int
    streams: int
    events: int
    registered: int
    opened: int
    exported: int


class FakeDriver:
    """The driver in this process; made by `install`.

    Attributes
    ----------
    launches : list of (str, int)
        Name of the kernel and number of blocks, of each launch that has run.
    errors : list of str
        Tracebacks of launches that failed; the next call that waits fails, too.
    interpreted : bool
        Whether bodies are interpreted, for small arrays and processes without numba, and not compiled.
    leaks : bool
        Whether the running test may leave memory, streams and events behind.
    kernels : pathlib.Path
        Folder of files that name the kernels, for KVSTORE_CUDA_KERNELS.
    """

    def __init__(self, library: ctypes.CDLL, kernels: Path) -> None:
        self.kernels = kernels
        self._library = library
        library.fake_calls.restype = ctypes.c_long
        library.fake_live_bytes.restype = ctypes.c_size_t
        library.fake_live_host_bytes.restype = ctypes.c_size_t
        alive = ("blocks", "streams", "events", "registered", "opened", "exported")
        for count in ("fake_launches", *(f"fake_live_{one}" for one in alive)):
            getattr(library, count).restype = ctypes.c_long
        library.fake_owner.argtypes = [ctypes.c_uint64]
        self._callbacks = (_OnLaunch(self._launch), _CountParameters(self._count_parameters))
        library.fake_callbacks(*self._callbacks)
        self.reset()

    def reset(self) -> None:
        """Reset the settings and the list of launches."""
        self.launches: list[tuple[str, int]] = []
        self.errors: list[str] = []
        self.interpreted = False
        self.leaks = False
        self.lazy = False
        self.peers = True
        self.ipc = True
        self.memory = 1 << 30
        self.broken = 0

    @property
    def lazy(self) -> bool:
        """Whether work on a stream is delayed until the caller waits for it."""
        return os.environ.get("FAKE_CUDA_LAZY") == "1"

    @lazy.setter
    def lazy(self, wanted: bool) -> None:
        os.environ["FAKE_CUDA_LAZY"] = "1" if wanted else "0"

    @property
    def peers(self) -> bool:
        """Whether devices can reach each other's memory."""
        return os.environ.get("FAKE_CUDA_PEERS") != "0"

    @peers.setter
    def peers(self, wanted: bool) -> None:
        os.environ["FAKE_CUDA_PEERS"] = "1" if wanted else "0"

    @property
    def ipc(self) -> bool:
        """Whether this process may export memory and open the memory of other processes."""
        return os.environ.get("FAKE_CUDA_IPC") != "0"

    @ipc.setter
    def ipc(self, wanted: bool) -> None:
        os.environ["FAKE_CUDA_IPC"] = "1" if wanted else "0"

    @property
    def memory(self) -> int:
        """Bytes of memory of each device."""
        return int(os.environ["FAKE_CUDA_BYTES"])

    @memory.setter
    def memory(self, wanted: int) -> None:
        os.environ["FAKE_CUDA_BYTES"] = str(wanted)

    @property
    def broken(self) -> int:
        """Error that all work on streams ends with; 0 for none."""
        return self._broken

    @broken.setter
    def broken(self, error: int) -> None:
        self._broken = error
        self._library.fake_break(error)

    def fail(self, call: str, error: int, after: int = 0) -> None:
        """Let a call fail once, after `after` calls of it that do not."""
        self._library.fake_fail(call.encode(), error, after)

    def calls(self, name: str) -> int:
        """How often a function of the driver was called, in this process."""
        return int(self._library.fake_calls(name.encode()))

    def owner(self, address: int) -> int:
        """Return the device that owns the memory at an address; -1 for pinned memory, -2 for other memory."""
        return int(self._library.fake_owner(address))

    def live(self) -> Live:
        """Count the live resources."""
        lib = self._library
        return Live(
            lib.fake_live_blocks(),
            tuple(lib.fake_live_bytes(device) for device in range(DEVICES)),
            lib.fake_live_host_bytes(),
            lib.fake_live_streams(),
            lib.fake_live_events(),
            lib.fake_live_registered(),
            lib.fake_live_opened(),
            lib.fake_live_exported(),
        )

    def _count_parameters(self, entry: bytes) -> int:
        try:
            return 1 + len(KernelSpec.of_entry(entry.decode()).scalars)
        except ValueError:
            return -1

    def _launch(self, entry: bytes, grid: int, block: int, parameters: Any, device: int) -> None:
        try:
            spec = KernelSpec.of_entry(entry.decode())
            if block != BLOCK:
                raise ValueError(f"{spec.name} was launched with {block} threads in a block")
            scalars = [
                np.uint32(parameters[1 + i] & 0xFFFFFFFF).view(np.float32) for i in range(len(spec.scalars))
            ]
            HostKernel(spec, compiled=not self.interpreted)(None, int(parameters[0]), grid, *scalars)
            self.launches.append((spec.name, grid))
        except BaseException:
            self.errors.append(traceback.format_exc())
            self.broken = _ILLEGAL_ADDRESS


def _compiled() -> Path:
    """Compile the driver, once for each state of its source, into the tree's build folder."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = SOURCE.parents[3] / "build" / f"fake-cuda-{digest}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    library = folder / "libcuda.so.1"
    if not library.exists():
        fresh = folder / f"{os.getpid()}.so"
        flags = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
        subprocess.run(["cc", *flags, "-o", fresh, SOURCE, "-ldl", "-lpthread"], check=True, timeout=600)
        fresh.replace(library)
    return library


def _kernels(folder: Path) -> None:
    """Fill a folder with files that name every kernel."""
    from kvstore.kernels.cuda import all_specs

    for spec in all_specs():
        cubin = KernelCubin(spec.name, "sm_90", spec.entry, b"\x7fELF of nothing", source=source_key())
        cubins.write_kernel(folder, spec, cubin)


def driver_in_process() -> str | None:
    """Path of a CUDA driver that this process has loaded."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return next((line.split(maxsplit=5)[5] for line in maps if "libcuda.so" in line), None)


@once
def install() -> FakeDriver:
    """Load the fake driver into this process, under the name of the real one.

    Raises
    ------
    RuntimeError
        A real driver is loaded already.
    """
    library = _compiled()
    loaded = driver_in_process()
    if loaded:
        raise RuntimeError(f"this process has loaded {loaded}")
    os.environ["FAKE_CUDA_DEVICES"] = str(DEVICES)
    folder = library.parent / source_key()[:16]
    if not folder.exists():
        _kernels(folder)
    os.environ.setdefault(cubins.VARIABLE, str(folder))
    # A later request for libcuda.so.1 gets the library that is loaded under that name.
    return FakeDriver(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL), folder)
