"""What /proc says of a process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessFacts(NamedTuple):
    """One process at one moment.

    Attributes
    ----------
    started : int
        When it was started: with its number this is its name, as numbers are used again.
    parent : int
    cpu : float
        Seconds of processors that it has used.
    memory, shared_memory : int
        Bytes that are resident, and those of them that it shares with others, or could: the memory of stores
        of `shared` counts in each of their processes.
    stopped : bool
        Whether it stands still, by a signal or a debugger.
    """

    started: int
    parent: int
    cpu: float
    memory: int
    shared_memory: int
    stopped: bool = False


def facts(process: int) -> ProcessFacts | None:
    """Look at a process; None if there is no such process, or it has ended and nobody has asked why."""
    try:
        # The name, in brackets, may have anything in it.
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
