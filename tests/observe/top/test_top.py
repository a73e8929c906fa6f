"""`kvstore top` finds jobs of real processes, and shows their work."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pace
import pytest
from click.testing import CliRunner
from launched import PATIENCE, Job, until

from kvstore.errors import ConfigError
from kvstore.launch.cli import main
from kvstore.observe import processes
from kvstore.observe.native._observe import PAGE_NAME, PAGE_VERSION, Counters, job_id
from kvstore.observe.top import pages
from kvstore.observe.top.watch import JobWatch

TRAIN = """
import numpy as np
import kvstore as kv
with kv.create(os.environ["STORE"]) as store:
    store.init("w", np.zeros(1000, np.float32))
    while not (HERE / "go-9").exists():
        store.pushpull("w", np.ones(1000, np.float32))
        say("trains")
        time.sleep(0.001)
        if store._counters.timed:
            say("timed")
"""


def train(job: Job, *arguments: str, text: str = TRAIN) -> subprocess.Popen[bytes]:
    """Start a job that trains until the test stops it."""
    return job.run(*arguments, text=text, stdout=subprocess.DEVNULL)


def end(job: Job, launcher: subprocess.Popen[bytes]) -> None:
    (job.folder / "go-9").touch()
    _, err = launcher.communicate(timeout=pace.seconds(100))
    assert launcher.returncode == 0, err


@pytest.mark.parametrize(("kind", "servers"), [("shared", "0"), ("dist_sync", "1")])
def test_workers_of_a_job_are_in_rows(job: Job, top: Callable[..., Any], kind: str, servers: str) -> None:
    job.environment |= {"STORE": kind, "KVSTORE_TIMEOUT": pace.variable(100)}
    launcher = train(job, "-n", "2", "-s", servers)
    until(lambda: job.said("trains", 0, 1))
    shown = top("--once", str(launcher.pid))
    assert shown.code == 0, shown.error
    (view,) = shown.views
    (found,) = view["jobs"]
    assert found["command"].endswith("worker.py")
    workers = {row["rank"]: row for row in found["stores"] if row["role"] == "worker"}
    assert {rank: row["process"] for rank, row in workers.items()} == {
        rank: job.pid("trains", rank) for rank in range(2)
    }
    for row in workers.values():
        assert (row["store"], row["size"], row["parent"], row["job"]) == (kind, 2, launcher.pid, found["job"])
        assert row["calls_per_second"] > 0
        assert 0 < row["shared_memory_bytes"] < row["memory_bytes"]
        assert row["cpu"] >= 0
        assert set(row["phases"]) == {"waiting", "moving", "summing", "updating", "converting"}
    until(lambda: job.said("timed", 0, 1))
    end(job, launcher)


def test_a_job_is_named_in_several_ways(job: Job, top: Callable[..., Any]) -> None:
    job.environment |= {"STORE": "local", "KVSTORE_JOB": f"of {job.folder}"}
    process = job.start(
        job.script(TRAIN), env=job.environment | {"KVSTORE_RANK": "0", "KVSTORE_RESTART": "0"} | ONE
    )
    until(lambda: job.said("trains", 0))
    name = job_id(job.environment["KVSTORE_JOB"])
    for wanted in (job.environment["KVSTORE_JOB"], name, name[:6], str(process.pid)):
        shown = top("--once", wanted)
        assert [row["process"] for row in shown.stores] == [process.pid], shown.error
    shown = top("--once", "no such job")
    assert shown.code == 1
    assert shown.error.startswith("Error: there is no job 'no such job' on this machine; there are: ")
    assert name in shown.error
    end(job, process)


ONE = {"KVSTORE_SIZE": "1", "KVSTORE_LOCAL_RANK": "0", "KVSTORE_LOCAL_SIZE": "1"}


def test_the_command_ends_with_the_job_and_tells_of_processes_that_are_gone(
    job: Job, top: Callable[..., Any]
) -> None:
    job.environment["STORE"] = "shared"
    launcher = train(job, "-n", "2")
    until(lambda: job.said("trains", 0, 1))
    command = [sys.executable, "-m", "kvstore", "top", "--interval", "0.1", str(launcher.pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as looking:
        assert looking.stdout is not None
        looking.stdout.readline()
        end(job, launcher)
        out, _ = looking.communicate(timeout=pace.seconds(100))
    assert looking.returncode == 0
    for rank in range(2):
        assert f"worker {rank} (process {job.pid('trains', rank)}) is gone" in out


def test_without_a_job_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "running", lambda root: iter(()))
    done = CliRunner().invoke(main, ["top"])
    assert done.exit_code == 1
    assert done.output == "Error: no process of this user has a store of kvstore on this machine\n"


def test_only_the_job_that_is_looked_at_takes_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "running", lambda root: iter([os.getpid()]))
    counters = Counters("local", f"of {os.getpid()}", 0, 1)
    other = JobWatch("another job", 1.0)
    with pytest.raises(ConfigError, match="no job 'another job'"):
        other.next_view()
    assert not counters.begin()
    own = JobWatch(f"of {os.getpid()}", 1.0)
    own.next_view()
    assert counters.begin()


def test_processes_of_other_users_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> list[str]:
        raise PermissionError(str(path))

    monkeypatch.setattr(processes, "running", lambda root: iter([os.getpid()]))
    monkeypatch.setattr(os, "listdir", refuse)
    assert pages.counter_pages() == []


HOLD = """
import os, struct, sys
fd = os.memfd_create(sys.argv[1])
os.write(fd, struct.pack("=8sII", b"kvcount", int(sys.argv[2]), os.getpid()) + bytes(int(sys.argv[3])))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("version", "size"), [(PAGE_VERSION + 1, 1 << 20), (PAGE_VERSION, 100)])
def test_pages_that_are_none_or_of_another_version_are_not_shown(version: int, size: int) -> None:
    command = [sys.executable, "-c", HOLD, PAGE_NAME, str(version), str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (page,) = [one for one in pages.counter_pages() if one.process == process.pid]
        page.ask_for_times(1)
        assert page.stores is None
        process.communicate(timeout=pace.seconds(60))
        assert process.pid not in {one.process for one in pages.counter_pages()}


INHERITED = """
import os, subprocess, sys
import kvstore as kv
store = kv.create("local")
names = [name for name in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{name}")]
page = next(int(name) for name in names if "kvstore-counters" in os.readlink(f"/proc/self/fd/{name}"))
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[page])
print(child.pid, flush=True)
input()
child.communicate()
"""


def test_a_process_that_has_only_inherited_a_page_is_not_shown(job: Job) -> None:
    process = job.start("-c", INHERITED, stdin=subprocess.PIPE)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    found = {one.process for one in pages.counter_pages()}
    assert process.pid in found
    assert child not in found
    process.communicate(b"\n", timeout=pace.seconds(60))


def in_terminal(command: list[str], columns: int) -> tuple[int, int]:
    """Start a command in a terminal of its own; return its process and the terminal."""
    process, terminal = pty.fork()
    if not process:
        os.environ |= {"COLUMNS": str(columns), "LINES": "24", "TERM": "xterm"}
        os.execv(command[0], command)
    return process, terminal


def read_until(terminal: int, pattern: str) -> str:
    """Read the screen of a terminal until the expected text is there."""
    text, deadline = "", pace.deadline(PATIENCE)
    while not re.search(pattern, text, re.DOTALL):
        assert time.monotonic() < deadline, text
        text += os.read(terminal, 1 << 16).decode(errors="replace")
    return text


def test_in_a_terminal_it_fits_80_columns_and_ctrl_c_ends_it_with_0(job: Job) -> None:
    job.environment["STORE"] = "shared"
    launcher = train(job, "-n", "2")
    until(lambda: job.said("trains", 0, 1))
    command = [sys.executable, "-m", "kvstore", "top", "--interval", "0.1", str(launcher.pid)]
    process, terminal = in_terminal(command, 80)
    try:
        screen = read_until(terminal, r"WAITS FOR.*WAITS FOR.*worker 1")
        os.write(terminal, b"\x03")  # Ctrl-C
        _, status = os.waitpid(process, 0)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
    assert re.search(r"\x1b\[[0-9]+F\x1b\[J.*PROCESS", screen, re.DOTALL), "a look replaces the one before"
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen).replace("^C", "")
    lines = re.split(r"[\r\n]+", shown)
    assert any(
        re.match(r"PROCESS +PID +ROUNDS/S +SENT/S +RECV/S +MEMORY +CPU +LOST +WAIT +WAITS FOR", one)
        for one in lines
    )
    assert max(map(len, lines)) <= 80
    end(job, launcher)
