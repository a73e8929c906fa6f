"""The report of a job: where the time of each worker goes, for whom the others wait, which keys cost most."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from ...counters import PHASES
from .activity import segments, shares
from .model import JobProcess, JobTimeline
from .nesting import by_thread
from .steps import Overlap, overlap_of, steps_of
from .straggler import Last, ranking

_KEYS = 10


@dataclass(frozen=True)
class WorkerReport:
    """One process of a worker.

    Attributes
    ----------
    rank, pid : int
    steps : int
        Their number.
    source : str
        What they are counted by.
    step : float
        Median of their seconds.
    seconds : float
        From the first step to the last.
    shares : dict
        Part of these seconds by `activity.SHARES`; together they are 1.
    overlap : Overlap or None
        Of gradients with the backward pass.
    """

    rank: int
    pid: int
    steps: int
    source: str
    step: float
    seconds: float
    shares: dict[str, float]
    overlap: Overlap | None


@dataclass(frozen=True)
class ServerReport:
    """One process of a server: parts of the seconds that it has recorded, by phase. The rest is idle."""

    rank: int
    pid: int
    seconds: float
    shares: dict[str, float]


@dataclass(frozen=True)
class KeyReport:
    """One key: seconds in all workers together, by phase, and bytes that were moved."""

    key: str
    seconds: float
    phases: dict[str, float]
    nbytes: int


@dataclass(frozen=True)
class Report:
    """The report of a job.

    Attributes
    ----------
    job : str
    seconds : float
        From its first event to its last.
    uncertainty : float or None
        Seconds within which the times of two hosts can be compared; None: nobody has compared them.
    workers, servers, keys : list
    last : list of Last
        Workers by how often they came last.
    notes : list of str
        What is missing.
    """

    job: str
    seconds: float
    uncertainty: float | None
    workers: list[WorkerReport]
    servers: list[ServerReport]
    last: list[Last]
    keys: list[KeyReport]
    notes: list[str]

    def as_object(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        found = asdict(self)
        found["last"] = [one._asdict() for one in self.last]
        for worker, whole in zip(found["workers"], self.workers, strict=True):
            worker["overlap"] = whole.overlap and whole.overlap._asdict()
        return found


def report(job: JobTimeline) -> Report:
    """Make the report of a job."""
    workers = [(process, _worker(process)) for process in job.of_role("worker")]
    notes = [
        f"{process.name} has too few events to find its steps" for process, one in workers if one is None
    ]
    uncertain = [process.alignment.uncertainty for process in job.processes]
    known = [one for one in uncertain if one is not None]
    return Report(
        job.processes[0].file.job,
        job.ns * 1e-9,
        max(known) * 1e-9 if len(known) == len(uncertain) else None,
        [one for _, one in workers if one is not None],
        [_server(process) for process in job.of_role("server")],
        ranking(job),
        _keys(job),
        [*job.notes, *notes],
    )


def _worker(process: JobProcess) -> WorkerReport | None:
    steps = steps_of(process)
    if steps is None:
        return None
    whole = steps.end - steps.begin
    parts = {name: ns / whole for name, ns in shares(process, steps.begin, steps.end).items()}
    rank, pid, overlap = process.file.rank, process.file.pid, overlap_of(process, steps)
    return WorkerReport(rank, pid, len(steps.times), steps.source, steps.median, whole * 1e-9, parts, overlap)


def _server(process: JobProcess) -> ServerReport:
    spans = process.spans()
    begin, end = (spans[0].begin, max(span.end for span in spans)) if spans else (0, 0)
    found = dict.fromkeys(PHASES, 0)
    for events in by_thread(spans).values():
        for one in segments(events):
            if one.event.kind < len(PHASES):
                found[PHASES[one.event.kind]] += one.end - one.begin
    parts = {name: ns / max(1, end - begin) for name, ns in found.items()}
    return ServerReport(process.file.rank, process.file.pid, (end - begin) * 1e-9, parts)


def _keys(job: JobTimeline) -> list[KeyReport]:
    ns: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(PHASES, 0))
    moved: dict[str, int] = defaultdict(int)
    for process in job.of_role("worker"):
        for events in by_thread(process.spans()).values():
            for one in segments(events):
                if one.event.kind < len(PHASES):
                    ns[process.key_of(one.event) or "(several keys)"][PHASES[one.event.kind]] += (
                        one.end - one.begin
                    )
        for event in process.spans():
            if event.kind < len(PHASES):
                moved[process.key_of(event) or "(several keys)"] += event.nbytes
    found = [
        KeyReport(key, sum(of.values()) * 1e-9, {name: one * 1e-9 for name, one in of.items()}, moved[key])
        for key, of in ns.items()
    ]
    return sorted(found, key=lambda one: (-one.seconds, one.key))[:_KEYS]
