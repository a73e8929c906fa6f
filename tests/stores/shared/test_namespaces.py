"""Workers in different namespaces of the kernel do not meet, and say so long before the deadline."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pace
import pytest
from launched import until

from kvstore.stores.shared.native.rendezvous import RegionRendezvous

TIMEOUT = 250.0  # seconds that a worker would wait
PROGRAM = f"""
import sys
import numpy as np
import kvstore as kv
try:
    store = kv.create("shared", timeout={TIMEOUT})
    store.init("w", np.zeros(4, np.float32))
except kv.KVStoreError as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
"""
NO_PROC = 'mount -t tmpfs none /proc && exec "$@"'
UNSHARE = shutil.which("unshare") or ""
#: The command that starts the second worker, and words of the error.
WAYS = {
    "network": ([UNSHARE, "--net"], "in another network namespace than this process"),
    "process": (
        [UNSHARE, "--pid", "--fork", "--mount-proc"],
        "is in another PID namespace than this process",
    ),
    "process without its /proc": ([UNSHARE, "--pid", "--fork"], "/proc, which shows another PID namespace"),
    "no /proc": ([UNSHARE, "--mount", "sh", "-c", NO_PROC, "sh"], "/proc, which is not there"),
}


def can(way: list[str]) -> bool:
    return bool(way[0]) and not subprocess.run([*way, "true"], capture_output=True, check=False).returncode


def started(way: list[str], job: str, rank: int) -> subprocess.Popen[str]:
    place = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    variables = {**os.environ, "KVSTORE_JOB": job, **{f"KVSTORE_{n}": str(v) for n, v in place.items()}}
    return subprocess.Popen(
        [*way, sys.executable, "-c", PROGRAM], env=variables, stderr=subprocess.PIPE, text=True
    )


def last_line(worker: subprocess.Popen[str], timeout: float | None = None) -> str:
    """What an ended worker has written last; before, a wait may have said that it lasts."""
    return worker.communicate(timeout=timeout)[1].rstrip().rpartition("\n")[2]


@pytest.mark.parametrize("apart", [0, 1])
@pytest.mark.parametrize("name", WAYS)
def test_the_cause_and_the_cure_are_told_early(name: str, apart: int, tmp_path: Path) -> None:
    way, words = WAYS[name]
    if not can(way):
        pytest.skip(f"no namespaces here: {' '.join(way)}")
    begun = time.monotonic()
    workers = [started(way if rank == apart else [], str(tmp_path), rank) for rank in range(2)]
    try:
        while all(worker.poll() is None for worker in workers):
            assert time.monotonic() < begun + TIMEOUT / 2, "no worker has told anything"
            time.sleep(0.05)
        time.sleep(0.5)  # for the other, if it is notified
        told = sorted(last_line(worker) for worker in workers if worker.poll() is not None)
    finally:
        for worker in workers:
            with worker:
                worker.kill()
    assert told[0].startswith("ConfigError: ")  # the other may have been notified of it
    for text in told:
        assert words in text
        assert "create 'dist_sync'" in text
        assert "KVSTORE_JOB" not in text


@pytest.mark.parametrize("apart", [0, 1])
def test_a_wait_for_a_worker_without_proc_names_the_cause(apart: int, tmp_path: Path) -> None:
    """Before, the other waited to its deadline, and named containers as the cause."""
    way, words = WAYS["no /proc"]
    if not can(way):
        pytest.skip("no mount namespaces here")
    begun = time.monotonic()
    waiting = started([], str(tmp_path), 1 - apart)
    try:
        until(lambda: f"@kvstore/{name_of(str(tmp_path), 1 - apart)}/{1 - apart}/start" in sockets())
        failing = started(way, str(tmp_path), apart)
        assert last_line(failing, pace.seconds(60)).startswith("ConfigError: ")
        told = last_line(waiting, TIMEOUT / 2)
    finally:
        with waiting:
            waiting.kill()
    assert time.monotonic() < begun + TIMEOUT / 2
    assert told.startswith(
        f"KVStoreError: worker {apart} of 2 cannot take part in this store: 'shared' opens"
    )
    assert words in told


def name_of(job: str, rank: int) -> str:
    return RegionRendezvous(job, "default", 0, rank, 2).name


def sockets() -> str:
    return Path("/proc/net/unix").read_text()


def test_workers_together_in_other_namespaces_meet(tmp_path: Path) -> None:
    """Namespaces of their own, but the same ones: what `unshare` has started starts both."""
    way = [UNSHARE, "--net", "--pid", "--fork", "--mount-proc"]
    if not can(way):
        pytest.skip("no namespaces here")
    launch = [*way, sys.executable, "-m", "kvstore.launch", "run", "-n", "2", "worker.py"]
    (tmp_path / "worker.py").write_text(PROGRAM)
    done = subprocess.run(
        launch, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True,
        timeout=pace.seconds(100), check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_a_store_on_servers_needs_no_proc(tmp_path: Path) -> None:
    way = WAYS["no /proc"][0]
    if not can(way):
        pytest.skip("no mount namespaces here")
    (tmp_path / "worker.py").write_text(PROGRAM.replace("shared", "dist_sync"))
    (tmp_path / "wrap.sh").write_text(f"#!/bin/sh\nexec {UNSHARE} --mount sh -c '{NO_PROC}' sh \"$@\"\n")
    os.chmod(tmp_path / "wrap.sh", 0o755)
    job = ["-m", "kvstore.launch", "run", "-n", "2", "-s", "1", "./wrap.sh", sys.executable, "worker.py"]
    done = subprocess.run(
        [sys.executable, *job], cwd=tmp_path, env={**os.environ}, capture_output=True, text=True,
        timeout=pace.seconds(100), check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
