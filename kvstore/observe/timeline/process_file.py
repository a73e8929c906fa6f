"""The file that one process writes for a timeline."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import numpy as np

from ...files import unsealed, write_sealed
from ..events import LAYOUT
from .clocks import ClockSample
from .sources import StoreRecord

FORMAT, VERSION = "kvstore-timeline", 1

_LONGEST = 1 << 60  # ns that a machine has run, or clocks are apart: 36 years
_TIME_OF_DAY = 1 << 62  # ns: the year 2116
_MOST = 1 << 24  # processes of a role
_DTYPE = np.dtype(list(LAYOUT))


class ProcessFile(msgspec.Struct, frozen=True, tag=FORMAT, tag_field="format"):
    """What a process has recorded.

    Attributes
    ----------
    version : int
        Of this format.
    role : str
        ``"worker"``, ``"server"`` or ``"scheduler"``.
    rank, size : int
        Of the process, among those of its role.
    job : str
        The same in all processes of a job.
    host, pid
        Where it ran.
    clock : str
        Names the clock that events are in; processes with the same clock have the same text. It can be empty.
    monotonic, realtime : int
        That clock and the time of day, in ns, at the same moment.
    scheduler : list of ClockSample
        Comparisons with the scheduler's clock, the oldest first.
    stores : list of StoreRecord
        Its stores.
    labels : list of str
        Keys of calls, to which their events refer by a number; that of number 1 first.
    threads : dict
        Names of threads, by the system's number.
    overwritten : int
        Number of events that were too many for the ring: the oldest ones.
    events : bytes
        As `kvstore.observe.native.packed_events` returns them; base64 in the file.
    workers, servers : int
        Numbers of the processes of the job, as far as variables give them to this process; else 0.
    """

    version: int
    role: str
    rank: int
    size: int
    job: str
    host: str
    pid: int
    clock: str
    monotonic: int
    realtime: int
    scheduler: list[ClockSample]
    stores: list[StoreRecord]
    labels: list[str]
    threads: dict[int, str]
    overwritten: int
    events: bytes
    workers: int = 0
    servers: int = 0

    @property
    def name(self) -> str:
        """What its file is called."""
        host = re.sub(r"[^A-Za-z0-9_.]", "_", self.host)[:64]
        return f"{self.role}-{self.rank}-{host}-{self.pid}.json"


def write(content: ProcessFile, folder: Path) -> Path:
    """Write a file into `folder`, which is made if it is missing, and return its path.

    Raises
    ------
    OSError
        The system refuses it. An older file of the process is unchanged.
    """
    os.makedirs(folder, exist_ok=True)
    path = folder / content.name
    write_sealed(path, msgspec.json.encode(content))
    return path


def read(path: Path) -> ProcessFile:
    """Read a file.

    Raises
    ------
    OSError, ValueError
        It cannot be read; it is no such file, a damaged one, or one of another version.
    """
    content: ProcessFile = msgspec.json.decode(unsealed(path.read_bytes()), type=ProcessFile)
    if content.version != VERSION:
        raise ValueError(f"it has version {content.version} of the format, and this kvstore reads {VERSION}")
    if not _is_possible(content):
        raise ValueError("it is damaged: it has numbers that no process writes")
    return content


def _is_possible(content: ProcessFile) -> bool:
    """Whether all times can be brought together, and the events are whole."""
    if len(content.events) % _DTYPE.itemsize:
        return False
    rows = np.frombuffer(content.events, _DTYPE)
    compared = (number for sample in content.scheduler for number in sample)
    return (
        all(abs(number) <= _LONGEST for number in (content.monotonic, *compared))
        and all(int(rows[name].max(initial=0)) <= _LONGEST for name in ("begin", "end"))
        and abs(content.realtime) <= _TIME_OF_DAY
        and max(content.size, content.workers, content.servers) <= _MOST
    )
