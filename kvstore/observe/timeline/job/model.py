"""A job as its timeline shows it: processes with their events, in one time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...counters import CALLS, PHASES
from ...events import ARRIVED, BACK, BUCKET, CALL, LOST, NO_SLICE, STEP, Event
from ...processes import name_of, process_name
from ..process_trace import ProcessTrace
from ..sources import StoreRecord
from .alignment import Alignment, align
from .folder import load

INSTANTS = frozenset((ARRIVED, LOST, BACK))
#: The events of a thread, which are nested; steps and buckets overlap with them.
OF_THREADS = frozenset((*range(len(PHASES)), CALL))


@dataclass(frozen=True)
class JobProcess:
    """A process of a job.

    Times of `events` are ns since the first event of the job. They are ordered by their begin; of those that
    begin together, the longest is first. `stores` has the stores of the process by their number.
    """

    file: ProcessTrace
    alignment: Alignment
    events: list[Event]
    stores: dict[int, StoreRecord] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Role and rank."""
        return process_name(self.file.role, self.file.rank)

    def key_of(self, event: Event) -> str:
        """Name the key that an event is about; empty if it is about several keys, or none."""
        if event.kind == CALL:
            return self.file.labels[event.round - 1] if 0 < event.round <= len(self.file.labels) else ""
        if event.slice == NO_SLICE or event.kind in (LOST, BACK, STEP, BUCKET):
            return ""
        store = self.stores.get(event.store)
        name = store.slices.get(event.slice) if store is not None else None
        return f"slice {event.slice}" if name is None else name

    def spans(self, kinds: frozenset[int] = OF_THREADS) -> list[Event]:
        """Return the events of these kinds."""
        return [event for event in self.events if event.kind in kinds]


@dataclass(frozen=True)
class JobTimeline:
    """The processes of a job that have a file, workers first, each role by rank; and notes for the report."""

    processes: list[JobProcess]
    notes: list[str]

    def of_role(self, role: str) -> list[JobProcess]:
        """Return the processes of a role."""
        return [process for process in self.processes if process.file.role == role]

    @property
    def ns(self) -> int:
        """The time from the first event to the last."""
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


def job_of(files: Sequence[ProcessTrace], notes: Sequence[str] = ()) -> JobTimeline:
    """Put the processes of a job together."""
    alignments = align(files)
    times = [_aligned(file, one) for file, one in zip(files, alignments, strict=True)]
    origin = min((int(begins.min()) for begins, _ in times if begins.size), default=0)
    processes = []
    for file, alignment, (begins, ends) in zip(files, alignments, times, strict=True):
        rows = zip((begins - origin).tolist(), (ends - origin).tolist(), file.events, strict=True)
        events = [Event(begin, end, *event[2:]) for begin, end, event in rows]
        events.reverse()  # of events with the same times the outer one has ended last
        events.sort(key=lambda event: (event.begin, -event.end))
        processes.append(JobProcess(file, alignment, events, {one.number: one for one in file.stores}))
    return JobTimeline(processes, [*notes, *_of_losses(processes), *_of_clocks(processes)])


def _aligned(file: ProcessTrace, alignment: Alignment) -> tuple[np.ndarray, np.ndarray]:
    """Return begin and end of the events of a file in the time of the job."""
    times = np.array([event[:2] for event in file.events], np.int64).reshape(-1, 2)
    return alignment.apply(times[:, 0]), alignment.apply(times[:, 1])


def _of_losses(processes: list[JobProcess]) -> list[str]:
    """Name the processes that were restarted and have no file of the time before."""
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
    """Name the processes with times that depend on the time of day of their host."""
    vague = [process.name for process in processes if process.alignment.uncertainty is None]
    return [f"no clock was compared with that of {name}: by the time of day of its host" for name in vague]


def name_of_call(event: Event) -> str:
    """Return the verb of a call."""
    return (*CALLS, "wait")[event.slice] if event.slice <= len(CALLS) else "call"
