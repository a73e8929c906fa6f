"""The report of a job: the parts of each worker's time, the stragglers, and the keys that cost most."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...counters import PHASES, WAITING
from ...events import CALL, NO_SLICE, Event
from ...intervals import Times, common, length
from .activity import segments, shares
from .model import JobProcess, JobTimeline
from .nesting import Span, by_thread, lanes
from .steps import Overlap, Steps, overlap_of, steps_of
from .straggler import Last, ranking

_KEYS = 10
_PHASES = frozenset(range(len(PHASES)))
#: The end of the name of a slice, after its key.
_PART = re.compile(r" \(part \d+ of \d+\)$")


@dataclass(frozen=True)
class WorkerReport:
    """One process of a worker; times are in seconds."""

    rank: int
    pid: int
    steps: int
    source: str  # the events by which steps are counted
    step: float  # the median
    usual: int  # number of steps that are not longer than three times the median; `shares` is about these
    longest: tuple[float, float]  # begin and length
    shares: dict[str, float]  # by `activity.SHARES`; their sum is 1
    overlap: Overlap | None


@dataclass(frozen=True)
class ServerReport:
    """One process of a server: the phases as parts of the seconds that it has recorded. The rest is idle."""

    rank: int
    pid: int
    seconds: float
    shares: dict[str, float]


@dataclass(frozen=True)
class KeyReport:
    """One key: its seconds in all workers together, by phase, and its bytes."""

    key: str
    seconds: float
    phases: dict[str, float]
    nbytes: int


@dataclass(frozen=True)
class Report:
    """The report of a job; times are in seconds."""

    job: str
    seconds: float  # from the first event to the last
    uncertainty: float | None  # of the comparison of times of two hosts; None if it is unknown
    workers: list[WorkerReport]
    servers: list[ServerReport]
    last: list[Last]  # workers by the number of rounds in which they arrived last
    keys: list[KeyReport]
    notes: list[str]  # about files and events that are missing


def report(job: JobTimeline) -> Report:
    """Make the report of a job."""
    workers = [(process, steps_of(process)) for process in job.of_role("worker")]
    notes = [f"{process.name} has too few events to find its steps" for process, one in workers if not one]
    uncertain = [process.alignment.uncertainty for process in job.processes]
    known = [one for one in uncertain if one is not None]
    return Report(
        job.processes[0].file.job,
        job.ns * 1e-9,
        max(known) * 1e-9 if len(known) == len(uncertain) else None,
        [_worker(process, steps) for process, steps in workers if steps is not None],
        [_server(process) for process in job.of_role("server")],
        ranking(job),
        _keys([(process, _all(process) if steps is None else steps.usual) for process, steps in workers]),
        [*job.notes, *notes],
    )


def _worker(process: JobProcess, steps: Steps) -> WorkerReport:
    usual = steps.usual
    parts = {name: ns / length(usual) for name, ns in shares(process, usual).items()}
    begin, end = steps.longest
    return WorkerReport(
        process.file.rank, process.file.pid, len(steps.times), steps.source, steps.median,
        len(usual), (begin * 1e-9, (end - begin) * 1e-9), parts, overlap_of(process, steps),
    )  # fmt: skip


def _all(process: JobProcess) -> Times:
    """Return the time from the first span of a process to its last."""
    spans = process.spans()
    return [(spans[0].begin, max(span.end for span in spans))] if spans else []


def _server(process: JobProcess) -> ServerReport:
    whole, found = length(_all(process)), dict.fromkeys(PHASES, 0)
    for events in by_thread(process.spans()).values():
        for one in segments(events):
            if one.event.kind < len(PHASES):
                found[PHASES[one.event.kind]] += one.end - one.begin
    parts = {name: ns / max(1, whole) for name, ns in found.items()}
    return ServerReport(process.file.rank, process.file.pid, whole * 1e-9, parts)


def _keys(workers: Sequence[tuple[JobProcess, Times]]) -> list[KeyReport]:
    """Add up the costs of the keys in these times of each worker."""
    ns: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(PHASES, 0))
    moved: Counter[str] = Counter()
    for process, times in workers:
        names = _key_names(process)
        for name, phase, taken in _costs(process, names, times):
            ns[name][phase] += taken
        for event in process.spans(_PHASES - {WAITING}):
            moved[names[event]] += event.nbytes
    found = [
        KeyReport(key, sum(of.values()) * 1e-9, {name: one * 1e-9 for name, one in of.items()}, moved[key])
        for key, of in ns.items()
        if any(of.values())
    ]
    return sorted(found, key=lambda one: (-one.seconds, one.key))[:_KEYS]


def _costs(process: JobProcess, names: Mapping[Event, str], times: Times) -> Iterator[tuple[str, str, int]]:
    """Yield key, phase and ns of each span of a worker in these times."""
    for events in by_thread(process.spans()).values():
        spent: dict[tuple[str, str], Times] = defaultdict(list)
        for one in segments(events):
            if one.event.kind in _PHASES:
                spent[names[one.event], PHASES[one.event.kind]].append((one.begin, one.end))
        yield from ((*what, length(common(of, times))) for what, of in spent.items())


def _key_names(process: JobProcess) -> dict[Event, str]:
    """Name the key of each span of a phase; of a span about several parts, the key of its call."""
    keys = {_PART.sub("", name) for store in process.stores.values() for name in store.slices.values()}
    spans = [one for events in by_thread(process.spans()).values() for lane in lanes(events) for one in lane]
    found = {}
    for span in spans:
        if span.event.kind in _PHASES:
            name = _PART.sub("", process.key_of(span.event)) or _key_of_call(process, span)
            found[span.event] = name if name in keys or span.event.slice != NO_SLICE else "(several keys)"
    return found


def _key_of_call(process: JobProcess, span: Span) -> str:
    """Name the key, or the keys, of the call in which a span lies."""
    call: Span | None = span
    while call is not None and call.event.kind != CALL:
        call = call.parent
    return "" if call is None else process.key_of(call.event)
