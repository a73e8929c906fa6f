"""A scheduler with a journal, killed at any instant and started again at its address: no round is lost."""

from __future__ import annotations

import itertools
import os
import random
import time

import pace
import pytest
from faults.faulty_jobs import BODIES, Faults, finish, kill, ready
from servers import ServedJob

from kvstore.launch.certificates import Certificates

JOURNALED = {"KVSTORE_DEAD_AFTER": "3", "KVSTORE_TIMEOUT": "60"}
RANGES, PORTS = 300, 40
_jobs = itertools.count()


def own_ports() -> str:
    """Return ports of one scheduler alone, which no other process takes while it is away."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    first = 20_000 + (60 * process + next(_jobs)) % RANGES * PORTS
    return f"{first}-{first + PORTS - 1}"


def restart(made: ServedJob, count: int) -> None:
    """Kill the scheduler, and start another one in its place."""
    kill(made.scheduler)
    made.scheduler.finish(pace.deadline(20))
    made.scheduler.close()
    variables = {"KVSTORE_NUM_WORKERS": str(made.size), "KVSTORE_RESTART": str(count)}
    made.scheduler = made._role("scheduler", 0, **variables)
    made.scheduler.expect_some(("at ", "result null"))  # the latter where the job is over


def come_back(faults: Faults, draw: random.Random, when: str, secure: bool) -> None:
    journal = faults.folder / f"journal-{draw.random()}"
    variables = {**JOURNALED, "KVSTORE_JOURNAL": str(journal), "KVSTORE_PORTS": own_ports()}
    workers, servers = draw.choice([2, 3]), draw.choice([1, 2])
    keys = {}
    if secure:
        saved = Certificates(workers, servers).save(faults.folder / f"keys-{draw.random()}")
        keys = {path.stem: str(path) for path in saved}
    with faults.job(workers, servers, keys=keys, **variables) as made:
        if secure:
            made._key_files = keys
        there = made.start_all(BODIES, "through_absences", 10)
        ready(*there, line="starts" if when == "starting" else "ready")
        for count in range(2):
            time.sleep(draw.random() * (2.0 if when == "running" else 0.5))
            if made.scheduler.has_ended():
                break  # the job was quicker
            restart(made, count + 1)
        digests = {one["digest"] for one in finish(*there, timeout=60)}
        assert len(digests) == 1
        assert made.ended(20) == [0] * (servers + 1)
    assert not list(journal.iterdir())


CASES = [("starting", False), ("running", False), ("running", True), ("starting", True)]


@pytest.mark.parametrize("seed", [0])
def test_a_killed_scheduler_comes_back(faults: Faults, seed: int) -> None:
    faults.run(come_back, CASES, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 126))
def test_a_thousand_killed_schedulers(faults: Faults, seed: int) -> None:
    faults.run(come_back, CASES, seed)
