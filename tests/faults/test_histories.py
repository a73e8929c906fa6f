"""Histories of jobs of real processes, some of which are killed or stopped, checked against the model.

The calls and reads stay in the test's folder: `*.history`.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import pace
import pytest
from histories import Event, Fault, History, events_in
from histories.checker import violations
from servers import ServedJob, start_on

BODIES, STEPS = "histories.workers", "histories.steps"
DEAD_AFTER = 1.5
TIMES = {"KVSTORE_HEARTBEAT": "0.1", "KVSTORE_DEAD_AFTER": str(DEAD_AFTER), "KVSTORE_RESEND": "0.5"}
NIGHT = 60

Started = Callable[[int, int], jobs.Worker]


def seeds(few: int) -> list[Any]:
    """Return some seeds, and many at night."""
    return [*range(few), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(few, NIGHT))]


def events_of(folder: Path) -> tuple[Event, ...]:
    """Return all calls of all processes."""
    return tuple(event for path in sorted(folder.glob("*.history")) for event in events_in(path))


def check(history: History) -> None:
    """Nothing may be broken; and the job must have done something."""
    assert any(one.read for one in history.events)
    found = violations(history)
    assert not found, "\n".join(f"{one.kind}: {one.text}" for one in found[:10])


def job_under(draw: random.Random, start: Started, size: int, fault: str, on_peer_loss: str) -> list[Fault]:
    """Run a job with a fault of one worker, and perhaps another worker that replaces it."""
    workers = [start(rank, rank) for rank in range(size)]
    for worker in workers:
        worker.expect("ready")
    time.sleep(draw.random() * 0.15)  # the instant
    faults = [hit(draw, workers, fault)] if fault else []
    if fault == "killed" and on_peer_loss == "continue" and draw.random() < 0.5:
        victim = faults[0].slot
        workers[victim].finish(pace.deadline(20))
        time.sleep(draw.random() * DEAD_AFTER)
        workers.append(start(victim, victim + size))
    for worker in workers[:size]:
        worker.finish(pace.deadline(100))
    for later in workers[size:]:
        if not has_joined(later):
            later.signal(signal.SIGKILL)
        later.finish(pace.deadline(100))
    return faults


def has_joined(worker: jobs.Worker) -> bool:
    """Whether a worker that came later takes part; where the job was over, it would wait for the others."""
    with contextlib.suppress(AssertionError):
        worker.expect("ready", 20)
        return True
    return False


def hit(draw: random.Random, workers: list[jobs.Worker], fault: str) -> Fault:
    """Kill a worker, or stop it for a time."""
    victim = draw.randrange(1, len(workers))
    start = time.monotonic()
    if fault == "killed":
        workers[victim].signal(signal.SIGKILL)
        return Fault(fault, slot=victim, start=start)
    workers[victim].signal(signal.SIGSTOP)
    time.sleep(0.3 if fault == "paused" else 4 * DEAD_AFTER)  # the silence itself
    workers[victim].signal(signal.SIGCONT)
    return Fault(fault, slot=victim, start=start, end=time.monotonic())


FAULTS = ["", "killed", "paused", "stopped"]


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("keeps", ["all", "last"])
def test_threads_of_a_local_store(
    job: Callable[..., jobs.Job], tmp_path: Path, keeps: str, seed: int
) -> None:
    worker = job(1).start(BODIES, "threads", str(tmp_path), keeps, seed, 4, rank=0)
    worker.finish(pace.deadline(100))
    assert worker.result() == "done"
    check(History(events_of(tmp_path), 4, "local", keeps))


@pytest.mark.parametrize("seed", seeds(2))
def test_shared(job: Callable[..., jobs.Job], tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    size, keeps, on_peer_loss = draw.choice([2, 3, 4]), draw.choice(["all", "last"]), draw.choice(PEER_LOSS)
    fault = draw.choice(FAULTS[:3])
    made = job(size)

    def start(rank: int, slot: int) -> jobs.Worker:
        arguments = ("shared", str(tmp_path), slot, 2 * size, keeps, on_peer_loss, seed, 100)
        return made.start(BODIES, "works", *arguments, rank=rank)

    faults = job_under(draw, start, size, fault, on_peer_loss)
    check(History(events_of(tmp_path), size, "sync", keeps, on_peer_loss, tuple(faults)))


PEER_LOSS = ["raise", "continue"]


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("name", ["dist_sync", "dist_async", "hierarchy"])
def test_on_servers(served: Callable[..., ServedJob], tmp_path: Path, name: str, seed: int) -> None:
    draw = random.Random(f"{name} {seed}")
    size, keeps, on_peer_loss = draw.choice([2, 3]), draw.choice(["all", "last"]), draw.choice(PEER_LOSS)
    fault = ["killed", "paused", *FAULTS][seed % 6]
    made = served(size, draw.choice([1, 2]), **TIMES)
    kind = "dist_async" if name == "dist_async" else "dist_sync"
    hosts = [draw.choice([0, 1]) for _ in range(size)]

    def start(rank: int, slot: int) -> jobs.Worker:
        arguments = (kind, str(tmp_path), slot, 2 * size, keeps, on_peer_loss, seed, 100)
        if name == "hierarchy":
            return start_on(made, hosts[rank], rank, BODIES, "works", *arguments)
        return made.start(BODIES, "works", *arguments, rank=rank)

    faults = job_under(draw, start, size, fault, on_peer_loss)
    events, noticed = events_of(tmp_path), 4 * DEAD_AFTER
    check(History(events, size, kind[5:], keeps, on_peer_loss, tuple(faults), noticed=noticed))


# ------------------------------------------------------------------------------------------------ whole steps

#: How a job loses a worker, or a server, by its seed; `deaths` has those that are no signal of the test.
WAYS = {
    "shared": ["one key", "some time", "in the block", "killed", "some time"],
    "dist_sync": ["one server", "some time", "server killed", "in the block", "killed", "one server"],
}


def job_of_steps(made: jobs.Job, name: str, folder: Path, seed: int) -> History:
    """Run a job that makes steps, in one of which it loses a process; return its history."""
    draw = random.Random(f"{name}: {seed}")
    how = WAYS[name][seed % len(WAYS[name])]
    keeps, victim, last = draw.choice(["all", "last"]), draw.randrange(made.size), draw.randrange(12)

    def start(rank: int) -> jobs.Worker:
        own = (last, how) if rank == victim else (-1, "")
        arguments = (name, str(folder), rank, made.size, keeps, seed, 100, *own)
        return made.start(STEPS, "works", *arguments, rank=rank)

    workers = [start(rank) for rank in range(made.size)]
    for worker in workers:
        worker.expect("ready")
    lost = workers[victim]
    if isinstance(made, ServedJob) and how == "server killed":
        lost = made.servers[draw.randrange(len(made.servers))]
    if "killed" in how:
        time.sleep(draw.random() * 0.1)  # the instant
        lost.signal(signal.SIGKILL)
    killed = time.monotonic()
    for worker in (*workers, lost):
        worker.finish(pace.deadline(100))
    events = events_of(folder)
    if lost is workers[victim]:  # its last call is the only record of its end
        killed = max(one.called for one in events if one.slot == victim)
    fault = Fault("killed", "worker" if lost is workers[victim] else "server", victim, killed)
    assert lost.code == -signal.SIGKILL, lost.errors()
    assert {one.result() for one in workers if one is not lost} <= {"PeerLostError", "done"}
    return History(events, made.size, "sync", keeps, "raise", (fault,))


@pytest.mark.parametrize("seed", seeds(2))
def test_threads_that_make_steps(job: Callable[..., jobs.Job], tmp_path: Path, seed: int) -> None:
    worker = job(1).start(STEPS, "threads", str(tmp_path), seed, 4, rank=0)
    worker.finish(pace.deadline(100))
    assert worker.result() == "done"
    check(History(events_of(tmp_path), 4, "local"))


@pytest.mark.parametrize("seed", seeds(4))
def test_steps_in_shared_memory(job: Callable[..., jobs.Job], tmp_path: Path, seed: int) -> None:
    check(job_of_steps(job(2 + seed % 2), "shared", tmp_path, seed))


@pytest.mark.parametrize("seed", seeds(4))
def test_steps_on_servers(served: Callable[..., ServedJob], tmp_path: Path, seed: int) -> None:
    check(job_of_steps(served(2 + seed % 2, 2 - seed // 2 % 2, **TIMES), "dist_sync", tmp_path, seed))
