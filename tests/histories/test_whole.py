"""Histories of a store that keeps its promises have no violations."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from histories.checker import violations
from histories.story import Story
from hypothesis import given
from hypothesis import strategies as st


def in_rounds(draw: random.Random, keeps: str, fault: str, on_peer_loss: str) -> Story:
    """Run workers in random order: each pushes at most two rounds ahead, and reads complete rounds."""
    workers, last = draw.choice((2, 3, 4)), draw.randint(1, 8)
    story = Story(workers, keeps=keeps, on_peer_loss=on_peer_loss)
    pushed, joined, lost = Counter[int](), set[int](), set[int]()
    victim = workers - 1 if fault else -1

    def complete() -> int:
        there = [pushed[one] for one in range(workers) if one not in joined | lost]
        return min(there or [max(pushed.values())])

    def value(round_: int) -> dict[int, int]:
        there = {slot: min(number, round_) for slot, number in pushed.items() if number}
        gone = {slot for slot, number in there.items() if number < round_}
        return {slot: n for slot, n in there.items() if keeps == "all" or slot not in gone} if round_ else {}

    while active := [one for one in range(workers) if pushed[one] < last and one not in joined | lost]:
        slot = draw.choice(active)
        if pushed[slot] < complete() + 2:
            pushed[slot] += 1
            story.push(slot)
        if pushed[slot] == complete():
            story.pull(slot, value(pushed[slot]), value(pushed[slot]))
        if draw.random() < 0.05 and len(active) > 1 and slot != victim:
            story.call(slot, "join")
            joined.add(slot)
        if victim not in lost and victim >= 0 and pushed[victim] == complete() and draw.random() < 0.2:
            story.fault(fault, victim)
            lost.add(victim)
            if on_peer_loss == "raise":
                break
        if joined and draw.random() < 0.3:
            story.pull(draw.choice(sorted(joined)), value(complete()))
    if lost and on_peer_loss == "raise":
        ends = min(pushed[one] for one in range(workers) if one not in joined)
        for slot in range(workers - 1):
            story.fails(slot)
        for slot in range(workers - 1):
            story.pull(slot, value(ends))
            story.call(slot, "close")
    return story


@pytest.mark.parametrize("on_peer_loss", ["raise", "continue"])
@pytest.mark.parametrize("fault", ["", "killed", "stopped"])
@pytest.mark.parametrize("keeps", ["all", "last"])
@given(seed=st.integers(0, 1 << 40))
def test_rounds(keeps: str, fault: str, on_peer_loss: str, seed: int) -> None:
    story = in_rounds(random.Random(seed), keeps, fault, on_peer_loss)
    assert violations(story.history()) == []


def without_rounds(draw: random.Random, keeps: str, kind: str) -> Story:
    """Let calls overlap: each takes effect at an instant of its own, those of a process in their order."""
    story = Story(3, keeps=keeps, kind=kind)
    calls: list[tuple[float, float, float, int, str]] = []
    for slot in range(3):
        now = 0.0
        for _ in range(draw.randint(1, 10)):
            start = now + draw.random()
            effect = start + draw.random()
            now = effect + draw.random()
            calls.append((effect, start, now, slot, draw.choice(["push", "pull"])))
    numbers, there = Counter[int](), dict[int, int]()
    for _, start, end, slot, verb in sorted(calls):
        if verb == "push":
            numbers[slot] += 1
            there = {**there, slot: numbers[slot]} if keeps == "all" else {slot: numbers[slot]}
            story.push(slot, start=start, end=end)
        else:
            story.pull(slot, there, there, start=start, end=end)
    return story


@pytest.mark.parametrize("kind", ["local", "async"])
@pytest.mark.parametrize("keeps", ["all", "last"])
@given(seed=st.integers(0, 1 << 40))
def test_orders(keeps: str, kind: str, seed: int) -> None:
    assert violations(without_rounds(random.Random(seed), keeps, kind).history()) == []


@given(seed=st.integers(0, 1 << 40))
def test_a_process_that_came_back(seed: int) -> None:
    """It begins after some round, with numbers of its own."""
    draw = random.Random(seed)
    story = Story(2, on_peer_loss="continue")
    alone, before, after = draw.randint(0, 3), draw.randint(0, 3), draw.randint(1, 3)
    for _ in range(before):
        story.everybody()
    story.fault("killed", 1)
    for _ in range(alone):
        story.push(0)
    for at in range(1, after + 1):
        story.push(0)
        story.push(3)
        for slot in (0, 3):
            story.pull(slot, {0: before + alone + at, 1: before, 3: at})
    assert violations(story.history()) == []


@pytest.mark.parametrize("keeps", ["all", "last"])
@given(before=st.integers(1, 3), alone=st.integers(1, 3), meets=st.booleans())
def test_a_process_that_came_back_when_all_others_were_about_to_leave(
    keeps: str, before: int, alone: int, meets: bool
) -> None:
    """It is in their last round, or follows it."""
    story = Story(2, keeps=keeps, on_peer_loss="continue")
    there: dict[int, int] = {}

    def reads(slot: int, **own: int) -> None:
        there.update({int(name[1:]): number for name, number in own.items()})
        value = there if keeps == "all" else {int(name[1:]): number for name, number in own.items()}
        story.pull(slot, value, value)

    for at in range(1, before + 1):
        story.push(0)
        story.push(1)
        reads(0, _0=at, _1=at)
    story.fault("killed", 1)
    story.push(0)
    if meets:
        story.push(3)
        reads(0, _0=before + 1, _3=1)
        reads(3, _0=before + 1, _3=1)
    else:
        reads(0, _0=before + 1)
    story.call(0, "close")
    for at in range(1 + meets, alone + 1 + meets):
        story.push(3)
        reads(3, _3=at)
    assert violations(story.history()) == []


def test_what_came_after_the_snapshot_of_a_server_may_be_lost() -> None:
    story = Story(2, forgotten=((2.0, 9.0),))
    story.fault("killed", 0, role="server")
    story.push(0)
    story.pull(0, {0: 1})
    story.push(0)
    story.pull(0, {0: 2}, end=4.0)
    story.pull(0, {0: 1}, start=20.0)
    assert violations(story.history()) == []


def test_what_is_read_after_a_loss_was_told_promises_nothing() -> None:
    """It is of the last whole round, which need not have this process's push."""
    story = Story(3, forgotten=((-1.0, 3.0),))
    story.fault("killed", 2)
    story.fault("killed", 0, role="server")
    story.push(0, start=4.0)
    story.fails(0)
    story.pull(0, {})
    story.pull(1, {})
    assert violations(story.history()) == []


def test_a_process_that_came_back_into_a_round_that_failed() -> None:
    """Its base is known, though no value has its push."""
    bad = frozenset({("w", 0)})
    story = Story(2, on_peer_loss="continue", bases={(3, "w", 0): 1})
    story.everybody()
    story.fault("killed", 1)
    story.push(0, bad=bad)
    story.push(3)
    story.fails(0, "UpdaterError")
    story.fails(3, "UpdaterError")
    story.pull(3, {0: 1, 1: 1})
    assert violations(story.history()) == []


def test_a_process_that_rejoined_and_met_no_other() -> None:
    """It begins in each slice after the last round of the process before it."""
    story = Story(2, on_peer_loss="continue", bases={(3, "w", 0): 2, (3, "w", 1): 1})
    story.everybody()
    story.call(0, "join")
    story.fault("killed", 1)
    story.pull(0, {0: 1, 1: 1}, {0: 1, 1: 1})
    story.push(3)
    story.pull(0, {0: 1, 1: 1, 3: 1}, {0: 1, 1: 1})
    assert violations(story.history()) == []


def in_steps(draw: random.Random, keeps: str) -> Story:
    """Steps of some keys each, until a worker is killed in the last: no read has it, or all have."""
    workers, keys = draw.choice((2, 3)), ("a", "b", "c")
    story, rounds = Story(workers, keeps=keeps), Counter[str]()

    def value(key: str, more: int = 0) -> list[dict[int, int]]:
        return [dict.fromkeys(range(workers), rounds[key] + more)]

    for _ in range(draw.randint(0, 5)):
        some = draw.sample(keys, draw.randint(1, 3))
        story.everybody(*some, verb="step")
        rounds.update(some)
        for slot in range(workers):
            read = draw.sample(keys, draw.randint(1, 3))
            story.read(slot, {key: value(key) for key in read}, verb="pull" if len(read) < 3 else "save")
    last, whole = draw.sample(keys, 2), draw.random() < 0.5
    story.push(0, *last, verb="step" if whole else "begin", end=math.inf)
    story.fault("killed", 0)
    for slot in range(1, workers):
        story.push(slot, *last, verb="step", error="PeerLostError")
    rounds.update(last if whole else ())
    for slot in range(1, workers):
        for key in draw.sample(keys, 3):
            story.read(slot, {key: value(key)})
        story.read(slot, {key: value(key) for key in keys}, verb="save")
    return story


@pytest.mark.parametrize("keeps", ["all", "last"])
@given(seed=st.integers(0, 1 << 40))
def test_steps(keeps: str, seed: int) -> None:
    assert violations(in_steps(random.Random(seed), keeps).history()) == []


def test_reads_may_be_a_step_apart_until_all_know_of_a_loss() -> None:
    """A step that one of them has begun can still end, also when another has read without it."""
    story = Story(3)
    story.everybody("a", "b", verb="step")
    story.push(2, "a", "b", verb="step")
    story.fault("killed", 2)
    story.push(0, "a", "b", verb="step", error="PeerLostError")
    story.read(0, {"a": [{0: 1, 1: 1, 2: 1}], "b": [{0: 1, 1: 1, 2: 1}]})
    story.push(1, "a", "b", verb="step", error="PeerLostError")
    for slot in (0, 1):
        story.read(slot, {"b": [{0: 2, 1: 2, 2: 2}], "a": [{0: 2, 1: 2, 2: 2}]})
    assert violations(story.history()) == []


@pytest.mark.parametrize("verb", ["push", "step"])
def test_keys_may_be_a_round_apart_for_a_joined_worker(verb: str) -> None:
    """It does not know which keys the others have pushed together since."""
    story = Story(2)
    story.everybody("a", "b", verb=verb)
    story.call(0, "join")
    story.push(1, "a", "b", verb=verb)
    story.push(1, "a", "b", verb=verb, end=math.inf)
    story.fault("killed", 1)
    story.fails(0)
    story.read(0, {"a": [{0: 1, 1: 3}], "b": [{0: 1, 1: 2}]})
    assert violations(story.history()) == []


def test_keys_may_be_a_step_apart_where_some_are_pushed_outside_of_steps() -> None:
    story = Story(2)
    story.everybody("a", "b", verb="step")
    story.everybody("a")
    story.push(0, "b")
    story.push(1, "b", end=math.inf)
    story.fault("killed", 1)
    story.fails(0)
    story.read(0, {"a": [{0: 2, 1: 2}], "b": [{0: 1, 1: 1}]})
    assert violations(story.history()) == []


@pytest.mark.parametrize("keeps", ["all", "last"])
def test_a_push_on_its_way_at_a_loss_may_be_lost_if_its_process_is_told(keeps: str) -> None:
    story = Story(2, kind="async", keeps=keeps)
    story.push(0)
    story.pull(0, {0: 1})
    story.fault("killed", 1)
    story.push(0)
    told = len(story.events)
    story.fails(0)
    story.pull(0, {0: 1})
    story.pull(0, {0: 1})
    assert violations(story.history()) == []
    del story.events[told]
    assert violations(story.history()) != []
