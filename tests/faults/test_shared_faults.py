"""Workers of a shared store that are killed, stopped, starved, forked and interrupted.

Nobody may hang, no value may be wrong, and nothing may be left behind.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import Job

BODIES = "procs_shared_faults"
IN_TIME = 1.0  # seconds from a death until every survivor knows

MakeJob = Callable[..., Job]


def kill_one(job: MakeJob, folder: Path, seed: int) -> None:
    """Kill a worker at an instant that the seed decides, and look at what the others have."""
    draw = random.Random(seed)
    size = draw.choice([2, 3, 3, 4])
    made, victim = job(size), draw.randrange(size)
    spin = draw.choice(["0", "0.00005", "0.001"])
    workers = made.start_all(BODIES, "until_lost", seed, str(folder), KVSTORE_SPIN=spin)
    for worker in workers:
        worker.expect("ready")
    time.sleep(draw.random() * 0.06)  # the instant
    killed = time.monotonic()
    workers[victim].signal(signal.SIGKILL)
    made.finish(30)
    assert workers[victim].code == -signal.SIGKILL, workers[victim].errors()
    survivors = [worker.result() for rank, worker in enumerate(workers) if rank != victim]
    for found in survivors:
        assert found["rank"] == victim
        assert found["noticed"] - killed < IN_TIME
        assert found["digest"] == survivors[0]["digest"], [other["seen"] for other in survivors]
    made.close()


@pytest.mark.parametrize("seed", range(20))
def test_a_killed_worker(job: MakeJob, tmp_path: Path, seed: int) -> None:
    kill_one(job, tmp_path, seed)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_two_hundred_killed_workers(job: MakeJob, tmp_path: Path) -> None:
    for seed in range(1000, 1200):
        kill_one(job, tmp_path, seed)
