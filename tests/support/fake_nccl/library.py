"""The Python half: the library is compiled and loaded here, under the name of the real one."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
from functools import cache as once
from pathlib import Path

SOURCE = Path(__file__).with_name("libnccl.c")


class FakeNccl:
    """NCCL in this process; made by `install`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.fake_calls.restype = ctypes.c_long
        library.fake_history.restype = ctypes.c_char_p

    def history(self) -> list[str]:
        """Collectives that all ranks of this process have called, or this rank of several processes."""
        return self._library.fake_history().decode().splitlines()

    def forget(self) -> None:
        """Begin counts and history anew."""
        self._library.fake_forget()

    def calls(self, name: str) -> int:
        return int(self._library.fake_calls(name.encode()))

    def fail(self, name: str, error: int, after: int = 0) -> None:
        self._library.fake_fail(name.encode(), error, after)

    def live(self) -> int:
        return int(self._library.fake_live())


def missing() -> str:
    """Why this process cannot use it; empty if it can."""
    if importlib.util.find_spec("nccl") is None:
        return "there is no nccl4py: pip install --no-deps nccl4py"
    loaded = _loaded()
    return f"a real NCCL is loaded: {loaded}" if loaded and "fake-nccl" not in loaded else ""


def _loaded() -> str:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return next((line.split(maxsplit=5)[5] for line in maps if "libnccl.so" in line), "")


def _compiled() -> Path:
    """Compile it, once for each state of its source, into the tree's build folder."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = SOURCE.parents[3] / "build" / f"fake-nccl-{digest}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    library = folder / "libnccl.so.2"
    if not library.exists():
        fresh = folder / f"{os.getpid()}.so"
        flags = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2"]
        subprocess.run(["cc", *flags, "-o", fresh, SOURCE, "-ldl", "-lpthread"], check=True, timeout=600)
        fresh.replace(library)
    return library


@once
def install() -> FakeNccl:
    """Load it into this process, in the place of the real one.

    Raises
    ------
    RuntimeError
        A real one is loaded already, or there is no nccl4py.
    """
    why = missing()
    if why:
        raise RuntimeError(why)
    # A later request for libnccl.so.2 gets the library that is loaded under that name.
    return FakeNccl(ctypes.CDLL(str(_compiled()), mode=ctypes.RTLD_GLOBAL))
