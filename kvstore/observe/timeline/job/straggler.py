"""Who comes last in the rounds of a job, and by how much."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from ...counters import WAITING
from ...events import ARRIVED, NOBODY
from .model import NO_SLICE, JobProcess, JobTimeline

Round = tuple[object, ...]


class Last(NamedTuple):
    """How often a worker came last.

    Attributes
    ----------
    rank : int
    rounds : int
        Rounds of keys, or of parts of keys, in which it was last.
    of : int
        Rounds in which at least two workers were seen.
    lead : float
        Median of the seconds between the one before it and itself, in these rounds.
    """

    rank: int
    rounds: int
    of: int
    lead: float


def ranking(job: JobTimeline) -> list[Last]:
    """Return the workers that came last in any round, the one that did so most often first."""
    leads: dict[int, list[int]] = defaultdict(list)
    for rank, lead in _by_arrivals(job) or _by_waits(job):
        leads[rank].append(lead)
    of = sum(map(len, leads.values()))
    found = [Last(rank, len(all_), of, median(all_) * 1e-9) for rank, all_ in leads.items()]
    return sorted(found, key=lambda one: (-one.rounds, one.rank))


def _by_arrivals(job: JobTimeline) -> list[tuple[int, int]]:
    """Who was last in each round, and by how many ns, as servers or the workers themselves have seen it."""
    rounds: dict[Round, dict[int, int]] = defaultdict(dict)
    for process in job.processes:
        for event in process.events:
            if event.kind == ARRIVED:
                rank = process.file.rank if event.whom == NOBODY else event.whom
                which = (*_store(process, event.store), event.slice, event.round)
                rounds[which].setdefault(rank, event.begin)  # what is sent again arrives again
    found = []
    for times in rounds.values():
        if len(times) > 1:
            before, last = sorted(times, key=times.__getitem__)[-2:]
            found.append((last, times[last] - times[before]))
    return found


def _store(process: JobProcess, number: int) -> Round:
    """Name a store so that processes which share its rounds give it the same name."""
    if process.file.role != "worker":
        return process.file.role, process.file.rank, process.file.pid, number
    kind = process.stores[number].type if number in process.stores else ""
    alike = [one.number for one in process.stores.values() if one.type == kind]
    return process.file.role, kind, alike.index(number) if number in alike else number


def _by_waits(job: JobTimeline) -> Iterator[tuple[int, int]]:
    """As `_by_arrivals`, by whom the others waited for; whoever waited least had come before it."""
    rounds: dict[Round, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for process in job.of_role("worker"):
        for event in process.events:
            if event.kind == WAITING and 0 <= event.whom < NOBODY and event.slice != NO_SLICE:
                place = (*_store(process, event.store), event.slice, event.round)
                rounds[place][event.whom].append(event.ns)
    for waits in rounds.values():
        last = max(waits, key=lambda rank: len(waits[rank]))
        yield last, min(waits[last])
