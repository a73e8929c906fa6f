"""The counts and times of workers of the shared store: their waits by worker, and their work."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pace
import pytest
from jobs import Job, Worker
from observation.pages import page_of

from kvstore.observe.counters import (
    CALLS,
    CONVERTING,
    MOVING,
    PHASES,
    SHARED,
    UPDATING,
    WAITING,
    end_of,
)
from kvstore.observe.events import ARRIVED, BACK, CALL, LOST, NO_SLICE, NOBODY, Event
from kvstore.observe.native import _observe as native

MakeJob = Callable[..., Job]

BODIES = "observed.workers"
SLOW = 0.3  # seconds


def recorded(found: dict[str, Any], *kinds: int) -> list[Event]:
    events = [Event(*one) for one in found["events"]]
    return [one for one in events if not kinds or one.kind in kinds]


def page(pid: int) -> dict[str, Any]:
    """Counters of the only store of a process."""
    with open(page_of(pid), "rb") as file:
        _, stores = native.read_page(file.fileno()) or (pid, [])
    (found,) = stores
    return found


def shown_to_wait(worker: Worker) -> dict[str, Any]:
    """Counters of a worker that has begun to wait."""
    pid, end = int(worker.expect_some("pid").split()[1]), pace.deadline(30)
    while not (found := page(pid))["waiting_since"]:
        assert time.monotonic() < end
        time.sleep(0.001)
    return found


@pytest.mark.parametrize("key", ["small", "edge", "large"])
@pytest.mark.parametrize("size", [2, 3])
def test_waits_for_a_slow_worker(job: MakeJob, key: str, size: int) -> None:
    made = job(size)
    workers = made.start_all(BODIES, "waits", key)
    seen = shown_to_wait(workers[0])
    time.sleep(SLOW)
    workers[1].say("go")
    found = made.results()[0]
    (number,) = (int(number) for number, name in found["names"].items() if name == key)
    assert (seen["slice"], seen["round"], seen["whom"]) == (number, 2, 1)

    long = [one for one in recorded(found, WAITING) if one.end - one.begin >= SLOW * 1e9]
    (wait,) = long
    assert (wait.slice, wait.round, wait.whom) == (number, 2, 1)
    assert wait.nbytes == {"small": 200, "edge": 65536, "large": 1_200_004}[key]
    assert wait.begin == seen["waiting_since"]
    before, numbers = found["before"], found["numbers"]
    assert numbers["ns"][WAITING] - before["ns"][WAITING] >= wait.end - wait.begin
    assert numbers["spans"][WAITING] == sum(numbers["waits"])
    lengths = [end_of(bucket) for bucket, count in enumerate(numbers["waits"]) if count]
    assert max(lengths) >= SLOW
    assert numbers["waiting_since"] == 0


def phases(found: dict[str, Any]) -> dict[int, list[Event]]:
    """Spans by thread, in their order."""
    by_thread = defaultdict(list)
    for one in recorded(found, *range(len(PHASES))):
        by_thread[one.thread].append(one)
    return {thread: sorted(spans, key=lambda one: one.begin) for thread, spans in by_thread.items()}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_thread_is_in_one_phase_at_a_time_and_within_a_call(job: MakeJob, size: int) -> None:
    made = job(size)
    made.start_all(BODIES, "traffic")
    for found in made.results():
        spans = phases(found)
        assert found["thread"] in spans
        for own in spans.values():
            for one, after in itertools.pairwise(own):
                assert one.begin <= one.end <= after.begin, (one, after)
        calls = recorded(found, CALL)
        for one in spans[found["thread"]]:
            assert any(call.begin <= one.begin <= one.end <= call.end for call in calls), one
        numbers = found["numbers"]
        events = recorded(found)
        for phase in range(len(PHASES)):
            of_phase = [one for one in events if one.kind == phase]
            assert numbers["spans"][phase] == len(of_phase)
            assert numbers["ns"][phase] == sum(one.end - one.begin for one in of_phase)
        assert all(one.slice in {*map(int, found["names"]), NO_SLICE} for one in events if one.kind != CALL)
        assert {PHASES[one.kind] for own in spans.values() for one in own} == {
            *("moving", "summing", "updating"),
            *(("waiting",) if size > 1 else ()),
        }


def test_calls_are_counted_and_recorded(job: MakeJob) -> None:
    made = job(2)
    made.start_all(BODIES, "traffic")
    for found in made.results():
        verbs = [one for one in recorded(found, CALL) if one.slice < len(CALLS)]  # the other calls are waits
        calls = [CALLS[one.slice] for one in verbs]
        numbers = found["numbers"]
        assert {name: calls.count(name) for name in CALLS} == dict(zip(CALLS, numbers["calls"], strict=True))
        assert numbers["calls"] == [1, 12, 12, 30, 0, 4]
        first = verbs[calls.index("push")]
        assert (first.nbytes, first.whom) == (2 * 200, NOBODY)
        arrived = recorded(found, ARRIVED)
        assert len(arrived) == numbers["rounds"] == 3 * 17
        assert {one.whom for one in arrived} == {numbers["rank"]}


def test_what_an_updater_does_with_the_store_is_not_counted_twice(job: MakeJob) -> None:
    made = job(2)
    made.start_all(BODIES, "nested")
    moved = 0
    for found in made.results():
        for own in phases(found).values():
            for one, after in itertools.pairwise(own):
                assert one.end <= after.begin, (one, after)
        moved += sum(found["names"][str(one.slice)] == "edge" for one in recorded(found, MOVING))
    assert moved == 3, "the worker that does the update pulls"


def test_packing_is_a_phase(job: MakeJob) -> None:
    made = job(2)
    made.start_all(BODIES, "packed")
    for found in made.results():
        (packed,) = recorded(found, CONVERTING)
        assert (found["names"][str(packed.slice)], packed.nbytes) == ("large", 1_200_004)
        assert found["numbers"]["sent"][SHARED] == -(-300_001 // 16) * 4
        assert found["numbers"]["received"][SHARED] == 1_200_004
        assert not recorded(found, UPDATING)


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_bytes_and_rounds_are_exact(job: MakeJob, size: int, timed: bool) -> None:
    made = job(size)
    made.start_all(BODIES, "exact", timed)
    a, b = 4000, 400_000
    for rank, found in enumerate(made.results()):
        numbers, statistics = found["numbers"], found["statistics"]
        assert numbers["sent"] == [0, 10 * a + 3 * b + a + b + 3 * 16, 0, 0]
        assert numbers["received"] == [0, 10 * a + 3 * b + a + b + a + 3 * 16, 0, 0]
        assert numbers["rounds"] == 10 + 3 + 2 + 1
        assert numbers["calls"] == [2, 4, 4, 11, 1, 1]
        assert (numbers["keys"], numbers["nbytes"]) == (3, a + b + 2 * 16)
        assert (numbers["store"], numbers["rank"], numbers["size"]) == ("shared", rank, size)
        if timed:  # else `kvstore top` of another test may have asked for them
            assert sum(numbers["spans"]) > 0 < sum(numbers["ns"])
        assert sum(numbers["waits"]) == numbers["spans"][WAITING], "who comes last has none"
        assert statistics["sent"][SHARED] == numbers["sent"][SHARED]
        assert (statistics["rounds"], statistics["losses"]) == (16, 0)
        assert sum(statistics["seconds"]) > 0 or not timed
        assert statistics["waits"][0] == sum(numbers["waits"])


@pytest.mark.parametrize("on_peer_loss", ["raise", "continue"])
def test_a_loss_is_counted_once(job: MakeJob, on_peer_loss: str) -> None:
    made = job(2)
    staying, _ = made.start_all(BODIES, "loses", on_peer_loss)
    made.finish()
    found = staying.result()
    assert found["numbers"]["losses"] == 1
    (lost,) = recorded(found, LOST)
    assert (lost.whom, lost.slice, lost.begin) == (1, NO_SLICE, lost.end)
    assert ("told" in staying.lines) == (on_peer_loss == "raise")
    assert found["numbers"]["waiting_since"] == 0


def test_a_rejoined_worker_is_recorded(job: MakeJob) -> None:
    made = job(2)
    staying, ending = made.start_all(BODIES, "comes_back")
    staying.expect("alone")
    ending.finish(pace.deadline(30))
    made.start(BODIES, "comes_back", rank=1, KVSTORE_TEST_AGAIN="1")
    made.finish()
    found = staying.result()
    lost, back = recorded(found, LOST, BACK)
    assert (lost.kind, lost.whom, back.kind, back.whom) == (LOST, 1, BACK, 1)
    assert found["numbers"]["losses"] == 1
