"""Spans of one thread as a trace needs them: any two are nested or disjoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...events import Event


@dataclass(eq=False)
class Span:
    """A span, and the one in which it lies directly."""

    event: Event
    parent: Span | None


@dataclass(eq=False)
class Lane:
    """Spans that are nested, the outer ones first, and those of them that have not ended."""

    spans: list[Span]
    open: list[Span]

    def add(self, event: Event) -> bool:
        """Add the next span if it is nested in the innermost open one; return whether it is."""
        while self.open and self.open[-1].event.end <= event.begin:
            self.open.pop()
        parent = self.open[-1] if self.open else None
        if parent is not None and event.end > parent.event.end:
            return False
        span = Span(event, parent)
        self.spans.append(span)
        self.open.append(span)
        return True


def lanes(events: Iterable[Event]) -> list[list[Span]]:
    """Distribute spans to lanes, in each of which they are nested.

    Parameters
    ----------
    events : iterable of Event
        By their begin; of those that begin together, the longest first.
    """
    found: list[Lane] = []
    for event in events:
        if not any(lane.add(event) for lane in found):
            found.append(Lane([], []))
            found[-1].add(event)
    return [lane.spans for lane in found]


def by_thread(events: Sequence[Event]) -> dict[int, list[Event]]:
    """Return the events of each thread."""
    found: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        found[event.thread].append(event)
    return dict(found)
