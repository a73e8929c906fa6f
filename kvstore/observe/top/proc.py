"""Facts about a process, from /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


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
