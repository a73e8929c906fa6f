"""SIGUSR2: a process of a job prints its stacks, and continues."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pace
import pytest
from launched import PATIENCE, Job, until

SSH = Path(__file__).parents[1] / "launch" / "stand_in_for_ssh.py"

SLOW = """
import numpy as np
import kvstore as kv
store = kv.create(os.environ["STORE"])
store.init("w", np.zeros(1000, np.float32))
out = np.empty(1000, np.float32)
for step in range(2):
    if step and RANK:
        wait_for("go", 9)
    store.push("w", np.ones(1000, np.float32))
    if step:
        say("pushed")
    store.pull("w", out=out)
print(*set(out))
"""


def asked_until(process: int, number: int, file: Path, pattern: bytes) -> bytes:
    """Send a signal, repeatedly, until the output matches."""
    end = pace.deadline(PATIENCE)
    while not re.search(pattern, file.read_bytes(), re.DOTALL):
        assert time.monotonic() < end, file.read_bytes()
        os.kill(process, number)
        again = time.monotonic() + 0.5
        while time.monotonic() < again and not re.search(pattern, file.read_bytes(), re.DOTALL):
            time.sleep(0.02)
    return file.read_bytes()


def started(job: Job, *arguments: str, text: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a job with its stderr in a file. It loses no process to silence, also on a busy machine."""
    path = job.folder / "stderr"
    job.environment["KVSTORE_DEAD_AFTER"] = "60"
    with path.open("wb") as file:
        return job.run(*arguments, text=text, stderr=file), path


def go_on(job: Job, launcher: subprocess.Popen[bytes], workers: int) -> None:
    """Let the slow worker arrive, and check that the job ends as usual."""
    (job.folder / "go-9").touch()
    out, _ = launcher.communicate(timeout=pace.seconds(100))
    assert launcher.returncode == 0
    assert sorted(out.splitlines()) == [b"[%d] %.1f" % (rank, workers) for rank in range(workers)]


@pytest.mark.parametrize(
    ("kind", "servers", "wait"),
    [
        ("shared", [], rb"has waited \d+ s on round 2 of key 'w' for worker 1 "),
        (
            "dist_sync",
            ["-s", "1"],
            rb"has waited \d+ s for a pull \(key 'w', round \d+\); missing: worker 1\n",
        ),
    ],
)
def test_a_worker_that_waits_names_method_key_round_and_the_missing(
    job: Job, kind: str, servers: list[str], wait: bytes
) -> None:
    job.environment["STORE"] = kind
    launcher, err = started(job, "-n", "2", *servers, text=SLOW)
    until(lambda: job.said("pushed", 0))
    page = asked_until(job.pid("pushed", 0), signal.SIGUSR2, err, rb"in pull of thread MainThread: .*" + wait)
    assert f"[0] kvstore: worker 0, process {job.pid('pushed', 0)}\n".encode() in page
    assert f"[0]   store {kind!r}: worker 0 of 2, open\n".encode() in page
    assert re.search(rb'\[0\]   File ".*worker\.py", line \d+ in <module>', page)
    go_on(job, launcher, 2)


@pytest.fixture
def in_foreground() -> Iterator[None]:
    """A background process of a shell ignores SIGQUIT, and so do its children."""
    before = signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGQUIT, before)


@pytest.mark.usefixtures("in_foreground")
@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGQUIT])
def test_the_launcher_has_all_processes_write_theirs(job: Job, number: int) -> None:
    job.environment["STORE"] = "dist_sync"
    launcher, err = started(job, "-n", "2", "-s", "1", text=SLOW)
    until(lambda: job.said("pushed", 0))
    marks = (b"[0] kvstore: worker 0,", b"[1] kvstore: worker 1,", b"[server 0] kvstore: server 0,")
    all_of_them = [*marks, b"[scheduler] kvstore: scheduler,"]
    for mark in all_of_them:
        asked_until(launcher.pid, number, err, re.escape(mark))
    page = err.read_bytes()
    for mark in (b"0", b"1", b"server 0", b"scheduler"):
        assert re.search(rb'\[%s\]   File ".*", line \d+ in ' % mark, page)
    go_on(job, launcher, 2)


def test_processes_on_other_hosts_write_theirs_too(job: Job) -> None:
    job.environment |= {"STORE": "dist_sync", "KVSTORE_SSH": shlex.join([sys.executable, str(SSH)])}
    hosts = ["--hosts", "127.0.0.2:1,127.0.0.3:1", "--export", "STORE"]
    launcher, err = started(job, "-n", "2", "-s", "2", *hosts, text=SLOW)
    until(lambda: job.said("pushed", 0))
    for who in ("0] kvstore: worker 0", "1] kvstore: worker 1", "server 0] kvstore: server 0",
                "server 1] kvstore: server 1", "scheduler] kvstore: scheduler"):  # fmt: skip
        asked_until(launcher.pid, signal.SIGUSR2, err, re.escape(f"[{who}, process ".encode()))
    go_on(job, launcher, 2)


def by_hand(job: Job, name: str, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a process of the parameter server with its stderr in a file."""
    path = job.folder / name
    with path.open("wb") as file:
        return job.start("-m", "kvstore", *arguments, stderr=file), path


def test_a_scheduler_and_a_server_that_were_started_by_hand_write_theirs(job: Job) -> None:
    scheduler, of_scheduler = by_hand(job, "scheduler", "scheduler", "-n", "2", "-s", "1")
    assert scheduler.stdout is not None
    address = scheduler.stdout.readline().decode().strip()
    server, of_server = by_hand(job, "server", "server", "--scheduler", address)
    job.environment |= {"STORE": "dist_sync", "KVSTORE_SCHEDULER": address, "KVSTORE_RESTART": "0"}
    script, log = job.script(SLOW), job.folder / "worker"
    workers = []
    for rank in ("0", "1"):
        place = {
            "KVSTORE_RANK": rank,
            "KVSTORE_LOCAL_RANK": rank,
            "KVSTORE_SIZE": "2",
            "KVSTORE_LOCAL_SIZE": "2",
        }
        with log.open("ab") as file:
            workers.append(job.start(script, env={**job.environment, **place}, stderr=file))
    until(lambda: job.said("pushed", 0))
    asked_until(
        scheduler.pid, signal.SIGUSR2, of_scheduler, rb"kvstore: scheduler, process %d\n" % scheduler.pid
    )
    asked_until(server.pid, signal.SIGUSR2, of_server, b"  server 0 serves stores 0\n")
    asked_until(workers[0].pid, signal.SIGUSR2, log, rb"in pull of thread MainThread: .* missing: worker 1\n")
    for path in (of_scheduler, of_server, log):
        assert re.search(rb'  File ".*", line \d+ in ', path.read_bytes())
    (job.folder / "go-9").touch()
    for process in (*workers, server, scheduler):
        process.communicate(timeout=pace.seconds(100))
        assert process.returncode == 0


def test_what_has_no_store_is_not_killed(job: Job) -> None:
    launcher, err = started(job, "-n", "1", text="say('here'); wait_for('go', 9); print(1.0)")
    until(lambda: job.said("here", 0))
    asked_until(
        launcher.pid, signal.SIGUSR2, err, rb"\[0\] process \d+ writes no stacks: it has no store yet"
    )
    go_on(job, launcher, 1)


OWN = """
import faulthandler, os, signal, sys
import kvstore as kv
which = sys.argv[1]
got = []
if which == "before":
    signal.signal(signal.SIGUSR2, lambda *_: got.append(1))
elif which == "ignored":
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
elif which == "in C":
    faulthandler.register(signal.SIGUSR2, file=1, all_threads=False)
store = kv.create("local")
if which == "after":
    signal.signal(signal.SIGUSR2, lambda *_: got.append(1))
os.kill(os.getpid(), signal.SIGUSR2)
print("got", got)
"""


@pytest.mark.parametrize(
    ("which", "out", "err"),
    [
        ("before", rb"got \[1\]\n", b""),
        ("after", rb"got \[1\]\n", b""),
        ("ignored", rb"got \[\]\n", b""),
        ("in C", rb"(?:Stack|Current thread).*got \[\]\n", b""),
        (
            "ours",
            rb"got \[\]\n",
            rb"(?:Stack|Current thread) .*kvstore: worker 0, .*store 'local': worker 0 of 1, open\n",
        ),
    ],
)
def test_a_handler_of_the_application_stays(job: Job, which: str, out: bytes, err: bytes) -> None:
    process = job.start("-c", OWN, which)
    told, said = process.communicate(timeout=pace.seconds(100))
    assert process.returncode == 0
    assert re.fullmatch(out, told, re.DOTALL), told
    assert re.fullmatch(err, said, re.DOTALL), said


IN_A_THREAD = """
import os, sys, threading
import kvstore as kv
def train():
    with kv.create("local") as store:
        print("here", flush=True)
        sys.stdin.readline()
thread = threading.Thread(target=train, name="trainer")
thread.start()
thread.join()
"""


def test_a_store_of_another_thread(job: Job) -> None:
    path = job.folder / "stderr"
    with path.open("wb") as file:
        process = job.start("-c", IN_A_THREAD, stdin=subprocess.PIPE, stderr=file)
    assert process.stdout is not None
    process.stdout.readline()
    page = asked_until(process.pid, signal.SIGUSR2, path, rb"store 'local': worker 0 of 1, open\n")
    assert re.search(rb'Thread trainer [^\n]*\n  File "<string>", line \d+, in train\n', page), page
    assert b"Thread MainThread" in page
    process.communicate(b"\n", timeout=pace.seconds(100))
    assert process.returncode == 0


BUSY = """
import threading, time
import kvstore as kv
store = kv.create("local")
def deep(calls):
    if calls:
        deep(calls - 1)
def run():
    while True:
        deep(200)
def start():
    while True:
        thread = threading.Thread(target=deep, args=(50,))
        thread.start()
        thread.join()
for target in (run, start):
    threading.Thread(target=target, daemon=True).start()
print("here", flush=True)
while True:
    time.sleep(0.001)
"""


def test_asking_ends_no_process_whose_threads_are_busy(job: Job) -> None:
    process = job.start("-c", BUSY, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.readline()
    for _ in range(500):
        os.kill(process.pid, signal.SIGUSR2)
        time.sleep(0.001)
    assert process.poll() is None
    process.kill()
    process.communicate()
