"""Each store's test is passed here, and fails where sums are wrong, missing, or never arrive."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pace
import pytest
from launched import MARK, Job, until
from nightly import nightly_unless
from observation.checks import finding

from kvstore.observe.doctor import children, job, self_tests
from kvstore.observe.doctor.self_tests import commands, sums

RIGHT = job.expected()


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """All that is started from now on is known by a variable."""
    job = Job(tmp_path)
    monkeypatch.setenv(MARK, job.environment[MARK])
    return job


# test_report.py has all of them every time.
@pytest.mark.parametrize("store", nightly_unless(lambda store: store == "dist_sync", list(commands())))
def test_every_store_passes_and_leaves_nothing(store: str, marked: Job) -> None:
    found = sums(*commands()[store], pace.seconds(60))
    assert found.level == "ok", found
    until(lambda: not marked.alive())


def test_a_store_passes_inside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of that job are no business of the self-tests."""
    for name, value in (("KVSTORE_RANK", "1"), ("KVSTORE_SIZE", "2"), ("KVSTORE_JOB", "x"), ("RANK", "7")):
        monkeypatch.setenv(name, value)
    assert sums(*commands()["local"], pace.seconds(60)).level == "ok"


def test_an_mpiexec_that_is_of_another_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts processes that do not know of each other."""
    pytest.importorskip("mpi4py")
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\nshift 2\n"$@" && "$@"\n')
    mpiexec.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = sums(*commands()["mpi"], pace.seconds(60))
    assert found.level == "error"
    assert "each process is a job of its own: this is worker 0 of 1" in found.text


def program(code: str, workers: int = 1) -> tuple[list[str], int]:
    return [sys.executable, "-c", code], workers


def test_a_test_that_hangs_is_ended_and_an_error(marked: Job) -> None:
    found = sums(*program("import time; time.sleep(600)"), 1.0)
    assert found.level == "error"
    assert "not finished after 1 s" in found.text
    assert marked.alive() == []


HANGS = ("-m", "kvstore", "run", "-n", "2", "-s", "1", "--no-prefix", "sleep", "600")


def test_a_job_that_hangs_is_ended_with_all_of_its_processes(
    marked: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_GRACE", pace.seconds(20))
    found = sums((sys.executable, *HANGS), 2, 3.0)
    assert found.level == "error"
    until(lambda: not marked.alive())


def test_a_wrong_sum_is_an_error() -> None:
    wrong = f"{int(RIGHT, 16) ^ 1:032x}"
    found = sums(*program(f"print('sum', {wrong!r})"), pace.seconds(60))
    assert found.level == "error"
    assert "wrong" in found.text
    assert sums(*program(f"print('sum', {RIGHT!r})"), pace.seconds(60)).level == "ok"


def test_one_wrong_worker_is_enough() -> None:
    for digests, level, text in (
        ([RIGHT, RIGHT], "ok", "2 processes"),
        ([RIGHT, "0" * 32], "error", "not those of NumPy"),
        ([RIGHT], "error", "1 of 2 workers"),
    ):
        code = "".join(f"print('sum', {digest!r})\n" for digest in digests)
        found = sums(*program(code, 2), pace.seconds(60))
        assert (found.level, text in found.text) == (level, True), found


def test_a_crash_is_an_error_with_its_last_line() -> None:
    found = sums(*program("raise ValueError('a plain reason')"), pace.seconds(60))
    assert found.level == "error"
    assert "exit code 1: ValueError: a plain reason" in found.text


def test_a_line_is_written_at_once() -> None:
    """Two workers write to one pipe: lines in pieces would mix."""
    calls = "job.write_line('sum', 'digest'); job.write_line('seconds', 1, 2.5)"
    code = f"from kvstore.observe.doctor import job; {calls}"
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # it keeps writes apart
    with here, there:
        here.settimeout(pace.seconds(60))
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=there,
            timeout=pace.seconds(60),
            check=True,
        )
        assert [here.recv(100), here.recv(100)] == [b"sum digest\n", b"seconds 1 2.5\n"]


def test_the_digest_depends_on_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    part = job.part

    def altered(key: str, turn: int, rank: int) -> np.ndarray:
        array = part(key, turn, rank)
        if (key, turn, rank) == ("large", 1, 1):
            array[-1] = np.nextafter(array[-1] * 2, np.float32(np.inf))
        return array

    monkeypatch.setattr(job, "part", altered)
    assert job.expected() != RIGHT


def test_processes_with_one_parent_read_each_other_or_say_why(marked: Job) -> None:
    found = self_tests.reads_between_processes()
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if not scope.exists() or scope.read_text().strip() == "0":
        assert found.level == "ok", found
    else:
        assert found.level in ("ok", "warning")
    until(lambda: not marked.alive())


@pytest.mark.parametrize(
    ("ran", "level", "text"),
    [
        (children.ProgramEnd(0, "", "group 'default', workers read each other's memory\n"), "ok", "works"),
        (
            children.ProgramEnd(0, "", "workers do not read each other's memory\n"),
            "warning",
            "(the system refuses it)",
        ),
        (children.ProgramEnd(None, "", ""), "warning", "deadline"),
    ],
)
def test_reads_that_are_refused_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, ran: children.ProgramEnd, level: str, text: str
) -> None:
    monkeypatch.setattr(children, "run", lambda *_: ran)
    found = finding(self_tests.reads_between_processes)
    assert found.level == level
    assert text in found.text
    assert ("SYS_PTRACE" in found.cure) is (level == "warning")
