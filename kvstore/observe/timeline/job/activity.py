"""The activity of a process at each time: computing outside of the store, or one of its phases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ...counters import PHASES
from ...events import CALL, STEP, Event
from ...intervals import Times, common, length
from ..threads import ENGINE
from .model import OF_THREADS, JobProcess

#: The parts of the time of a worker; their sum is all of it. `calls` is the rest of the calls of the store.
SHARES = ("computing", *PHASES, "calls")

_IN_STORE = OF_THREADS | {STEP}


class Segment(NamedTuple):
    """A part of a span in which no other span lies."""

    begin: int
    end: int
    event: Event


def segments(spans: Iterable[Event]) -> Iterator[Segment]:
    """Cut spans into disjoint segments: at each time, the span that began last.

    Parameters
    ----------
    spans : iterable of Event
        By their begin; of those that begin together, the longest first.
    """
    edges = [(span.begin, 1, at, span) for at, span in enumerate(spans) if span.ns > 0]
    edges += [(span.end, 0, at, span) for _, _, at, span in edges]
    edges.sort(key=lambda edge: edge[:3])
    active: dict[int, Event] = {}
    before = 0
    for time, begins, at, span in edges:
        if active and time > before:
            yield Segment(before, time, active[next(reversed(active))])
        before = time
        if begins:
            active[at] = span
        else:
            del active[at]


def shares(process: JobProcess, times: Times) -> dict[str, int]:
    """Return the ns of each of SHARES in these times.

    While a thread of the user waits for an operation in the background, the time counts as the phase of that
    operation.
    """
    callers = calling_threads(process)
    own = [span for span in process.spans(_IN_STORE) if span.thread in callers]
    others = [span for span in process.spans() if span.thread not in callers and span.kind < len(PHASES)]
    phases, calls = _by_phase(segments(own))
    held = common(times, calls)
    found = {name: length(common(times, phases[name])) for name in PHASES} | {"calls": length(held)}
    for name, background in _by_phase(segments(others))[0].items():
        hidden = length(common(held, background))
        found[name] += hidden
        found["calls"] -= hidden
    return {"computing": length(times) - sum(found.values()), **found}


def _by_phase(found: Iterable[Segment]) -> tuple[dict[str, Times], Times]:
    """Return the times of each phase, and those in a call or a step that are in no phase."""
    phases: dict[str, Times] = {name: [] for name in PHASES}
    calls: Times = []
    for one in found:
        phase = one.event.kind < len(PHASES)
        (phases[PHASES[one.event.kind]] if phase else calls).append((one.begin, one.end))
    return phases, calls


def calling_threads(process: JobProcess) -> set[int]:
    """Return the threads of the user: all that call the store, but those of its engine."""
    names = process.file.threads
    calling = {event.thread for event in process.events if event.kind in (CALL, STEP)}
    own = {thread for thread in calling if names.get(thread) != ENGINE}
    return own or {process.file.pid}
