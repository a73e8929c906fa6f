"""Histories told call by call, for the tests of the checker."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .events import Contents, Event, Fault, History, Key, Push, Read

#: Pushes of each process: up to a number, or these.
Told = Mapping[int, int | Sequence[int]]


class Story:
    """A history in the making. Calls follow each other, one second each, unless times are given."""

    def __init__(self, workers: int = 2, **job: Any) -> None:
        self.workers, self.job = workers, job
        self.events: list[Event] = []
        self.faults: list[Fault] = []
        self.now = 0.0
        self._numbers: dict[tuple[int, Key], int] = {}

    def call(
        self,
        slot: int,
        verb: str,
        *keys: Key,
        start: float | None = None,
        end: float | None = None,
        **rest: Any,
    ) -> Event:
        """Add a call."""
        start = self.now if start is None else start
        end = start + 0.5 if end is None else end
        self.now = max(self.now, start, end if end < math.inf else 0.0) + 0.5
        self.events.append(Event(slot, verb, keys or ("w",), start, end, **rest))
        return self.events[-1]

    def push(self, slot: int, *keys: Key, verb: str = "push", **rest: Any) -> None:
        """Push the next value."""
        for key in keys or ("w",):
            self._numbers[slot, key] = self._numbers.get((slot, key), 0) + 1
        pushed = {key: self._numbers[slot, key] for key in keys or ("w",)}
        self.call(slot, verb, *keys, pushed=pushed, **rest)

    def everybody(self, *keys: Key, verb: str = "push") -> None:
        """Let all push."""
        for slot in range(self.workers):
            self.push(slot, *keys, verb=verb)

    def pull(self, slot: int, *cells: Told | None, **rest: Any) -> None:
        """Read key "w", whose cells have these contents."""
        self.read(slot, {"w": cells}, **rest)

    def read(
        self, slot: int, keys: Mapping[Key, Sequence[Told | None]], verb: str = "pull", **rest: Any
    ) -> None:
        """Read some keys."""
        reads = {
            key: Read(tuple((at, self._contents(cell)) for at, cell in enumerate(cells)))
            for key, cells in keys.items()
        }
        self.call(slot, verb, *keys, read=reads, **rest)

    def _contents(self, told: Told | None) -> Contents:
        if told is None:
            return None
        return tuple(Push(slot, number) for slot, one in told.items() for number in self._some(one))

    def _some(self, told: int | Sequence[int]) -> Sequence[int]:
        if not isinstance(told, int):
            return told
        return [told] * (told > 0) if self.job.get("keeps") == "last" else range(1, told + 1)

    def fault(self, kind: str, slot: int, **rest: Any) -> None:
        """Let something happen to a process now."""
        self.faults.append(Fault(kind, rest.pop("role", "worker"), slot, self.now, **rest))
        self.now += 0.5

    def fails(self, slot: int, error: str = "PeerLostError", verb: str = "pull", **rest: Any) -> None:
        """Let a call raise."""
        self.call(slot, verb, error=error, **{"text": "worker is lost", **rest})

    def history(self) -> History:
        """Return the recorded events."""
        return History(tuple(self.events), self.workers, faults=tuple(self.faults), **self.job)
