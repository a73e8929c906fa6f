"""Stores with rounds: the value of each is determined, and a process reads that of its own last push."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..events import Event, History, Key, Push, Violation
from .facts import Facts, Seen


def check(history: History) -> list[Violation]:
    """Check that keys are not torn, and then each cell."""
    facts = Facts(history)
    torn = {key: list(_torn(facts, key)) for key in facts.keys}
    found = [one for each in torn.values() for one in each]
    cells = [(key, cell) for key in facts.keys if not torn[key] for cell in facts.cells(key)]
    found += [one for key, cell in cells for one in CellRounds(facts, key, cell).check()]
    return list(dict.fromkeys(found))


def lost_in(facts: Facts) -> frozenset[int]:
    """The processes whose loss does not stop the rounds."""
    return frozenset() if facts.history.on_peer_loss == "raise" else frozenset({*facts.hurt, *facts.told})


def _torn(facts: Facts, key: Key) -> Iterator[Violation]:
    """All cells are of one round; lost processes may be in some cells of one round."""
    lost = lost_in(facts) | _shifted(facts, key)
    if any(one.bad for one in facts.events):
        return  # rounds of one cell have failed
    for event in facts.events:
        if key not in event.read or len(event.read[key].pieces) == 1:
            continue
        pieces = [contents for _, contents in event.read[key].pieces if contents is not None]
        rest = {tuple(one for one in contents if one.slot not in lost) for contents in pieces}
        counts = [[sum(one.slot == slot for one in contents) for contents in pieces] for slot in lost]
        if len(rest) > 1 or any(max(each) - min(each) > 1 for each in counts):
            where = f"process {event.slot} read key {key!r} at {event.called:.4f}-{event.returned:.4f}"
            yield Violation("torn", f"{where}: its cells are of different rounds: {_short(pieces)}")


def _shifted(facts: Facts, key: Key) -> frozenset[int]:
    """Rejoined processes that met no other worker and begin in rounds that differ between the cells."""
    bases: dict[int, set[int]] = {}
    for (slot, name, _), base in facts.history.bases.items():
        if name == key:
            bases.setdefault(slot, set()).add(base)
    return frozenset(slot for slot, found in bases.items() if len(found) > 1)


def _short(pieces: list[tuple[Push, ...]]) -> str:
    last = [{one.slot: one.number for one in contents} for contents in pieces]
    return "; ".join(
        ", ".join(f"{number} of process {slot}" for slot, number in one.items()) for one in last[:4]
    )


def _last_of(slot: int, one: Seen) -> int:
    """Return the number of the last push of a process that is in a value."""
    return max(push.number for push in one.contents if push.slot == slot)


class Round(NamedTuple):
    """Which round a read is of: any of these, where rounds have failed and left nothing."""

    first: int
    last: int


class CellRounds:
    """All reads of one cell of a key."""

    def __init__(self, facts: Facts, key: Key, cell: int) -> None:
        self.facts, self.key, self.cell = facts, key, cell
        self.lost = lost_in(facts)
        self.seen = facts.seen(key, cell)
        self.bases = self._bases()
        self.failed = self._failed()
        self.rounds = [self.round_of(one.contents) for one in self.seen]

    def check(self) -> Iterator[Violation]:
        """Return the violations."""
        if any(push.slot in self.lost for push in self._bad()):
            return  # whether the bad push spoilt its round is unknown
        values: dict[int, Seen] = {}
        for one, round_ in zip(self.seen, self.rounds, strict=True):
            yield from self._value(one, round_)
            yield from self._place(one, round_)
            same = values.setdefault(round_.first, one)
            if sorted(same.contents) != sorted(one.contents):
                yield Violation(
                    "two values", f"{self.told(one)} differs from {self.told(same)} of the same round"
                )
        for one in self.seen:
            yield from self._stays(one)
        for slot in self.lost & set(self.bases):
            yield from self._left(slot, [values[round_] for round_ in sorted(values)])

    # ------------------------------------------------------------------------------------- which round it is

    def _bases(self) -> dict[int, int]:
        """Return the round before the first of each process: that of a rejoined process follows from a read.

        A rejoined process that is in no read is left out.
        """
        workers, key, cell = self.facts.history.workers, self.key, self.cell
        bases = dict.fromkeys(range(workers), 0)
        there = {push.slot for one in self.seen for push in one.contents}
        there |= {push.slot for push in self._bad() if (push.slot, key, cell) in self.facts.history.bases}
        for slot in sorted(one for one in there if one >= workers):
            known = self.facts.history.bases.get((slot, key, cell))
            bases[slot] = self._inferred(slot, bases) if known is None else known
        return bases

    def _inferred(self, slot: int, bases: Mapping[int, int]) -> int:
        """Return the base that follows from the values with a push of this process, above all the first."""
        having = [one for one in self.seen if any(push.slot == slot for push in one.contents)]
        first = min(having, key=lambda one: _last_of(slot, one), default=None)
        if first is not None and self._after_all(slot, bases, first):
            calls = self.facts.pushes[self.key]
            return max((push.number + bases[push.slot] for push in calls if push.slot in bases), default=0)
        found = [
            (_last_of(slot, one), max(others) - _last_of(slot, one))
            for one in having
            if (others := [push.number + bases[push.slot] for push in one.contents if push.slot in bases])
        ]
        return max(0, min(found)[1]) if found else 0

    def _after_all(self, slot: int, bases: Mapping[int, int], first: Seen) -> bool:
        """Whether the first value with a push of it follows the last round of all other processes."""
        left = self.facts.released
        if any(left.get(one, math.inf) > first.event.returned for one in bases if one not in self.lost):
            return False
        rest = sorted(push for push in first.contents if push.slot != slot)
        return not rest or any(sorted(one.contents) == rest for one in self.seen)

    def _failed(self) -> set[int]:
        """Return rounds that a bad push has spoilt."""
        return {push.number + self.bases[push.slot] for push in self._bad() if push.slot in self.bases}

    def _bad(self) -> list[Push]:
        place = (self.key, self.cell)
        return [push for push, call in self.facts.pushes[self.key].items() if place in call.bad]

    def round_of(self, contents: tuple[Push, ...]) -> Round:
        """Return the round of a value."""
        first = max(
            (one.number + self.bases[one.slot] for one in contents if one.slot in self.bases), default=0
        )
        last = first
        while last + 1 in self.failed:
            last += 1
        return Round(first, last)

    # ------------------------------------------------------------------------------------------ its pushes

    def _wanted(self, slot: int, round_: int, before: float) -> list[int]:
        """Return numbers of the pushes of a process in the value of a round."""
        base, calls = self.bases[slot], self.facts.pushes[self.key]
        good = [n for n in range(1, round_ - base + 1) if n + base not in self.failed]
        if self.facts.history.keeps == "last":
            good = [n for n in good if n + base == round_]
        return [n for n in good if (call := calls.get(Push(slot, n))) and call.called < before]

    def _value(self, one: Seen, round_: Round) -> Iterator[Violation]:
        """Each member's part, and no other."""
        for slot in self.bases:
            there = [push.number for push in one.contents if push.slot == slot]
            wanted = self._wanted(slot, round_.first, one.event.returned)
            if slot in self.lost:
                full = one.event.returned >= self.facts.hurt.get(slot, 0.0)
                if full and there == wanted[: len(there)]:
                    continue
            if there != wanted:
                yield self._differs(one, round_, slot, there, wanted)
            elif slot not in self.lost and self._absent(one, round_, slot):
                yield Violation(
                    "member missing",
                    f"{self.told(one)}: process {slot} has not pushed into round {round_.first}",
                )

    def _absent(self, one: Seen, round_: Round, slot: int) -> bool:
        """Whether a member that a round has to wait for has no push for it."""
        if (
            slot >= self.facts.history.workers
            or self.facts.released.get(slot, one.event.returned) < one.event.returned
        ):
            return False
        if slot in self.facts.replaced:
            return False
        call = self.facts.pushes[self.key].get(Push(slot, round_.first))
        return round_.first > 0 and (call is None or call.called >= one.event.returned)

    def _differs(self, one: Seen, round_: Round, slot: int, there: list[int], wanted: list[int]) -> Violation:
        told = f"{self.told(one)}, of round {round_.first}"
        lacks = sorted(set(wanted) - set(there))
        if there and lacks and max(there) > min(lacks):
            return Violation("gap", f"{told}, lacks push {lacks[0]} of process {slot}, and has a later one")
        if lacks and not (there and self.facts.history.keeps == "last"):
            return Violation("member missing", f"{told}, lacks push {lacks[0]} of process {slot}")
        return Violation("mixed", f"{told}, has pushes {there[-3:]} of process {slot}, not {wanted[-3:]}")

    # ------------------------------------------------------------------------------------------ where it is

    def _place(self, one: Seen, round_: Round) -> Iterator[Violation]:
        """An active process reads the round of its last push; any other process reads no older round."""
        event, facts = one.event, self.facts
        if event.called > facts.told.get(event.slot, event.called):
            return  # see losses
        own = self.pushed(event.slot, event.called)
        resting = facts.released.get(event.slot, event.returned) < event.called
        if own and not resting:
            known = self.facts.history.bases.get((event.slot, self.key, self.cell), round_.last)
            promised = own + self.bases.get(event.slot, known)
            if not round_.first <= promised <= round_.last:
                yield Violation("wrong round", f"{self.told(one)} is of round {round_.first}, not {promised}")
        elif round_.last < self.floor(one):
            yield Violation(
                "went back", f"{self.told(one)} is of round {round_.first}, older than one read before"
            )

    def pushed(self, slot: int, when: float) -> int:
        """How often a process had pushed into the key by then."""
        return sum(one.called <= when and self.key in one.pushed for one in self.facts.by_slot[slot])

    def floor(self, one: Seen) -> int:
        """Return the last round that any process had read when a read was called."""
        before = zip(self.seen, self.rounds, strict=True)
        return max((at.first for other, at in before if other.event.returned < one.event.called), default=0)

    def _stays(self, one: Seen) -> Iterator[Violation]:
        """Return parts of the dead in a round that follows the one in which all knew of the death."""
        for push in one.contents:
            if push.slot not in self.lost or push.slot not in self.bases:
                continue
            known = self.facts.hurt.get(push.slot, math.inf) + self.facts.history.noticed
            before = push.number + self.bases[push.slot] - 1
            if any(call.called > known for call in self._of_living(before)):
                what = f"{self.told(one)}: push {push.number} of process {push.slot} is in it"
                yield Violation("stays", f"{what}, and another began the round before it when all knew")

    def _of_living(self, round_: int) -> list[Event]:
        """Return the calls of the living processes that pushed into a round."""
        calls = self.facts.pushes[self.key]
        living = [Push(slot, round_ - base) for slot, base in self.bases.items() if slot not in self.lost]
        return [calls[push] for push in living if push in calls]

    def _left(self, slot: int, seen: list[Seen]) -> Iterator[Violation]:
        """A lost process is in all rounds up to one, and in none after it."""
        last, out = 0, False
        for one in seen:
            there = sum(push.slot == slot for push in one.contents)
            wanted = len(self._wanted(slot, self.round_of(one.contents).first, one.event.returned))
            back = there > 0 if self.facts.history.keeps == "last" else there != last
            lower = self.facts.history.keeps == "all" and there < last
            if (out and back) or lower:
                yield Violation(
                    "left again", f"{self.told(one)}: process {slot} is lost, and was out of a round"
                )
            out, last = out or there < wanted, there

    def told(self, one: Seen) -> str:
        """Write which read it is."""
        event = one.event
        when = f"{event.called:.4f}-{event.returned:.4f}"
        return f"process {event.slot}'s read of key {self.key!r} (cell {one.cell}, {when})"
