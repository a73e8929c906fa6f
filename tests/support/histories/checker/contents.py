"""What holds of every value, in every store."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from ..events import Event, History, Key, Push, Violation
from .facts import Facts


def check(history: History) -> list[Violation]:
    """Each value has a push at most once, only after its call, and no push of a fenced process."""
    facts = Facts(history)
    found: list[Violation] = []
    for key in facts.keys:
        for event, cell, contents in facts.reads(key):
            where = f"process {event.slot} read key {key!r} at {event.returned:.4f}"
            if contents is None:
                found.append(Violation("garbage", f"{where}: it is no sum of pushes"))
            else:
                found += _of_one(facts, event, (key, cell), contents, where)
    return list(dict.fromkeys(found))


def _of_one(
    facts: Facts, event: Event, place: tuple[Key, int], contents: tuple[Push, ...], where: str
) -> Iterator[Violation]:
    for push, times in Counter(contents).items():
        what = f"{where}: push {push.number} of process {push.slot}"
        call = facts.pushes[place[0]].get(push)
        if call is None:
            yield Violation("unknown push", f"{what} is in it, and was never called")
            continue
        if times > 1:
            yield Violation("twice", f"{what} is in it {times} times")
        if call.called > event.returned:
            yield Violation("early", f"{what} is in it, and was called at {call.called:.4f}")
        if place in call.bad:
            yield Violation("failed push", f"{what} is in it, and must have failed")
        if call.called > _fenced(facts, push.slot) and not call.good:
            yield Violation("fenced", f"{what} is in it, and was fenced")


def _fenced(facts: Facts, slot: int) -> float:
    """Return the time from which no push of a process may be applied: it, or all others, know of its loss."""
    if not any(one.kind == "stopped" for one in facts.faults.get(slot, ())):
        return math.inf
    own = min((one.returned for one in facts.by_slot[slot] if one.error == "FencedError"), default=math.inf)
    others = [
        when for other, when in facts.told.items() if other != slot and when > facts.hurt.get(slot, math.inf)
    ]
    alone = facts.history.on_peer_loss == "raise" and len(facts.history.faults) == 1
    return min([own, *others]) if alone else own
