"""After a loss, with on_peer_loss="raise": writes raise, and reads are of one round, for all."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..events import Event, History, Key, Violation
from .facts import Facts
from .rounds import CellRounds, Round

_READS = ("pull", "save")


def check(history: History) -> list[Violation]:
    """Check the calls that a process made after it knew of a loss."""
    if history.on_peer_loss != "raise":
        return []
    facts = Facts(history)
    cells = {key: CellRounds(facts, key, 0) for key in facts.keys if facts.cells(key)}
    rounds = {
        (id(one.event), key): round_
        for key, each in cells.items()
        for one, round_ in zip(each.seen, each.rounds, strict=True)
    }
    found = [*check_writes(history), *_unnamed(facts), *_apart(facts, rounds)]
    for key, each in cells.items():
        found += [*_too_old_or_new(facts, each), *_for_everybody(facts, key, rounds)]
    return list(dict.fromkeys(found))


def check_writes(history: History) -> list[Violation]:
    """A process that knows of a loss pushes no more."""
    if history.on_peer_loss != "raise":
        return []
    facts = Facts(history)
    return [
        Violation("wrote after a loss", f"{one.verb} of process {one.slot} at {one.called:.4f} went well")
        for one in facts.events
        if one.pushed and one.good and _knows(facts, one)
    ]


def _knows(facts: Facts, event: Event) -> bool:
    return event.called > facts.told.get(event.slot, math.inf)


def _unnamed(facts: Facts) -> Iterator[Violation]:
    """A read that raises once more says of which rounds the key is."""
    if any(one.role != "worker" for one in facts.history.faults):
        return
    for one in (event for event in facts.events if event.slot not in facts.hurt):
        if (
            one.verb in _READS
            and one.error == "PeerLostError"
            and _knows(facts, one)
            and "round" not in one.text
        ):
            what = f"process {one.slot} could not read {one.keys} at {one.called:.4f}"
            yield Violation("unnamed rounds", f"{what}, and the error does not name their rounds: {one.text}")


def _too_old_or_new(facts: Facts, cell: CellRounds) -> Iterator[Violation]:
    for one, round_ in zip(cell.seen, cell.rounds, strict=True):
        if not _knows(facts, one.event):
            continue
        if round_.last < cell.floor(one) - 1:
            yield Violation(
                "went back", f"{cell.told(one)} is of round {round_.first}, long after {cell.floor(one)}"
            )


def _apart(facts: Facts, rounds: dict[tuple[int, Key], Round]) -> Iterator[Violation]:
    """Keys that all processes always pushed together are read as of one round, except by a joined process."""
    for one in facts.events:
        rests = facts.released.get(one.slot, math.inf) < one.called
        if rests or not (_knows(facts, one) and one.good and len(one.read) > 1):
            continue
        first, *others = one.read
        for key in others:
            some, more = rounds[id(one), first], rounds[id(one), key]
            if _together(facts, first, key) and (some.last < more.first or more.last < some.first):
                what = f"process {one.slot} read {first!r} and {key!r} at {one.called:.4f}"
                yield Violation("keys apart", f"{what} as of rounds {some.first} and {more.first}")


def _together(facts: Facts, first: Key, second: Key) -> bool:
    return all((first in one.pushed) == (second in one.pushed) for one in facts.events)


def _for_everybody(facts: Facts, key: Key, rounds: dict[tuple[int, Key], Round]) -> Iterator[Violation]:
    """Once all remaining processes know of the loss, a key stays at its round."""
    after = [one for one in facts.events if key in one.read and one.called > facts.all_told]
    seen = [(one, rounds[id(one), key]) for one in after]
    for one, round_ in seen[1:]:
        first, before = seen[0]
        if round_.last < before.first or before.last < round_.first:
            text = f"key {key!r} is read as of round {before.first} by process {first.slot}, "
            yield Violation(
                "two rounds", f"{text}and of {round_.first} by process {one.slot} at {one.called:.4f}"
            )
