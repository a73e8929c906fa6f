"""Taking a rank in a job, and what stands in the way."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pace
import pytest
from jobs import Job, sockets_of

import kvstore as kv
from kvstore.stores.shared.native.rendezvous import RegionRendezvous

BODIES = "procs_shared_faults"

MakeJob = Callable[..., Job]


def place(monkeypatch: pytest.MonkeyPatch, size: int, local_size: int) -> None:
    for name, value in {
        "RANK": 0,
        "SIZE": size,
        "LOCAL_RANK": 0,
        "LOCAL_SIZE": local_size,
        "JOB": "x",
    }.items():
        monkeypatch.setenv(f"KVSTORE_{name}", str(value))


def test_a_job_of_several_machines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch, 4, 2)
    with pytest.raises(kv.ConfigError, match="dist_sync"):
        kv.create("shared")


def test_more_workers_than_there_is_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch, 65, 65)
    with pytest.raises(kv.ConfigError, match="64"):
        kv.create("shared")


def test_a_store_that_was_not_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch, 2, 2)
    monkeypatch.setenv("KVSTORE_JOB", f"alone {os.getpid()}")
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(kv.errors.TimeoutError, match=r"worker 0 of 2 waited.*1"):
            kv.create("shared", timeout=0.1)
    assert set(os.listdir("/proc/self/fd")) == before


def test_workers_that_differ_in_what_a_loss_means(job: MakeJob) -> None:
    made = job(2)
    made.start(BODIES, "refused", "KVStoreError", rank=0)
    other = made.start(BODIES, "refused", "ConfigError", 0, "continue", rank=1)
    other.finish(pace.deadline(20))
    assert "on_peer_loss" in other.result()
    made.finish()


def test_a_worker_that_dies_before_the_job_is_complete(job: MakeJob) -> None:
    made = job(3)
    waiting = made.start(BODIES, "refused", "KVStoreError", 0, "raise", 20.0, rank=0)
    dying = made.start(BODIES, "refused", "KVStoreError", 0, "raise", 20.0, rank=1)
    name = RegionRendezvous(made.name, "default", 0, 1, 3).name
    end = pace.deadline(20)
    while not watches(waiting.pid, dying.pid) and time.monotonic() < end:
        time.sleep(0.005)
    started = time.monotonic()
    dying.signal(signal.SIGKILL)
    waiting.finish(pace.deadline(10))
    assert "worker 1" in waiting.result()
    assert time.monotonic() - started < pace.seconds(2)
    assert not sockets_of(name)


def watches(watcher: int, watched: int) -> bool:
    """Whether a process holds a pidfd of another: it has seen it sit down."""
    with contextlib.suppress(OSError):  # descriptors open and close
        for info in Path(f"/proc/{watcher}/fdinfo").iterdir():
            if f"Pid:\t{watched}\n" in info.read_text():
                return True
    return False


def test_a_rank_is_free_again_although_a_fork_of_its_process_lives(job: MakeJob, tmp_path: Path) -> None:
    made = job(2)
    workers = made.start_all(BODIES, "forks_and_stays")
    for worker in workers:
        worker.expect("in")
    workers[1].signal(signal.SIGKILL)
    again = made.start(BODIES, "sits", 20, "continue", rank=1)
    again.expect("in")
    for worker in (workers[0], again):
        worker.say("go")
    made.finish()
    assert [workers[0].code, again.code] == [0, 0]
