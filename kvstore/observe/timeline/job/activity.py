"""What a process did at each time: computed outside of the store, or one of the phases of the store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ...counters import PHASES
from ...events import CALL, STEP
from ..threads import ENGINE
from .model import OF_THREADS, JobEvent, JobProcess

#: Where the time of a worker goes: together they are all of it. `calls`: the rest of the calls of the store.
SHARES = ("computing", *PHASES, "calls")

_IN_STORE = OF_THREADS | {STEP}


class Segment(NamedTuple):
    """A part of a span in which no other span is within it."""

    begin: int
    end: int
    event: JobEvent


def segments(spans: Iterable[JobEvent]) -> Iterator[Segment]:
    """Cut spans into what they are in themselves: at each time the one that began last.

    Parameters
    ----------
    spans : iterable of JobEvent
        By their begin; of those that begin together, the longest first.
    """
    edges = [(span.begin, 1, at, span) for at, span in enumerate(spans) if span.ns]
    edges += [(span.end, 0, at, span) for _, _, at, span in edges]
    edges.sort(key=lambda edge: edge[:3])
    active: dict[int, JobEvent] = {}
    before = 0
    for time, begins, at, span in edges:
        if active and time > before:
            yield Segment(before, time, active[next(reversed(active))])
        before = time
        if begins:
            active[at] = span
        else:
            del active[at]


def shares(process: JobProcess, begin: int, end: int) -> dict[str, int]:
    """Return for each of SHARES the ns between two times; together they are all of it.

    What threads of the user wait for, while the store works for them in the background, counts as what it
    does meanwhile.
    """
    callers = calling_threads(process)
    own = [span for span in process.spans(_IN_STORE) if span.thread in callers]
    others = [span for span in process.spans() if span.thread not in callers and span.kind < len(PHASES)]
    found = dict.fromkeys(SHARES, 0)
    held: list[tuple[int, int]] = []  # times in a call, and in none of its phases
    for one in clipped(segments(own), begin, end):
        if one.event.kind < len(PHASES):
            found[PHASES[one.event.kind]] += one.end - one.begin
        else:
            held.append((one.begin, one.end))
    for kind, ns in _meanwhile(held, list(clipped(segments(others), begin, end))):
        found["calls" if kind is None else PHASES[kind]] += ns
    found["computing"] = end - begin - sum(found.values())
    return found


def calling_threads(process: JobProcess) -> set[int]:
    """Return the threads of the user: all that call the store, without those of its engine."""
    names = process.file.threads
    calling = {event.thread for event in process.events if event.kind in (CALL, STEP)}
    own = {thread for thread in calling if names.get(thread) != ENGINE}
    return own or {process.file.pid}


def clipped(found: Iterable[Segment], begin: int, end: int) -> Iterator[Segment]:
    """Return what lies between two times."""
    for one in found:
        if one.end > begin and one.begin < end:
            yield Segment(max(one.begin, begin), min(one.end, end), one.event)


def _meanwhile(
    times: Sequence[tuple[int, int]], others: Sequence[Segment]
) -> Iterator[tuple[int | None, int]]:
    """Yield what others did at these times, each in order and disjoint, and how long; None: nothing."""
    at = 0
    for begin, end in times:
        idle = end - begin
        while at < len(others) and others[at].end <= begin:
            at += 1
        for other in others[at:]:
            if other.begin >= end:
                break
            ns = min(other.end, end) - max(other.begin, begin)
            idle -= ns
            yield other.event.kind, ns
        yield None, idle


def union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the times in which at least one of the spans is, in order and disjoint."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def common(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> int:
    """Return for how long both are; each is as `union` returns it."""
    total, at = 0, 0
    for begin, end in one:
        while at < len(other) and other[at][1] <= begin:
            at += 1
        for b, e in other[at:]:
            if b >= end:
                break
            total += min(e, end) - max(b, begin)
    return total
