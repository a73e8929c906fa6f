"""Jobs of real processes in which the C library fails and delays by a seed; see `buggify/interposer.c`.

Events that the kernel may cause at any time (short transfers, EINTR, early ends of waits) change nothing: the
histories are whole, and without another fault all ends well. Errors of memory and disks are reported, or
handled.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jobs
import pace
import pytest
from buggify import interposed
from buggify.interposed import LEGAL, Kinds
from faults.test_histories import BODIES, DEAD_AFTER, PEER_LOSS, TIMES, check, events_of, job_under
from histories import Fault, History
from histories.checker import violations
from servers import ServedJob, start_on

NIGHT = 100
ROUNDS = 40

#: How a job is made: the store, and what decides the way of its bytes.
JOBS: dict[str, tuple[str, dict[str, str]]] = {
    "shared": ("shared", {}),
    "memory": ("dist_sync", {}),
    "streams": ("dist_sync", {"KVSTORE_SAME_HOST_SHM": "0"}),
    "frames": ("dist_sync", {"KVSTORE_SAME_HOST_SHM": "0", "KVSTORE_STREAMS": "0"}),
    "async": ("dist_async", {"KVSTORE_SAME_HOST_SHM": "0"}),
    "hierarchy": ("dist_sync", {"KVSTORE_HIERARCHY": "host"}),
}


def seeds(few: int) -> list[Any]:
    """Return some seeds, and many at night."""
    return [*range(few), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(few, NIGHT))]


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[jobs.Nursery]:
    """The job whose processes have the interposer."""
    with jobs.nursery(interposed.built(tmp_path_factory.mktemp("buggify"))) as made:
        yield made


class Buggified:
    """One job as drawn from its kind and seed, and what becomes of it."""

    def __init__(self, kind: str, seed: int, folder: Path, fault: str) -> None:
        self.draw = draw = random.Random(f"buggify {kind} {seed}")
        self.kind, self.seed, self.folder, self.fault = kind, seed, folder, fault
        self.faults: list[Fault] = []
        self.size, self.servers = draw.choice([2, 3]), draw.choice([1, 2])
        self.keeps, self.on_peer_loss = draw.choice(["all", "last"]), draw.choice(PEER_LOSS)
        self.ahead = draw.random() < 0.5 and kind != "hierarchy"
        self.hosts = [draw.choice([0, 1]) for _ in range(self.size)]

    def run(
        self,
        job: Callable[..., jobs.Job],
        served: Callable[..., ServedJob],
        points: dict[str, str],
        ready: bool = True,
    ) -> jobs.Job:
        """Run it; its history is checked afterwards. Not `ready`: a worker may end before it has begun."""
        name, variables = JOBS[self.kind]
        variables = variables | points
        made = job(self.size) if name == "shared" else served(self.size, self.servers, **TIMES, **variables)

        def start(rank: int, slot: int) -> jobs.Worker:
            arguments = (
                name, str(self.folder), slot, 2 * self.size, self.keeps, self.on_peer_loss, self.seed, ROUNDS,
                self.ahead,
            )  # fmt: skip
            if self.kind == "hierarchy":
                assert isinstance(made, ServedJob)
                return start_on(made, self.hosts[rank], rank, BODIES, "works", *arguments)
            return made.start(BODIES, "works", *arguments, rank=rank, **variables)

        if ready:
            self.faults = job_under(self.draw, start, self.size, self.fault, self.on_peer_loss)
        else:
            for worker in [start(rank, rank) for rank in range(self.size)]:
                worker.finish(pace.deadline(60))
        return made

    def history(self) -> History:
        """Return the calls and reads."""
        kind = "async" if self.kind == "async" else "sync"
        faults, noticed = tuple(self.faults), 4 * DEAD_AFTER
        events = events_of(self.folder)
        return History(events, self.size, kind, self.keeps, self.on_peer_loss, faults, noticed=noticed)


def said(run: jobs.Job) -> str:
    """What scheduler and servers wrote to stderr."""
    roles = (run.scheduler, *run.servers) if isinstance(run, ServedJob) else ()
    return "\n".join(one.errors() for one in roles)


Made = Callable[..., jobs.Job]
Served = Callable[..., ServedJob]


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("kind", JOBS)
def test_what_may_happen_at_any_time_changes_nothing(
    job: Made, served: Served, tmp_path: Path, kind: str, seed: int
) -> None:
    made = Buggified(kind, seed, tmp_path, "")
    run = made.run(job, served, interposed.variable(seed, LEGAL))
    assert run.results() == ["done"] * made.size, said(run)
    check(made.history())
    if isinstance(run, ServedJob):
        assert run.ended() == [0] * (1 + len(run.servers))


#: Errors of a process that learned of a loss, or whose own call failed.
TOLD = re.compile(
    r"^(kvstore\.errors\.\w+|numpy\.\S*MemoryError|MemoryError|OSError|PermissionError|BlockingIOError)\b",
    re.MULTILINE,
)
ERRORS = ("shared", "memory", "streams")


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("kind", ERRORS)
def test_memory_and_disks_that_fail_are_told(
    job: Made, served: Served, tmp_path: Path, kind: str, seed: int
) -> None:
    """Each process ends, well or by a plausible error; reads are right, and no process or file remains."""
    made = Buggified(kind, seed, tmp_path, "")
    points = interposed.variable(seed, Kinds.SPACE | Kinds.DISK | Kinds.DELAYS, errors=2)
    points["KVSTORE_TIMEOUT"] = pace.variable(8)  # for a worker that ended before it had a store
    if made.draw.random() < 0.5 and kind != "shared":
        points |= {"KVSTORE_SNAPSHOT": str(tmp_path / "snapshot"), "KVSTORE_SNAPSHOT_INTERVAL": "0.05"}
    run = made.run(job, served, points, ready=False)
    for worker in run.workers:
        assert worker.code == 0 or (worker.code == 1 and TOLD.search(worker.errors())), worker.errors()
    history = made.history()
    broken = [one for one in violations(history) if one.kind != "unexplained error"]
    assert not broken, broken
    if isinstance(run, ServedJob):
        for role in (run.scheduler, *run.servers):
            assert role.finish(pace.deadline(60)) in (0, 1), role.errors()


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(NIGHT))
@pytest.mark.parametrize("fault", ["killed", "stopped"])
@pytest.mark.parametrize("kind", [kind for kind in JOBS if kind != "shared"])
def test_losses_among_delays(
    job: Made, served: Served, tmp_path: Path, kind: str, fault: str, seed: int
) -> None:
    """A worker is killed or stopped, while calls of all are short and late."""
    made = Buggified(kind, seed, tmp_path, fault)
    made.run(job, served, interposed.variable(seed, LEGAL))
    check(made.history())
