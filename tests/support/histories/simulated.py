"""Histories of the simulator's jobs: one for each store of a job."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from typing import Any

from .events import ABANDONED, Contents, Event, Fault, History, Key, Push, Read

NOTICED = 5.0  # seconds: heartbeats that stop, and a view that is sent again


class SimulatedCalls:
    """Records the calls of all stores of one job, on its clock."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._events: dict[tuple[Any, Hashable], Event] = {}
        self._values: dict[tuple[Any, Hashable], dict[Key, dict[int, Any]]] = {}
        self._slots: dict[int, int] = {}  # by incarnation; they are given out as processes start

    def called(
        self, store: Any, name: Hashable, verb: str, keys: tuple[Key, ...], pushed: dict[Key, int], bad: Any
    ) -> None:
        """Note a call."""
        slot = self.slot(store.host)
        self._events[store, name] = Event(slot, verb, keys, store.job.now, pushed=pushed, bad=bad)
        self._values[store, name] = {}

    def came(self, store: Any, name: Hashable, key: Key, part: int, value: Any) -> None:
        """Note the value of one slice."""
        if (store, name) in self._values:
            self._values[store, name].setdefault(key, {})[part] = value

    def unread(self, store: Any, name: Hashable) -> None:
        """Forget the reads of a call: the real store does not read so after a loss."""
        self._values[store, name] = {}

    def returned(self, store: Any, name: Hashable, failure: Any, now: float) -> None:
        """Note an answer."""
        event = self._events.get((store, name))
        if event is None or event.returned < math.inf:
            return
        told = {"error": failure.error, "text": failure.text} if failure is not None else {}
        if store.error is not None and told.get("error") == "ClosedError":
            told["error"] = ABANDONED
        self._events[store, name] = event._replace(returned=now, **told)

    def dropped(self, store: Any, name: Hashable) -> None:
        """Forget a call whose caller did not wait for it."""
        self._events.pop((store, name), None)

    def slot(self, host: Any) -> int:
        """Return the slot of a process: its rank, and how many of that rank were before it."""
        if host.incarnation not in self._slots:
            taken = set(self._slots.values())
            slot = host.rank + self._workers * (host.incarnation >= 200)
            while slot in taken:
                slot += self._workers
            self._slots[host.incarnation] = slot
        return self._slots[host.incarnation]

    def histories(self, job: Any) -> list[History]:
        """Return the history of each store."""
        self._abandon()
        numbers = sorted({store.number for store, _ in self._events})
        return [self._history(job, number) for number in numbers]

    def _abandon(self) -> None:
        """End the calls of a store that was closed after another of its calls got an error."""
        for (store, name), event in self._events.items():
            if event.returned == math.inf and store.error is not None:
                self._events[store, name] = event._replace(returned=store.job.now, error=ABANDONED)

    def _fault(self, kind: str, host: Any, start: float, end: float) -> Fault:
        role = re.findall("[a-z]+", host.name)[0]
        if role != "worker":
            return Fault(kind, role, 0, start, end)
        return Fault(kind, role, self._slot_of_lost(host), start, end)

    def _slot_of_lost(self, host: Any) -> int:
        """Return the slot of a process that may have called nothing, and not even have known its rank."""
        if host.incarnation not in self._slots and host.incarnation < 200:
            free = [slot for slot in range(self._workers) if slot not in self._slots.values()]
            self._slots[host.incarnation] = host.rank if host.rank in free or not free else free[0]
        return self._slots.get(host.incarnation, -1)

    def _history(self, job: Any, number: int) -> History:
        events = [
            event._replace(read=self._reads(store, name)) if event.good else event
            for (store, name), event in self._events.items()
            if store.number == number
        ]
        return History(
            tuple(events),
            self._workers,
            job.plan.mode,
            on_peer_loss=job.plan.on_peer_loss,
            faults=tuple(self._fault(*one) for one in job.happened),
            bases=self._bases(job, number),
            noticed=NOTICED,
            forgotten=tuple((saved, crashed + job.straggling) for saved, crashed in job.crashed.values()),
        )

    def _bases(self, job: Any, number: int) -> dict[tuple[int, Key, int], int]:
        bases: dict[tuple[int, Key, int], int] = {}
        for store in {store for store, _ in self._events if store.number == number}:
            places, slot = store.places.items(), self.slot(store.host)
            bases |= {(slot, *place): store.base(slice_) for slice_, place in places if slot >= self._workers}
        return bases

    def _reads(self, store: Any, name: Hashable) -> dict[Key, Read]:
        return {
            key: Read(tuple((part, self._contents(value)) for part, value in sorted(parts.items())))
            for key, parts in self._values[store, name].items()
            if len(parts) == len(store.entries[key].slices)
        }

    def _contents(self, value: Any) -> Contents:
        payloads = value.payloads()
        if not all(one.number for one in payloads):
            return None  # of one there is a half
        return tuple(sorted(Push(self._slots[one.incarnation], one.number) for one in payloads))
