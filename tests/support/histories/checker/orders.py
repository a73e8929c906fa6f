"""Stores without rounds: some order of the pushes explains all reads of a cell."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from ..events import History, Key, Push, Violation
from .facts import Facts, Seen

Place = tuple[Key, int]  # a cell of a key


def check(history: History) -> list[Violation]:
    """Check each cell of each key for itself."""
    facts = Facts(history)
    of_cell = _of_all if history.keeps == "all" else _of_last
    found = [
        one
        for key in facts.keys
        for cell in facts.cells(key)
        for one in of_cell(facts, (key, cell), facts.seen(key, cell))
    ]
    return list(dict.fromkeys(found))


# ------------------------------------------------------------------------------------------ values add up


def _of_all(facts: Facts, place: Place, seen: list[Seen]) -> Iterator[Violation]:
    """Values are sets of pushes, of any two of which one includes the other; settled pushes stay."""
    sets = [(one, frozenset(one.contents)) for one in seen]
    calls = facts.pushes[place[0]]
    settled = {push: facts.settled(push, place[0]) for push in calls if place not in calls[push].bad}
    for one, there in sets:
        yield from _missing(facts, place, one, there, settled)
    for (first, some), (second, more) in pairwise(sorted(sets, key=lambda one: len(one[1]))):
        if not some <= more:
            yield Violation("not one order", f"{_told(first)}, and {_told(second)}: neither holds the other")
    for at, (one, there) in enumerate(sets):
        back = next((other for other, had in sets[:at] if _before(other, one) and not had <= there), None)
        if back is not None:
            yield Violation("went back", f"{_told(one)} lacks what {_told(back)} had")


def _missing(
    facts: Facts, place: Place, one: Seen, there: frozenset[Push], settled: dict[Push, float]
) -> Iterator[Violation]:
    last: dict[int, int] = {}
    for push in there:
        last[push.slot] = max(last.get(push.slot, 0), push.number)
    for push, when in settled.items():
        if push in there:
            continue
        if when < one.event.called or _own(facts, push, one):
            yield Violation("lost push", f"{_told(one)} lacks {_who(push)}, settled at {when:.4f}")
        elif push.number < last.get(push.slot, 0):
            yield Violation("gap", f"{_told(one)} lacks {_who(push)}, and has a later one")
        elif any(when < facts.pushes[one.key][other].called for other in there if when < math.inf):
            yield Violation("gap", f"{_told(one)} lacks {_who(push)}, and has one that was called later")


def _own(facts: Facts, push: Push, one: Seen) -> bool:
    """Whether the reading process made this push before the read and has not been notified of a loss."""
    call = facts.pushes[one.key][push]
    mine = push.slot == one.event.slot and one.event.called < facts.told.get(push.slot, math.inf)
    return mine and not call.error and call.called <= one.event.called


def _before(first: Seen, second: Seen) -> bool:
    return first.event.returned < second.event.called


def _who(push: Push) -> str:
    return f"push {push.number} of process {push.slot}"


def _told(one: Seen) -> str:
    event = one.event
    return (
        f"process {event.slot}'s read of key {one.key!r} (cell {one.cell}, "
        f"{event.called:.4f}-{event.returned:.4f}, {len(one.contents)} pushes)"
    )


# ------------------------------------------------------------------------------------- the last one counts


class _Zone(NamedTuple):
    """Between these times a value was there; or, if it is `open`, it was there at some time between."""

    start: float
    stop: float
    open: bool
    push: Push | None


def _of_last(facts: Facts, place: Place, seen: list[Seen]) -> Iterator[Violation]:
    """Registers with distinct values: Gibbons and Korach, Testing shared memories (1997), section 3."""
    several = [one for one in seen if len(one.contents) > 1]
    for one in several:
        yield Violation("not one order", f"{_told(one)} has several pushes, where each replaces the value")
    for one in seen:
        later = [p for p in facts.pushes[place[0]] if one.contents[:1] < (p,) and _own(facts, p, one)]
        if later and one.contents and one.contents[0].slot == one.event.slot:
            yield Violation(
                "not one order", f"{_told(one)} has {_who(one.contents[0])}, not {_who(later[-1])}"
            )
    if several:
        return
    zones = list(_zones(facts, place, seen))
    held = sorted((zone for zone in zones if not zone.open), key=lambda zone: zone[:2])
    for first, second in pairwise(held):
        if second.start < first.stop:
            yield Violation(
                "not one order",
                f"key {place[0]!r}: {first.push} and {second.push} were there at the same time",
            )
    for zone in zones:
        around = (one for one in held if zone.open and one.start < zone.start and zone.stop < one.stop)
        for one in around:
            yield Violation(
                "not one order", f"key {place[0]!r}: {zone.push} came while {one.push} was there all the time"
            )


def _zones(facts: Facts, place: Place, seen: list[Seen]) -> Iterator[_Zone]:
    reads: dict[Push | None, list[tuple[float, float]]] = {None: []}
    for one in seen:
        value = one.contents[0] if one.contents else None
        reads.setdefault(value, []).append((one.event.called, one.event.returned))
    yield _zone(None, [(-2.0, -1.0), *reads.pop(None)])
    spans: dict[Push, list[tuple[float, float]]] = {}
    for push, call in facts.pushes[place[0]].items():
        settled = facts.settled(push, place[0])
        if push in reads or settled < math.inf:
            spans[push] = [(call.called, settled), *reads.get(push, [])]
    for push in spans:
        yield _zone(push, spans[push] + _of_same_process(push, spans))


def _of_same_process(push: Push, spans: dict[Push, list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return what its process's other pushes say of it: it was there before later ones, not earlier."""
    others = [(other.number, calls) for other, calls in spans.items() if other.slot == push.slot]
    sooner = [(called, math.inf) for number, calls in others if number < push.number for called, _ in calls]
    later = [
        (-math.inf, returned) for number, calls in others if number > push.number for _, returned in calls
    ]
    return sooner + later


def _zone(push: Push | None, calls: list[tuple[float, float]]) -> _Zone:
    ended = min(returned for _, returned in calls)
    began = max(called for called, _ in calls)
    if ended < began:
        return _Zone(ended, began, False, push)
    return _Zone(began, ended, True, push)
