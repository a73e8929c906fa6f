"""Checks a server restarted from its snapshot: only pushes acknowledged after the snapshot are lost."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..events import History, Key, Push, Violation
from .facts import Facts, Seen


def check(history: History) -> list[Violation]:
    """Check each cell of each key for itself: slices have other servers."""
    if history.keeps != "all":
        return []
    facts = Facts(history)
    found = [
        one
        for key in facts.keys
        for cell in facts.cells(key)
        for one in _of_cell(facts, key, facts.seen(key, cell))
    ]
    return list(dict.fromkeys(found))


def _of_cell(facts: Facts, key: Key, seen: list[Seen]) -> Iterator[Violation]:
    settled = {push: facts.settled(push, key) for push in facts.pushes[key]}
    needed = {
        push: when
        for push, when in settled.items()
        if when < math.inf and not _may_be_lost(facts, push, key, when)
    }
    for one in seen:
        there = set(one.contents)
        for push, when in needed.items():
            if when < one.event.called and push not in there:
                where = f"key {key!r} at {one.event.called:.4f}, cell {one.cell}"
                told = f"process {one.event.slot} read {where}, without"
                yield Violation(
                    "lost push", f"{told} push {push.number} of process {push.slot}, settled at {when:.4f}"
                )


def _may_be_lost(facts: Facts, push: Push, key: Key, settled: float) -> bool:
    call = facts.pushes[key][push]
    failed = any(one.bad for one in facts.pushes[key].values())
    return failed or any(
        call.called <= crashed and settled > saved for saved, crashed in facts.history.forgotten
    )
