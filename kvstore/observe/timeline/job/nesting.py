"""Spans of one thread as a trace needs them: any two are nested or disjoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...events import Event


@dataclass(eq=False)
class Span:
    """A span, and the innermost span around it."""

    event: Event
    parent: Span | None


def lanes(events: Iterable[Event]) -> list[list[Span]]:
    """Distribute spans to lanes, in each of which they are nested.

    Parameters
    ----------
    events : iterable of Event
        By their begin; of those that begin together, the longest first.
    """
    found: list[tuple[list[Span], list[Span]]] = []  # the spans of each lane, and those that have not ended
    for event in events:
        for lane in found:
            _, unfinished = lane
            while unfinished and unfinished[-1].event.end <= event.begin:
                unfinished.pop()
            parent = unfinished[-1] if unfinished else None
            if parent is None or event.end <= parent.event.end:
                break
        else:
            parent, lane = None, ([], [])
            found.append(lane)
        span = Span(event, parent)
        for spans in lane:
            spans.append(span)
    return [spans for spans, _ in found]


def by_thread(events: Sequence[Event]) -> dict[int, list[Event]]:
    """Return the events of each thread."""
    found: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        found[event.thread].append(event)
    return dict(found)
