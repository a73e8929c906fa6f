"""Files of a timeline that are made by hand: what is in them is known."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.observe.events import LAYOUT, NOBODY
from kvstore.observe.timeline.clocks import ClockSample
from kvstore.observe.timeline.process_file import VERSION, ProcessFile
from kvstore.observe.timeline.sources import StoreRecord

MS = 1_000_000
Row = tuple[int, float, float, dict[str, Any]]


def row(kind: int, begin: float, end: float, **about: Any) -> Row:
    """An event; times are ms."""
    return kind, begin, end, about


def packed(rows: list[Row]) -> bytes:
    """As the ring has them; those that end first come first."""
    found = np.zeros(len(rows), np.dtype(list(LAYOUT)))
    for at, (kind, begin, end, about) in enumerate(sorted(rows, key=lambda one: one[2])):
        values = {"whom": NOBODY, "thread": 100, **about}
        for name, value in values.items():
            found[at][name] = value
        found[at]["kind"], found[at]["begin"], found[at]["end"] = kind, round(begin * MS), round(end * MS)
    return found.tobytes()


def store(rank: int = 0, size: int = 2, kind: str = "shared", **changes: Any) -> StoreRecord:
    return StoreRecord(0, kind, "job", rank, size, {0: "w", 1: "b"})._replace(**changes)


def file(rows: list[Row], role: str = "worker", rank: int = 0, **changes: Any) -> ProcessFile:
    """A file of a process with one store, whose main thread is 100."""
    kind = "shared" if role == "worker" else role
    facts: dict[str, Any] = {
        "version": VERSION, "role": role, "rank": rank, "size": 2, "job": "job", "host": "a", "pid": 100,
        "clock": "a", "monotonic": 0, "realtime": 0, "scheduler": [], "stores": [store(rank, kind=kind)],
        "labels": ["w", "b"], "threads": {100: "MainThread"}, "overwritten": 0, "events": packed(rows),
    }  # fmt: skip
    return ProcessFile(**(facts | changes))


def sample(at: float, offset: float, uncertainty: float) -> ClockSample:
    """A comparison of clocks; all in ms."""
    return ClockSample(round(at * MS), round(offset * MS), round(uncertainty * MS))
