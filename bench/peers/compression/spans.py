"""When operators ran, from a trace in Chrome's format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

Span = tuple[float, float]


def read(text: str, name: str) -> list[Span]:
    """Return the seconds at which each run of an operator began and ended.

    `text` is a trace during its writing: with its head, or from a comma on, and not yet closed.
    """
    found: list[Span] = []
    running: dict[tuple[Any, Any], float] = {}
    events = text.rpartition('"traceEvents": [')[2].strip().strip(",")
    for event in json.loads(f"[{events}]"):
        if event.get("name") != name:
            continue
        thread, at = (event["pid"], event["tid"]), 1e-6 * event["ts"]
        if event["ph"] == "B":
            running[thread] = at
        elif event["ph"] == "E":
            found.append((running.pop(thread), at))
    return found


def covered(spans: Iterable[Span]) -> float:
    """Return the seconds in which at least one of the runs was active."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
