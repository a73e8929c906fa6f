"""Schedulers and servers that are busy for longer than a silence may last, and calls with very many keys."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from pathlib import Path
from typing import Any

import jobs
import pytest
from faults.burners import busy_machine
from nightly import nightly_unless
from servers import ServedJob

BODIES = "procs_busy"


class HeldUpJob(ServedJob):
    """A role whose scheduler or server spends HOLD seconds on its first message of a kind."""

    def __init__(self, *arguments: Any, role: str, at: str, hold: float, **variables: str) -> None:
        self._held = role, {"HOLD": str(hold), "HOLD_AT": at}
        super().__init__(*arguments, **variables)

    def _role(self, role: str, rank: int, **variables: str) -> jobs.Worker:
        if role != self._held[0]:
            return super()._role(role, rank, **variables)
        return super()._role(role, rank, module=BODIES, **self._held[1], **variables)


@pytest.mark.parametrize(
    ("role", "at"),
    nightly_unless(
        lambda role, at: at in ("HelloRequest", "Batch"),
        [
            ("scheduler", "HelloRequest"),
            ("scheduler", "CreateKeysRequest"),
            ("server", "AttachRequest"),
            ("server", "Batch"),
        ],
    ),
)
def test_a_busy_process_is_not_lost(nursery: jobs.Nursery, tmp_path: Path, role: str, at: str) -> None:
    job = HeldUpJob(
        nursery, tmp_path, 2, 1, role=role, at=at, hold=2.5, KVSTORE_DEAD_AFTER="1", KVSTORE_TIMEOUT="100"
    )
    with contextlib.closing(job):
        job.start_all(BODIES, "waits_for_the_busy")
        assert job.results(120.0) == [[3.0] * 4] * 2
        assert job.ended() == [0, 0]


def through_stalls(nursery: jobs.Nursery, folder: Path, seed: int) -> None:
    """Notices and deadlines fall due in the very turns in which the awaited event arrives."""
    draw = random.Random(seed)
    name, size = draw.choice(["dist_sync", "dist_sync", "shared"]), draw.choice([2, 3])
    patience = {"KVSTORE_TIMEOUT": "1000", "KVSTORE_DEAD_AFTER": "100"}
    if name == "shared":
        job = jobs.Job(nursery, folder, size)
        arguments: dict[str, str] = patience
    else:
        job, arguments = ServedJob(nursery, folder, size, 1, **patience), {}
    with contextlib.closing(job):
        workers = job.start_all(BODIES, "through_stalls", name, seed, 3, **arguments)
        for one in draw.sample(workers, draw.choice([0, 1, 1])):
            time.sleep(draw.random() * 0.5)
            one.signal(signal.SIGSTOP)
            time.sleep(draw.random() * 0.5)
            one.signal(signal.SIGCONT)
        assert job.results(1000.0) == [[sum(range(1, size + 1)), size]] * size


@pytest.mark.parametrize("seed", nightly_unless(lambda seed: seed == 0, range(3)))
def test_an_event_in_the_last_turn_is_not_late(nursery: jobs.Nursery, tmp_path: Path, seed: int) -> None:
    through_stalls(nursery, tmp_path, seed)


@pytest.mark.nightly
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("seed", range(3, 203))
def test_no_event_in_the_last_turn_is_late_in_two_hundred_jobs(
    nursery: jobs.Nursery, tmp_path: Path, seed: int
) -> None:
    through_stalls(nursery, tmp_path, seed)


def many_keys(nursery: jobs.Nursery, folder: Path, count: int) -> None:
    job = ServedJob(nursery, folder, 2, 1, KVSTORE_TIMEOUT="1000", KVSTORE_DEAD_AFTER="5")
    with contextlib.closing(job):
        job.start_all(BODIES, "many_keys", count, 2)
        assert job.results(1000.0) == [True, True]
        assert job.ended() == [0, 0]


@pytest.mark.timeout(1200)
def test_thousands_of_keys_beside_busy_processes(nursery: jobs.Nursery, tmp_path: Path) -> None:
    with busy_machine(4):
        many_keys(nursery, tmp_path, 2_000)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("_", range(50))
def test_twenty_thousand_keys_beside_twenty_busy_processes(
    nursery: jobs.Nursery, tmp_path: Path, _: int
) -> None:
    with busy_machine(20):
        many_keys(nursery, tmp_path, 20_000)
