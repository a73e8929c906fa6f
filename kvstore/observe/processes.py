"""Processes: their names in a job, and what /proc has about them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .native._observe import NOBODY

#: The order in which processes are listed.
ORDER = {"worker": 0, "server": 1, "scheduler": 2}

#: Files of shared memory that an MPI leaves if its processes are killed.
_SHARED_FILES = re.compile(r" (/dev/shm/(?:mpich_shm_|sm_segment|vader_segment)\S+)$", re.MULTILINE)
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def role_of(store: str) -> str:
    """Return the role of a process with a store of this type in its counters."""
    return store if store in ("server", "scheduler") else "worker"


def process_name(role: str, rank: int) -> str:
    """Return the name of a process, such as ``worker 2``; the scheduler has no rank."""
    return role if role == "scheduler" else f"{role} {rank}"


def name_of(number: int) -> str:
    """Return the name of the process that an event or a wait is about; empty if it is unknown."""
    if number == NOBODY:
        return ""
    return f"worker {number}" if number >= 0 else f"server {-1 - number}"


def number_of(name: str) -> int:
    """Return the number of a process in events: the rank of a worker, -1 - the rank of a server."""
    role, _, rank = name.partition(" ")
    return -1 - int(rank) if role == "server" else int(rank)


class ProcessFacts(NamedTuple):
    """One process at one moment. The memory of stores of `shared` is counted in each of their processes."""

    started: int  # its time of start: with its number it identifies the process, as numbers are reused
    parent: int
    cpu: float  # seconds of processors
    memory: int  # resident bytes
    shared_memory: int  # those of them that other processes can share
    stopped: bool = False  # by a signal or a debugger


def facts(process: int) -> ProcessFacts | None:
    """Read the facts of a process; None if it does not exist, or has ended."""
    try:
        # The name, in brackets, may contain any character.
        stat = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
        resident, shared = map(int, Path(f"/proc/{process}/statm").read_bytes().split()[1:3])
    except (OSError, ValueError):
        return None
    if stat[0] in (b"Z", b"X"):
        return None
    parent, user, system, started = (int(stat[at]) for at in (1, 11, 12, 19))
    cpu, stopped = (user + system) / _TICKS, stat[0] in (b"T", b"t")
    return ProcessFacts(started, parent, cpu, resident * _PAGE, shared * _PAGE, stopped)


def command(process: int) -> str:
    """Return the command line of a process, with the name of its program without folders."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    words[0] = os.path.basename(words[0])
    return " ".join(b" ".join(words).decode(errors="replace").split())


def running(root: Path = Path("/")) -> Iterator[int]:
    """Yield the numbers of all processes."""
    return (int(name) for name in os.listdir(root / "proc") if name.isdecimal())


def memfds(name: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """Yield a process, and a link in /proc to a descriptor of it, for each memfd with a name of this pattern.

    Descriptors of processes of other users cannot be seen.
    """
    pattern = re.compile(f"/memfd:{name}")
    for process in running(root):
        folder = root / f"proc/{process}/fd"
        with suppress(OSError):
            for descriptor in os.listdir(folder):
                with suppress(FileNotFoundError):  # it is closed by now
                    if pattern.search(os.readlink(folder / descriptor)):
                        yield process, folder / descriptor


def shared_files(process: int) -> set[str]:
    """Return the files of shared memory of an MPI that a process has mapped; none if it has ended."""
    try:
        return set(_SHARED_FILES.findall(Path(f"/proc/{process}/maps").read_text(errors="replace")))
    except OSError:
        return set()
