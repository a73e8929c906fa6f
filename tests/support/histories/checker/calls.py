"""Every call returns, and only with errors that the faults explain."""

from __future__ import annotations

import math

from ..events import ABANDONED, Event, History, Violation
from .facts import Facts


def check(history: History) -> list[Violation]:
    """Find calls without an answer, errors without a cause, and calls that a fenced process got through."""
    facts = Facts(history)
    found = [_of_one(facts, one) for one in facts.events]
    return [one for one in found if one is not None] + _after_fence(facts)


def _of_one(facts: Facts, event: Event) -> Violation | None:
    what = f"{event.verb} of {', '.join(map(repr, event.keys))} by process {event.slot} at {event.called:.4f}"
    killed = any(one.kind == "killed" for one in facts.faults.get(event.slot, ()))
    if event.returned == math.inf:
        return None if killed else Violation("no answer", f"{what} never returned")
    if not event.error or event.verb == "begin" or _explained(facts, event):
        return None
    return Violation("unexplained error", f"{what} raised {event.error}: {event.text}")


def _explained(facts: Facts, event: Event) -> bool:
    before = [one for one in facts.history.faults if one.start <= event.returned and one.kind != "paused"]
    own = [one for one in before if one.role == "worker" and one.slot == event.slot]
    if event.error == ABANDONED:
        return bool(before)
    if event.error == "UpdaterError":
        return any(one.bad for one in facts.events)
    if event.error == "FencedError":
        return any(one.kind == "stopped" for one in own)
    if event.error != "PeerLostError" or not before:
        return False
    only_workers = all(one.role == "worker" for one in before)
    if facts.history.on_peer_loss == "continue" and only_workers:
        return bool(own)
    return True


def _after_fence(facts: Facts) -> list[Violation]:
    found = []
    for slot, events in facts.by_slot.items():
        fenced = min((one.returned for one in events if one.error == "FencedError"), default=math.inf)
        found += [
            Violation("works after fence", f"{one.verb} of process {slot} at {one.called:.4f} went well")
            for one in events
            if one.called > fenced and one.good and one.pushed
        ]
    return found
