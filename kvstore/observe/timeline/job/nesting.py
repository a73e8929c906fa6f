"""Spans of one thread as a trace needs them: each lies within another one, or beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .model import JobEvent


@dataclass(eq=False)
class Span:
    """A span, and those that lie directly within it.

    `own` are the ns that are not those of an inner span.
    """

    event: JobEvent
    parent: Span | None
    own: int


@dataclass(eq=False)
class Lane:
    """Spans that are nested; the inner ones come after the outer ones."""

    spans: list[Span]
    open: list[Span]

    def take(self, event: JobEvent) -> bool:
        """Add the next span, if it lies within the one that is open, or beside all."""
        while self.open and self.open[-1].event.end <= event.begin:
            self.open.pop()
        parent = self.open[-1] if self.open else None
        if parent is not None and event.end > parent.event.end:
            return False
        if parent is not None:
            parent.own -= event.ns
        span = Span(event, parent, event.ns)
        self.spans.append(span)
        self.open.append(span)
        return True


def lanes(events: Iterable[JobEvent]) -> list[list[Span]]:
    """Distribute spans to as few lanes as possible, in each of which they are nested.

    Parameters
    ----------
    events : iterable of JobEvent
        By their begin; of those that begin together, the longest first.
    """
    found: list[Lane] = []
    for event in events:
        if not any(lane.take(event) for lane in found):
            found.append(Lane([], []))
            found[-1].take(event)
    return [lane.spans for lane in found]


def by_thread(events: Sequence[JobEvent]) -> dict[int, list[JobEvent]]:
    """Return the events of each thread."""
    found: dict[int, list[JobEvent]] = defaultdict(list)
    for event in events:
        found[event.thread].append(event)
    return dict(found)
