"""The worker that arrives last in the rounds of a job, and its delay."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from ...events import ARRIVED, NOBODY
from .model import JobProcess, JobTimeline

Round = tuple[object, ...]


@dataclass(frozen=True)
class Last:
    """A worker that arrived last in rounds of keys, or of parts of keys."""

    rank: int
    rounds: int  # in which it arrived last
    of: int  # rounds in which at least two workers arrived
    lead: float  # median of the seconds between the worker before it and itself, in its rounds


def ranking(job: JobTimeline) -> list[Last]:
    """Return the workers that arrived last in any round, by the number of these rounds."""
    leads: dict[int, list[int]] = defaultdict(list)
    for times in _arrivals(job).values():
        if len(times) > 1:
            before, last = sorted(times, key=times.__getitem__)[-2:]
            leads[last].append(times[last] - times[before])
    of = sum(map(len, leads.values()))
    found = [Last(rank, len(all_), of, median(all_) * 1e-9) for rank, all_ in leads.items()]
    return sorted(found, key=lambda one: (-one.rounds, one.rank))


def _arrivals(job: JobTimeline) -> dict[Round, dict[int, int]]:
    """Return the time at which each worker arrived in each round, as servers or workers have recorded it."""
    rounds: dict[Round, dict[int, int]] = defaultdict(dict)
    for process in job.processes:
        for event in process.spans(frozenset((ARRIVED,))):
            rank = process.file.rank if event.whom == NOBODY else event.whom
            which = (*_store(process, event.store), event.slice, event.round)
            rounds[which].setdefault(rank, event.begin)  # a repeated part arrives twice
    return rounds


def _store(process: JobProcess, number: int) -> Round:
    """Identify a store in the same way in all processes that take part in its rounds."""
    if process.file.role != "worker":
        return process.file.role, process.file.rank, process.file.pid, number
    kind = process.stores[number].type if number in process.stores else ""
    alike = [one.number for one in process.stores.values() if one.type == kind]
    return process.file.role, kind, alike.index(number) if number in alike else number
