"""The spans of a process: nested as a trace needs them, and cut into segments that do not overlap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ...counters import PHASES
from ...events import CALL, STEP, Event
from ...intervals import Times, common, length
from ..threads import ENGINE
from .model import OF_THREADS, JobProcess

#: The parts of the time of a worker; their sum is all of it. `calls` is the rest of the calls of the store.
SHARES = ("computing", *PHASES, "calls")


class NestedSpan(NamedTuple):
    """A span, and the innermost call around it."""

    event: Event
    call: Event | None


def nested_lanes(events: Iterable[Event]) -> list[list[NestedSpan]]:
    """Distribute spans to lanes, in each of which any two are nested or disjoint.

    Parameters
    ----------
    events : iterable of Event
        By their begin; of those that begin together, the longest first.
    """
    found: list[tuple[list[NestedSpan], list[NestedSpan]]] = []  # each lane, and its spans without an end yet
    for event in events:
        for _, unfinished in found:
            while unfinished and unfinished[-1].event.end <= event.begin:
                unfinished.pop()
        fitting = (one for one in found if not one[1] or event.end <= one[1][-1].event.end)
        if not (place := next(fitting, None)):
            found.append(place := ([], []))
        lane, unfinished = place
        parent = unfinished[-1] if unfinished else None
        call = parent and (parent.event if parent.event.kind == CALL else parent.call)
        lane.append(NestedSpan(event, call))
        unfinished.append(lane[-1])
    return [lane for lane, _ in found]


def by_thread(events: Sequence[Event]) -> dict[int, list[Event]]:
    """Return the events of each thread."""
    found: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        found[event.thread].append(event)
    return dict(found)


def cut_segments(spans: Iterable[Event]) -> Iterator[tuple[int, int, Event]]:
    """Yield disjoint segments of spans: begin, end and, of the spans at that time, the last that began.

    `spans` are in the order of `nested_lanes`.
    """
    edges = [(span.begin, 1, at, span) for at, span in enumerate(spans) if span.ns > 0]
    edges += [(span.end, 0, at, span) for _, _, at, span in edges]
    edges.sort(key=lambda edge: edge[:3])
    active: dict[int, Event] = {}
    before = 0
    for time, begins, at, span in edges:
        if active and time > before:
            yield before, time, active[next(reversed(active))]
        before = time
        if begins:
            active[at] = span
        else:
            del active[at]


def time_shares(process: JobProcess, times: Times) -> dict[str, int]:
    """Return the ns of each of SHARES in these times.

    While a thread of the user waits for an operation in the background, the time counts as the phase of that
    operation.
    """
    names = process.file.threads
    calling = {event.thread for event in process.events if event.kind in (CALL, STEP)}
    users = {thread for thread in calling if names.get(thread) != ENGINE} or {process.file.pid}
    own = [span for span in process.spans(OF_THREADS | {STEP}) if span.thread in users]
    others = [span for span in process.spans() if span.thread not in users and span.kind < len(PHASES)]
    phases, background = _times_by_phase(own), _times_by_phase(others)
    held = common(times, phases["calls"])
    found = {name: length(common(times, of)) for name, of in phases.items()}
    for name in PHASES:
        hidden = length(common(held, background[name]))
        found[name] += hidden
        found["calls"] -= hidden
    return {"computing": length(times) - sum(found.values()), **found}


def _times_by_phase(spans: Iterable[Event]) -> dict[str, Times]:
    """Return the times of each phase, and as `calls` those of calls and steps that are in no phase."""
    found: dict[str, Times] = {name: [] for name in SHARES[1:]}
    for begin, end, event in cut_segments(spans):
        found[SHARES[1 + min(event.kind, len(PHASES))]].append((begin, end))
    return found
