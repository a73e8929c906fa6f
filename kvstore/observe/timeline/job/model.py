"""A job as its timeline shows it: processes with their events, in one time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ....errors import StateFileError
from ...counters import CALLS, PHASES
from ...events import ARRIVED, BACK, BUCKET, CALL, LOST, NO_SLICE, STEP, Event
from ...processes import ORDER, name_of, process_name
from ..process_trace import FORMAT, ProcessTrace, read_trace
from ..sources import StoreRecord
from .alignment import ClockAlignment, align_clocks

_HEAD = 256  # bytes within which a file names its format

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
    alignment: ClockAlignment
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


def job_of(files: Sequence[ProcessTrace], notes: Sequence[str] = ()) -> JobTimeline:
    """Put the processes of a job together."""
    alignments = align_clocks(files)
    times = [_aligned_times(file, one) for file, one in zip(files, alignments, strict=True)]
    origin = min((int(begins.min()) for begins, _ in times if begins.size), default=0)
    processes = []
    for file, alignment, (begins, ends) in zip(files, alignments, times, strict=True):
        rows = zip((begins - origin).tolist(), (ends - origin).tolist(), file.events, strict=True)
        events = [Event(begin, end, *event[2:]) for begin, end, event in rows]
        events.reverse()  # of events with the same times the outer one has ended last
        events.sort(key=lambda event: (event.begin, -event.end))
        processes.append(JobProcess(file, alignment, events, {one.number: one for one in file.stores}))
    return JobTimeline(processes, [*notes, *_loss_notes(processes), *_clock_notes(processes)])


def _aligned_times(file: ProcessTrace, alignment: ClockAlignment) -> tuple[np.ndarray, np.ndarray]:
    """Return begin and end of the events of a file in the time of the job."""
    times = np.array([event[:2] for event in file.events], np.int64).reshape(-1, 2)
    return alignment.apply(times[:, 0]), alignment.apply(times[:, 1])


def _loss_notes(processes: list[JobProcess]) -> list[str]:
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


def _clock_notes(processes: list[JobProcess]) -> list[str]:
    """Name the processes with times that depend on the time of day of their host."""
    vague = [process.name for process in processes if process.alignment.uncertainty is None]
    return [f"no clock was compared with that of {name}: by the time of day of its host" for name in vague]


def name_of_call(event: Event) -> str:
    """Return the verb of a call."""
    return (*CALLS, "wait")[event.slice] if event.slice <= len(CALLS) else "call"


def read_job(folder: Path) -> JobTimeline:
    """Read the files of the job in `folder`; if there are several jobs, of the newest.

    Raises
    ------
    StateFileError
        There is no file of a timeline.
    """
    found, notes = _read_all(folder)
    if not found:
        raise StateFileError(
            f"{folder} has no timeline of any process: run the job with KVSTORE_TIMELINE={folder}, and give "
            f"the folder to which its files were written{''.join('; ' + note for note in notes)}"
        )
    newest = max(found, key=lambda file: file.realtime)
    files = [file for file in found if file.job == newest.job]
    if len(files) < len(found):
        notes.append(f"{len(found) - len(files)} files of other jobs are left out: only the newest is shown")
    files.sort(key=lambda file: (ORDER.get(file.role, 3), file.rank, file.monotonic))
    return job_of(files, [*notes, *_missing_notes(files, bool(notes)), *_overwritten_notes(files)])


def _read_all(folder: Path) -> tuple[list[ProcessTrace], list[str]]:
    """Read all files; of each process one, even if there are copies."""
    found: dict[tuple[object, ...], ProcessTrace] = {}
    notes = []
    try:
        paths = sorted(path for path in folder.glob("*.json") if path.is_file())
    except OSError as error:
        raise StateFileError(f"{folder} cannot be read: {error.strerror}") from error
    for path in paths:
        one = _read_file(path)
        if isinstance(one, str):
            notes.append(one)
        elif one is not None:
            process = one.role, one.rank, one.host, one.pid, one.clock, one.job
            other = found.setdefault(process, one)
            if other is not one:
                notes.append(f"{path.name} and another file are of the same process: the newer one counts")
                found[process] = max(other, one, key=lambda file: file.monotonic)
    return list(found.values()), notes


def _read_file(path: Path) -> ProcessTrace | str | None:
    """Read a file; return a note if it is damaged, and None if it is no file of a process."""
    try:
        with path.open("rb") as file:
            is_ours = f'"{FORMAT}"'.encode() in file.read(_HEAD)
        return read_trace(path) if is_ours else None
    except (OSError, ValueError) as error:
        return f"{path.name} is left out: {error}"


def _missing_notes(files: Sequence[ProcessTrace], some_left_out: bool) -> list[str]:
    """Name the processes of the job that have no file, or several."""
    notes = []
    reasons = "killed, or not written yet, or left on another host" + ", or left out" * some_left_out
    sizes = {"worker": [file.workers for file in files], "server": [file.servers for file in files]}
    for role, counts in sizes.items():
        ranks = Counter(file.rank for file in files if file.role == role)
        size = max([*counts, *(file.size for file in files if file.role == role)], default=0)
        if without := sorted(set(range(size)) - set(ranks)):
            notes.append(f"no file of {role} {', '.join(map(str, without))}: {reasons}")
        notes += [f"{role} {rank} has {n} files: it was started again" for rank, n in ranks.items() if n > 1]
    if any(sizes["server"]) and all(file.role != "scheduler" for file in files):
        notes.append(f"no file of the scheduler: {reasons}")
    return notes


def _overwritten_notes(files: Sequence[ProcessTrace]) -> list[str]:
    return [
        f"{process_name(file.role, file.rank)} has only its last events: {file.overwritten} older ones were "
        "overwritten"
        for file in files
        if file.overwritten
    ]
