"""The interposer in processes of tests: built once, loaded into the nursery, and begun in each process."""

from __future__ import annotations

import ctypes
import enum
import os
import subprocess
from pathlib import Path

import paths

VARIABLE = "BUGGIFY"  # seed, kinds and errors, for `begin_here`
_SOURCE = Path(__file__).with_name("interposer.c")


class Kinds(enum.IntFlag):
    """The possible events, as in interposer.c."""

    DELAYS = 1
    SHORT = 2
    INTERRUPTS = 4
    AGAIN = 8
    SPACE = 16
    DISK = 32


#: Events that a process must not notice.
LEGAL = Kinds.DELAYS | Kinds.SHORT | Kinds.INTERRUPTS | Kinds.AGAIN


def built(folder: Path) -> Path:
    """Compile the interposer; skip without a compiler."""
    library = folder / "interposer.so"
    command = [*paths.c_compiler(), "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([*command, str(_SOURCE), "-ldl"], check=True)
    return library


def variable(seed: int, kinds: Kinds, errors: int = 0) -> dict[str, str]:
    """Environment of a process in which points are on."""
    return {VARIABLE: f"{seed} {int(kinds)} {errors}"}


def begin_here() -> None:
    """In a process that the interposer is loaded into: begin, if its environment says so."""
    if VARIABLE in os.environ:
        seed, kinds, errors = map(int, os.environ[VARIABLE].split())
        begin(seed, _name(), Kinds(kinds), errors)


def begin(seed: int, process: str, kinds: Kinds, errors: int = 0) -> None:
    """Let things happen from now on."""
    library = ctypes.CDLL(None)
    library.buggify_begin(ctypes.c_uint64(seed), process.encode(), ctypes.c_uint(kinds), errors)


def end() -> None:
    """Let nothing happen any more."""
    ctypes.CDLL(None).buggify_end()


def fired(point: str) -> int:
    """How often something has happened at a point."""
    count = ctypes.CDLL(None).buggify_fired
    count.restype = ctypes.c_longlong
    return int(count(point.encode()))


def _name() -> str:
    role = os.environ.get("KVSTORE_ROLE", "worker")
    rank = os.environ.get("KVSTORE_SERVER_RANK" if role == "server" else "KVSTORE_RANK", "0")
    return f"{role}-{rank}"
