"""Whole steps: workers killed in the middle of one, and every `save` after it compared value by value."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pace
import pytest
from bodies import procs_steps
from faults.faulty_jobs import Faults, finish, kill
from jobs import Job

BODIES = "procs_steps"
MakeJob = Callable[..., Job]


def check_alike(found: list[list[int]]) -> None:
    """All survivors have saved the same step, with values and states."""
    assert {step for one in found for step in one} == {found[0][0]}, found


def drawn(draw: random.Random, hows: list[str], **fixed: str) -> tuple[str, str, str]:
    """Return optimizer, style of the steps, and how the victim dies."""
    rule = draw.choice(procs_steps.RULES)
    return fixed.get("rule", rule), draw.choice(procs_steps.STYLES), draw.choice(hows)


def kill_on_servers(faults: Faults, draw: random.Random, seed: int) -> None:
    size, servers = draw.choice([2, 3]), draw.choice([1, 2, 2])
    rule, style, how = drawn(draw, ["killed", "some time", "some time", "one server"])
    options = {"KVSTORE_DEAD_AFTER": "4", "KVSTORE_TIMEOUT": "120"}
    with faults.job(size, servers, KVSTORE_SAME_HOST_SHM=str(draw.randrange(2)), **options) as made:
        victim = draw.randrange(size)
        workers = made.start_all(
            BODIES, "until_lost", "dist_sync", rule, style, seed, victim, how, str(made.folder)
        )
        for worker in workers:
            worker.expect("ready", 120)
        if how == "killed":
            time.sleep(draw.random() * 0.1)
            kill(workers[victim])
        check_alike(finish(*(one for one in workers if one is not workers[victim]), timeout=200))
        workers[victim].finish(pace.deadline(60))
        assert made.ended(120) == [0] * (1 + servers)


def test_steps_on_servers(faults: Faults) -> None:
    faults.run(kill_on_servers, [(seed,) for seed in range(10)], 0)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(50))
def test_steps_on_servers_with_many_seeds(faults: Faults, seed: int) -> None:
    faults.run(kill_on_servers, [(100 + seed * 10 + one,) for one in range(10)], seed)


def kill_in_shared(job: MakeJob, folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    made = job(draw.choice([2, 3]))
    rule, style, how = drawn(draw, ["killed", "some time", "some time"])
    victim = draw.randrange(made.size)
    workers = made.start_all(
        BODIES, "until_lost", "shared", rule, style, seed, victim, how, str(folder), KVSTORE_TIMEOUT="120"
    )
    for worker in workers:
        worker.expect("ready", 120)
    if how == "killed":
        time.sleep(draw.random() * 0.06)
        kill(workers[victim])
    gone = workers.pop(victim)
    check_alike(finish(*workers, timeout=200))
    gone.finish(pace.deadline(60))
    made.close()


@pytest.mark.parametrize("seed", range(10))
def test_steps_in_shared_memory(job: MakeJob, tmp_path: Path, seed: int) -> None:
    kill_in_shared(job, tmp_path, seed)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_steps_in_shared_memory_with_many_seeds(job: MakeJob, tmp_path: Path) -> None:
    for seed in range(1000, 1500):
        kill_in_shared(job, tmp_path, seed)


@pytest.mark.parametrize(
    ("dies", "left"), [("between", {"a": 2, "b": 2, "c": 4}), ("in it", {"a": 2, "b": 2, "c": 2})]
)
def test_steps_of_other_keys_are_under_way_when_one_is_lost(
    job: MakeJob, dies: str, left: dict[str, float]
) -> None:
    """The last whole step stays, and nothing of one that is not, though a key is two rounds ahead."""
    survivor, victim = workers = job(2).start_all(BODIES, "goes_ahead", dies)
    for worker in workers:
        worker.expect("ahead")
    kill(victim)
    victim.finish(pace.deadline(60))
    survivor.say("go")
    assert finish(survivor) == [left]
