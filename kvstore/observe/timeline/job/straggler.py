"""The worker that arrives last in the rounds of a job, and its delay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from ...counters import WAITING
from ...events import ARRIVED, NO_SLICE, NOBODY
from .model import JobProcess, JobTimeline

Round = tuple[object, ...]


class Last(NamedTuple):
    """A worker that arrived last in rounds of keys, or of parts of keys."""

    rank: int
    rounds: int  # in which it arrived last
    of: int  # rounds in which at least two workers arrived
    lead: float  # median of the seconds between the worker before it and itself, in its rounds


def ranking(job: JobTimeline) -> list[Last]:
    """Return the workers that arrived last in any round, by the number of these rounds."""
    leads: dict[int, list[int]] = defaultdict(list)
    for rank, lead in _by_arrivals(job) or _by_waits(job):
        leads[rank].append(lead)
    of = sum(map(len, leads.values()))
    found = [Last(rank, len(all_), of, median(all_) * 1e-9) for rank, all_ in leads.items()]
    return sorted(found, key=lambda one: (-one.rounds, one.rank))


def _by_arrivals(job: JobTimeline) -> list[tuple[int, int]]:
    """Return the last worker of each round, and its delay in ns, as servers or workers have recorded it."""
    rounds: dict[Round, dict[int, int]] = defaultdict(dict)
    for process in job.processes:
        for event in process.events:
            if event.kind == ARRIVED:
                rank = process.file.rank if event.whom == NOBODY else event.whom
                which = (*_store(process, event.store), event.slice, event.round)
                rounds[which].setdefault(rank, event.begin)  # a repeated part arrives twice
    found = []
    for times in rounds.values():
        if len(times) > 1:
            before, last = sorted(times, key=times.__getitem__)[-2:]
            found.append((last, times[last] - times[before]))
    return found


def _store(process: JobProcess, number: int) -> Round:
    """Identify a store in the same way in all processes that take part in its rounds."""
    if process.file.role != "worker":
        return process.file.role, process.file.rank, process.file.pid, number
    kind = process.stores[number].type if number in process.stores else ""
    alike = [one.number for one in process.stores.values() if one.type == kind]
    return process.file.role, kind, alike.index(number) if number in alike else number


def _by_waits(job: JobTimeline) -> Iterator[tuple[int, int]]:
    """Return the same by the waits of the others: the one that waited least arrived just before it."""
    rounds: dict[Round, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for process in job.of_role("worker"):
        for event in process.events:
            if event.kind == WAITING and 0 <= event.whom < NOBODY and event.slice != NO_SLICE:
                place = (*_store(process, event.store), event.slice, event.round)
                rounds[place][event.whom].append(event.ns)
    for waits in rounds.values():
        last = max(waits, key=lambda rank: len(waits[rank]))
        yield last, min(waits[last])
