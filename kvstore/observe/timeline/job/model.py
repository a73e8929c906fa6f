"""A job as its timeline shows it: processes with their events, in one time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...counters import CALLS, PHASES
from ...events import ARRIVED, BACK, BUCKET, CALL, KINDS, LAYOUT, LOST, NOBODY, STEP
from ..process_file import ProcessFile
from ..sources import StoreRecord
from .alignment import Alignment, align
from .folder import load

#: `slice` of an event that is about several keys, or about none.
NO_SLICE = 2**64 - 1
INSTANTS = frozenset((ARRIVED, LOST, BACK))
#: What a thread does, one within the other; steps and buckets overlap with it.
OF_THREADS = frozenset((*range(len(PHASES)), CALL))

_DTYPE = np.dtype(list(LAYOUT))


class JobEvent(NamedTuple):
    """As `kvstore.observe.events.Event`; `begin` and `end` are ns since the first event of the job."""

    begin: int
    end: int
    slice: int
    round: int
    nbytes: int
    thread: int
    whom: int
    kind: int
    store: int

    @property
    def ns(self) -> int:
        """How long it took."""
        return self.end - self.begin


@dataclass(frozen=True)
class JobProcess:
    """A process of a job.

    Attributes
    ----------
    file : ProcessFile
    alignment : Alignment
    events : list of JobEvent
        By their begin; of those that begin together, the longest first.
    stores : dict
        Its stores, by number.
    """

    file: ProcessFile
    alignment: Alignment
    events: list[JobEvent]
    stores: dict[int, StoreRecord] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As sentences say it."""
        return self.file.role if self.file.role == "scheduler" else f"{self.file.role} {self.file.rank}"

    def key_of(self, event: JobEvent) -> str:
        """Name the key that an event is about; empty if it is about several, or none."""
        if event.kind == CALL:
            return self.file.labels[event.round - 1] if 0 < event.round <= len(self.file.labels) else ""
        if event.slice == NO_SLICE or event.kind in (LOST, BACK, STEP, BUCKET):
            return ""
        store = self.stores.get(event.store)
        name = store.slices.get(event.slice) if store is not None else None
        return f"slice {event.slice}" if name is None else name

    def spans(self, kinds: frozenset[int] = OF_THREADS) -> list[JobEvent]:
        """Return the events of these kinds."""
        return [event for event in self.events if event.kind in kinds]


@dataclass(frozen=True)
class JobTimeline:
    """All processes of a job of which there is a file.

    Attributes
    ----------
    processes : list of JobProcess
        Workers first, each role by rank.
    notes : list of str
        What is missing, and what else is to be known.
    """

    processes: list[JobProcess]
    notes: list[str]

    def of_role(self, role: str) -> list[JobProcess]:
        """Return the processes of a role."""
        return [process for process in self.processes if process.file.role == role]

    @property
    def ns(self) -> int:
        """Time from the first event to the last."""
        return max((event.end for process in self.processes for event in process.events), default=0)


def read_job(folder: Path) -> JobTimeline:
    """Read the job of a folder.

    Raises
    ------
    StateFileError
        There is no file of a timeline.
    """
    files, notes = load(folder)
    return job_of(files, notes)


def job_of(files: Sequence[ProcessFile], notes: Sequence[str] = ()) -> JobTimeline:
    """Put the processes of a job together."""
    tables = [_Table(file, alignment) for file, alignment in zip(files, align(files), strict=True)]
    origin = min((int(table.begin.min()) for table in tables if table.begin.size), default=0)
    processes = [table.process(origin) for table in tables]
    return JobTimeline(processes, [*notes, *_of_losses(processes), *_of_clocks(processes)])


class _Table:
    """The events of a file, in the time of the job."""

    def __init__(self, file: ProcessFile, alignment: Alignment) -> None:
        self.file, self.alignment = file, alignment
        whole = len(file.events) // _DTYPE.itemsize * _DTYPE.itemsize
        rows = np.frombuffer(file.events[:whole], _DTYPE)
        self.rows = rows[(rows["kind"] < len(KINDS)) & (rows["begin"] <= rows["end"])]
        self.begin, self.end = alignment.apply(self.rows["begin"]), alignment.apply(self.rows["end"])

    def process(self, origin: int) -> JobProcess:
        """Make the process, with times since `origin`."""
        columns = [self.rows[name].tolist() for name in JobEvent._fields[2:]]
        times = (self.begin - origin).tolist(), (self.end - origin).tolist()
        found = [JobEvent(*row) for row in zip(*times, *columns, strict=True)]
        found.reverse()  # of equal spans the outer one has ended last
        found.sort(key=lambda event: (event.begin, -event.end))
        stores = {store.number: store for store in self.file.stores}
        return JobProcess(self.file, self.alignment, found, stores)


def _of_losses(processes: list[JobProcess]) -> list[str]:
    """Say of which processes that are back there is no file of what they did before."""
    files = Counter(process.name for process in processes)
    backs: Counter[str] = Counter()
    for process in processes:
        backs |= Counter(name_of(event.whom) for event in process.events if event.kind == BACK)
    return [
        f"{name} was lost and is back; there is no file of what it did before"
        for name, back in backs.items()
        if 0 < files[name] <= back
    ]


def _of_clocks(processes: list[JobProcess]) -> list[str]:
    """Say whose times are only as good as the time of day of their host."""
    vague = [process.name for process in processes if process.alignment.uncertainty is None]
    return [f"no clock was compared with that of {name}: by the time of day of its host" for name in vague]


def name_of(whom: int) -> str:
    """Name the process that an event is about; empty if nobody knows it."""
    if whom == NOBODY:
        return ""
    return f"worker {whom}" if whom >= 0 else f"server {-1 - whom}"


def name_of_call(event: JobEvent) -> str:
    """Name the verb of a call."""
    return (*CALLS, "wait")[event.slice] if event.slice <= len(CALLS) else "call"
