"""Reads of a worker that rounds do not wait for: each read is of one round."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import Job, Worker
from nightly import nightly_unless
from procs_shared_reads import WAYS

BODIES = "procs_shared_reads"

MakeJob = Callable[..., Job]

CASES = [(way, seed) for way in WAYS for seed in range(4)]


def ended(trains: Worker, reads: Worker) -> None:
    """Check that both workers end, when the second has read."""
    reads.expect("has read")
    trains.say("stop")
    reads.say("close")


@pytest.mark.parametrize(("way", "seed"), nightly_unless(lambda way, seed: seed == 0, CASES))
def test_a_worker_that_has_joined(job: MakeJob, tmp_path: Path, way: str, seed: int) -> None:
    made = job(2)
    trains = made.start(BODIES, "trains", way, seed, "joins", rank=0)
    ended(trains, made.start(BODIES, "reads", way, seed, "joins", str(tmp_path), rank=1))
    rounds, _ = made.results()
    assert rounds > 1


@pytest.mark.parametrize(
    ("way", "seed"), nightly_unless(lambda way, seed: seed == 1 and "rows" in way, CASES)
)
def test_a_worker_that_came_back_before_its_first_push(
    job: MakeJob, tmp_path: Path, way: str, seed: int
) -> None:
    made = job(2)
    trains, killed = made.start_all(BODIES, "trains", way, seed, "comes back")
    for worker in (trains, killed):
        worker.expect("trains")
    killed.signal(signal.SIGKILL)
    reads = made.start(BODIES, "reads", way, seed, "comes back", str(tmp_path), rank=1)
    ended(trains, reads)
    made.finish()
    assert trains.result() > 1
    assert reads.result() > 1
