"""Checks steps: a call reads all of a step or none, all processes continue from one step, and it stays.

The checks apply where all processes push in steps only; a joined process has no such guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..events import Contents, Event, History, Key, Push, Violation
from .facts import Facts


class _Part(NamedTuple):
    """One piece of a key in a read: the last push of each process in it."""

    event: Event
    key: Key
    last: dict[int, int]

    def has(self, step: Event) -> bool:
        """Whether a step has reached this key."""
        return self.last.get(step.slot, 0) >= step.pushed[self.key]


def check(history: History) -> list[Violation]:
    """Check keys that are good each by itself."""
    facts = Facts(history)
    steps = [one for one in facts.events if one.verb == "step" and one.slot < history.workers]
    if not steps or not _promised(facts):
        return []
    parts = list(_parts(facts))
    apart = list(_halves(steps, parts)) or list(_two(facts, steps, parts))
    return list(dict.fromkeys([*apart, *_gone(facts, steps, parts), *_unread(facts)]))


def _promised(facts: Facts) -> bool:
    pushes = [one for one in facts.events if one.pushed]
    replaced = facts.history.kind != "sync" and facts.history.keeps == "last"
    return all(one.verb == "step" and not one.bad for one in pushes) and not replaced


def _parts(facts: Facts) -> Iterator[_Part]:
    for key in facts.keys:
        for event, _, contents in facts.reads(key):
            if facts.released.get(event.slot, math.inf) > event.called:
                yield _Part(event, key, _last(facts, contents))


def _last(facts: Facts, contents: Contents) -> dict[int, int]:
    """Return the last push of each process that is in a value; in rounds all members have the same."""
    if facts.history.kind == "sync":
        return dict.fromkeys(facts.slots, max((one.number for one in contents or ()), default=0))
    return {one.slot: one.number for one in sorted(contents or ())}


# -------------------------------------------------------------------------------------- one and the same step


def _halves(steps: list[Event], parts: list[_Part]) -> Iterator[Violation]:
    """Whether one call has read some keys with a step and other keys without it."""
    calls: dict[int, list[_Part]] = {}
    for one in parts:
        calls.setdefault(id(one.event), []).append(one)
    for each in calls.values():
        yield from _parted("half a step", steps, each)


def _two(facts: Facts, steps: list[Event], parts: list[_Part]) -> Iterator[Violation]:
    """Once all processes know of a loss, all reads are of one step."""
    return _parted("two steps", steps, [one for one in parts if one.event.called > facts.all_told])


def _parted(kind: str, steps: list[Event], parts: Iterable[_Part]) -> Iterator[Violation]:
    for step in steps:
        of_step = [one for one in parts if one.key in step.pushed]
        having = next((one for one in of_step if one.has(step)), None)
        lacking = next((one for one in of_step if not one.has(step)), None)
        if having and lacking:
            yield Violation(kind, f"{_told(step)} is in {_read(having)}, and not in {_read(lacking)}")


# ------------------------------------------------------------------------------------------------- it stays


def _gone(facts: Facts, steps: list[Event], parts: list[_Part]) -> Iterator[Violation]:
    """Whether a step is not there that all have made, or that was read in all of its keys."""
    for step in steps:
        since = min(_made(facts, step), _whole(step, parts))
        later = (one for one in parts if one.event.called > since and one.key in step.pushed)
        for one in [one for one in later if not one.has(step)][:1]:
            text = f"{_told(step)} was whole at {since:.4f}, and is not in {_read(one)}"
            yield Violation("lost step", text)


def _made(facts: Facts, step: Event) -> float:
    """Return the time at which the steps of all members that push with this step had ended well."""
    ends = [
        _end(facts, key, Push(slot, number))
        for key, number in step.pushed.items()
        for slot in range(facts.history.workers)
    ]
    return max(ends)


def _end(facts: Facts, key: Key, push: Push) -> float:
    call = facts.pushes[key].get(push)
    if call is None:
        return facts.released.get(push.slot, math.inf)
    return call.returned if call.good else math.inf


def _whole(step: Event, parts: list[_Part]) -> float:
    """Return the time at which each key of a step had been read with it by some process."""
    first = dict.fromkeys(step.pushed, math.inf)
    for one in parts:
        if one.key in first and one.has(step):
            first[one.key] = min(first[one.key], one.event.returned)
    return max(first.values())


def _unread(facts: Facts) -> Iterator[Violation]:
    """Whether a survivor cannot read or save after the loss of a worker."""
    if any(one.role != "worker" for one in facts.history.faults):
        return
    for one in facts.events:
        knows = one.called > facts.told.get(one.slot, math.inf) and one.slot not in facts.hurt
        if knows and one.verb in ("pull", "save") and one.error == "PeerLostError":
            yield Violation(
                "no step to read", f"{one.verb} of process {one.slot} at {one.called:.4f} failed: {one.text}"
            )


def _told(step: Event) -> str:
    return f"the step of process {step.slot} at {step.called:.4f}"


def _read(one: _Part) -> str:
    return f"key {one.key!r}, read by process {one.event.slot} at {one.event.called:.4f}"
