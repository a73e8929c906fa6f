"""What follows from a history before anything is judged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from ..events import Contents, Event, Fault, History, Key, Push

LOSS = ("PeerLostError", "FencedError")


class Seen(NamedTuple):
    """One cell of a key in one read."""

    event: Event
    key: Key
    cell: int
    contents: tuple[Push, ...]


class Facts:
    """A history, by process and by key."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.events = sorted(history.events, key=lambda one: one.called)
        self.slots = sorted({one.slot for one in self.events})
        self.keys = list(dict.fromkeys(key for one in self.events for key in one.keys))

    @cached_property
    def by_slot(self) -> dict[int, list[Event]]:
        """Events of each process, in the order of its calls."""
        return {slot: [one for one in self.events if one.slot == slot] for slot in self.slots}

    @cached_property
    def pushes(self) -> dict[Key, dict[Push, Event]]:
        """The call of each push into each key."""
        found: dict[Key, dict[Push, Event]] = {key: {} for key in self.keys}
        for one in self.events:
            for key, number in one.pushed.items():
                found[key][Push(one.slot, number)] = one
        return found

    def reads(self, key: Key) -> Iterator[tuple[Event, int, Contents]]:
        """All pieces of all reads of a key."""
        for one in self.events:
            if key in one.read:
                for cell, contents in one.read[key].pieces:
                    yield one, cell, contents

    def cells(self, key: Key) -> list[int]:
        """First cells of the pieces that a key ever was torn into."""
        return sorted({at for one in self.events if key in one.read for at, _ in one.read[key].pieces})

    def seen(self, key: Key, cell: int) -> list[Seen]:
        """Return all reads of a cell, in the order of their calls."""
        found = [(one, one.read[key].at(cell)) for one in self.events if key in one.read]
        return [Seen(one, key, cell, contents) for one, contents in found if contents is not None]

    @cached_property
    def faults(self) -> dict[int, list[Fault]]:
        """What happened to each worker."""
        found: dict[int, list[Fault]] = {}
        for one in self.history.faults:
            if one.role == "worker":
                found.setdefault(one.slot, []).append(one)
        return found

    @cached_property
    def told(self) -> dict[int, float]:
        """The time at which each process first got an error of a loss, its own included."""
        found: dict[int, float] = {}
        for one in self.events:
            if one.error in LOSS:
                found[one.slot] = min(found.get(one.slot, math.inf), one.returned)
        return found

    @cached_property
    def all_told(self) -> float:
        """The time at which all remaining processes had got an error of a loss."""
        there = [slot for slot in self.slots if slot not in self.hurt and slot not in self.released]
        return max((self.told.get(slot, math.inf) for slot in there), default=math.inf)

    @cached_property
    def released(self) -> dict[int, float]:
        """The processes that have joined or left on their own: from the call on, no round waits for them."""
        found: dict[int, float] = {}
        for one in self.events:
            if one.verb in ("join", "close") and one.called < self.told.get(one.slot, math.inf):
                found.setdefault(one.slot, one.called)
        return found

    @cached_property
    def hurt(self) -> dict[int, float]:
        """When each process that is lost was alive and well for the last time."""
        found = {
            slot: min(fault.start for fault in faults if fault.kind != "paused")
            for slot, faults in self.faults.items()
            if any(fault.kind != "paused" for fault in faults)
        }
        return found

    @cached_property
    def replaced(self) -> set[int]:
        """The processes that pushed nothing here and were replaced by a later process of their rank."""
        workers = self.history.workers
        active = {push.slot for pushes in self.pushes.values() for push in pushes}
        later = {slot % workers for slot in self.slots if slot >= workers}
        return later - active

    def settled(self, push: Push, key: Key) -> float:
        """When it was known to its process that a push has taken effect."""
        call = self.pushes[key][push]
        if self.history.kind == "local":
            return call.returned if call.good else math.inf
        told = self.told.get(push.slot, math.inf)  # a later read need not have the push
        waits = (
            one.returned
            for one in self.by_slot[push.slot]
            if call.called <= one.called <= told and one.good and key in one.read
        )
        return min(waits, default=math.inf)


def named(slots: Iterable[int]) -> str:
    """Return the text that names these processes."""
    return ", ".join(f"process {slot}" for slot in slots)
