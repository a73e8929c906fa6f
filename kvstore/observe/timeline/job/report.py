"""The report of a job: the parts of each worker's time, the stragglers, and the keys that cost most.

It is the object that ``kvstore timeline --json`` prints. Times are in seconds.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from ...counters import CALLS, PHASES, WAITING
from ...events import ARRIVED, BUCKET, CALL, NO_SLICE, NOBODY, STEP, Event
from ...intervals import Times, common, length, union
from .model import JobProcess, JobTimeline, name_of_call
from .spans import by_thread, cut_segments, nested_lanes, time_shares

_KEYS = 10
_LONG = 3  # times the median of the steps
_PHASES = frozenset(range(len(PHASES)))
#: The end of the name of a slice, after its key.
_PART = re.compile(r" \(part \d+ of \d+\)$")


class WorkerSteps(NamedTuple):
    """The steps of a worker: begin and end of each, in ns, in order; and the events that count them."""

    times: Times
    source: str

    @property
    def median(self) -> float:
        """The ns of a step."""
        return median(end - begin for begin, end in self.times)

    @property
    def usual(self) -> Times:
        """The steps that are not much longer than the median."""
        most = _LONG * self.median
        return [(begin, end) for begin, end in self.times if end - begin <= most]


def job_report(job: JobTimeline) -> dict[str, Any]:
    """Make the report of a job."""
    workers = [(process, worker_steps(process)) for process in job.of_role("worker")]
    notes = [f"{process.name} has too few events to find its steps" for process, one in workers if not one]
    uncertain = [process.alignment.uncertainty for process in job.processes]
    known = [one for one in uncertain if one is not None]
    return {
        "job": job.processes[0].file.job,
        "seconds": job.ns * 1e-9,  # from the first event to the last
        # Of the comparison of times of two hosts; None if it is unknown.
        "uncertainty": max(known) * 1e-9 if len(known) == len(uncertain) else None,
        "workers": [_worker_row(process, steps) for process, steps in workers if steps],
        "servers": [_server_row(process) for process in job.of_role("server")],
        "last": last_workers(job),
        "keys": _key_rows([(one, steps.usual if steps else _whole_time(one)) for one, steps in workers]),
        "notes": [*job.notes, *notes],
    }


def _worker_row(process: JobProcess, steps: WorkerSteps) -> dict[str, Any]:
    """Describe a worker. The shares are parts of its usual steps; their sum is 1."""
    usual = steps.usual
    begin, end = max(steps.times, key=lambda one: one[1] - one[0])
    return {
        "rank": process.file.rank, "pid": process.file.pid,
        "steps": len(steps.times), "source": steps.source, "step": steps.median * 1e-9, "usual": len(usual),
        "longest": (begin * 1e-9, (end - begin) * 1e-9),
        "shares": {name: ns / length(usual) for name, ns in time_shares(process, usual).items()},
        "overlap": _bucket_overlap(process, steps),
    }  # fmt: skip


def _server_row(process: JobProcess) -> dict[str, Any]:
    """Describe a server: the phases as parts of the time that it has recorded. The rest is idle."""
    whole, found = _whole_time(process), dict.fromkeys(PHASES, 0)
    for _, phase, ns in _span_costs(process, dict.fromkeys(process.spans(), ""), whole):
        found[phase] += ns
    shares = {name: ns / max(1, length(whole)) for name, ns in found.items()}
    about = {"rank": process.file.rank, "pid": process.file.pid}
    return {**about, "seconds": length(whole) * 1e-9, "shares": shares}


def _whole_time(process: JobProcess) -> Times:
    """Return the time from the first span of a process to its last."""
    spans = process.spans()
    return [(spans[0].begin, max(span.end for span in spans))] if spans else []


def worker_steps(process: JobProcess) -> WorkerSteps | None:
    """Find the steps of a worker: from one mark of a trainer or a hook to the next, else by its calls.

    Of the calls, with their key, the most frequent ones count. Return None if there are too few events.
    """
    marks: dict[Any, list[int]] = defaultdict(list)
    for event in process.spans(frozenset((STEP,))):
        marks[event.store].append(event.end)
    if times := _times_between(max(marks.values(), key=len, default=[])):
        return WorkerSteps(times, "steps of the trainer or hook")
    calls: dict[tuple[int, int, int], list[Event]] = defaultdict(list)
    for event in process.spans(frozenset((CALL,))):
        if event.slice < len(CALLS):
            calls[event.slice, event.store, event.round].append(event)
    most = max(calls.values(), key=len, default=[])
    if times := _times_between([event.begin for event in most]):
        key = process.key_of(most[0])
        return WorkerSteps(times, name_of_call(most[0]) + (f" of {key}" if key else ""))
    return None


def _times_between(moments: list[int]) -> Times:
    return [(begin, end) for begin, end in pairwise(sorted(moments)) if end > begin]


def _bucket_overlap(process: JobProcess, steps: WorkerSteps) -> dict[str, float] | None:
    """Return the median seconds of a step in which a bucket was sent or summed; None if there are no buckets.

    `exposed` are those of them for which the step waited after the backward pass.
    """
    busy, ends = (union(event[:2] for event in process.spans(frozenset((kind,)))) for kind in (BUCKET, STEP))
    if not busy:
        return None
    of_both = {"communication": busy, "exposed": common(busy, ends)}
    return {name: _median_in_steps(steps, times) for name, times in of_both.items()}


def _median_in_steps(steps: WorkerSteps, times: Times) -> float:
    """Return the median over the steps of the seconds of these times."""
    in_each = dict.fromkeys(steps.times, 0)
    at = 0
    for begin, end in common(steps.times, times):
        while steps.times[at][1] <= begin:
            at += 1
        in_each[steps.times[at]] += end - begin
    return median(in_each.values()) * 1e-9


def last_workers(job: JobTimeline) -> list[dict[str, Any]]:
    """Return the workers that arrived last in rounds, by the number of these rounds.

    `of` is the number of rounds in which at least two workers arrived, `lead` the median of the seconds
    between the worker before it and itself.
    """
    leads: dict[int, list[int]] = defaultdict(list)
    for times in _arrivals_by_round(job).values():
        if len(times) > 1:
            before, last = sorted(times, key=times.__getitem__)[-2:]
            leads[last].append(times[last] - times[before])
    of = sum(map(len, leads.values()))
    ordered = sorted(leads.items(), key=lambda one: (-len(one[1]), one[0]))
    return [{"rank": rank, "rounds": len(ns), "of": of, "lead": median(ns) * 1e-9} for rank, ns in ordered]


def _arrivals_by_round(job: JobTimeline) -> dict[Any, dict[int, int]]:
    """Return the time at which each worker arrived in each round, as servers or workers have recorded it."""
    rounds: dict[Any, dict[int, int]] = defaultdict(dict)
    for process in job.processes:
        for event in process.spans(frozenset((ARRIVED,))):
            rank = process.file.rank if event.whom == NOBODY else event.whom
            which = (*_store_in_job(process, event.store), event.slice, event.round)
            rounds[which].setdefault(rank, event.begin)  # a repeated part arrives twice
    return rounds


def _store_in_job(process: JobProcess, number: int) -> tuple[object, ...]:
    """Identify a store in the same way in all processes that take part in its rounds."""
    if process.file.role != "worker":
        return process.file.role, process.file.rank, process.file.pid, number
    kind = process.stores[number].type if number in process.stores else ""
    alike = [one.number for one in process.stores.values() if one.type == kind]
    return process.file.role, kind, alike.index(number) if number in alike else number


def _key_rows(workers: Sequence[tuple[JobProcess, Times]]) -> list[dict[str, Any]]:
    """Add up the costs of the keys in these times of each worker."""
    ns: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(PHASES, 0))
    moved: Counter[str] = Counter()
    for process, times in workers:
        names = _key_names(process)
        for name, phase, taken in _span_costs(process, names, times):
            ns[name][phase] += taken
        for event in process.spans(_PHASES - {WAITING}):
            moved[names[event]] += event.nbytes
    order = sorted((-sum(of.values()), key) for key, of in ns.items() if any(of.values()))[:_KEYS]
    return [
        {
            "key": key,
            "seconds": -all_ * 1e-9,
            "phases": {name: one * 1e-9 for name, one in ns[key].items()},
            "nbytes": moved[key],
        }
        for all_, key in order
    ]


def _span_costs(
    process: JobProcess, names: Mapping[Event, str], times: Times
) -> Iterator[tuple[str, str, int]]:
    """Yield the name of a span's key, its phase, and its ns in these times, summed in each thread."""
    for events in by_thread(process.spans()).values():
        spent: dict[tuple[str, str], Times] = defaultdict(list)
        for begin, end, event in cut_segments(events):
            if event.kind in _PHASES:
                spent[names[event], PHASES[event.kind]].append((begin, end))
        yield from ((*what, length(common(of, times))) for what, of in spent.items())


def _key_names(process: JobProcess) -> dict[Event, str]:
    """Name the key of each span of a phase; of a span about several parts, the key of its call."""
    keys = {_PART.sub("", name) for store in process.stores.values() for name in store.slices.values()}
    found = {}
    for events in by_thread(process.spans()).values():
        for event, call in (span for lane in nested_lanes(events) for span in lane):
            name = _PART.sub("", process.key_of(event)) or (process.key_of(call) if call else "")
            found[event] = name if name in keys or event.slice != NO_SLICE else "(several keys)"
    return found
