"""Files of a timeline that are made by hand: their content is known."""

from __future__ import annotations

from typing import Any

from kvstore.observe.events import NOBODY, Event
from kvstore.observe.timeline.clocks import ClockSample
from kvstore.observe.timeline.process_trace import VERSION, ProcessTrace
from kvstore.observe.timeline.sources import StoreRecord

MS = 1_000_000
Row = tuple[int, float, float, dict[str, Any]]


def row(kind: int, begin: float, end: float, **about: Any) -> Row:
    """An event; times are ms."""
    return kind, begin, end, about


def in_ring(rows: list[Row]) -> list[Event]:
    """Return the events in the order of the ring: those that end first are first."""
    usual = {"slice": 0, "round": 0, "nbytes": 0, "thread": 100, "whom": NOBODY, "store": 0}
    return [
        Event(begin=round(begin * MS), end=round(end * MS), kind=kind, **{**usual, **about})
        for kind, begin, end, about in sorted(rows, key=lambda one: one[2])
    ]


def store(rank: int = 0, size: int = 2, kind: str = "shared", **changes: Any) -> StoreRecord:
    return StoreRecord(0, kind, "job", rank, size, {0: "w", 1: "b"})._replace(**changes)


def file(rows: list[Row], role: str = "worker", rank: int = 0, **changes: Any) -> ProcessTrace:
    """A file of a process with one store, whose main thread is 100."""
    kind = "shared" if role == "worker" else role
    facts: dict[str, Any] = {
        "version": VERSION, "role": role, "rank": rank, "size": 2, "job": "job", "host": "a", "pid": 100,
        "clock": "a", "monotonic": 0, "realtime": 0, "scheduler": [], "stores": [store(rank, kind=kind)],
        "labels": ["w", "b"], "threads": {100: "MainThread"}, "overwritten": 0, "events": in_ring(rows),
    }  # fmt: skip
    return ProcessTrace(**(facts | changes))


def sample(at: float, offset: float, uncertainty: float) -> ClockSample:
    """A comparison of clocks; all in ms."""
    return ClockSample(round(at * MS), round(offset * MS), round(uncertainty * MS))
