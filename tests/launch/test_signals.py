"""Signals at any time from the command's first line on: the usual exit codes, no traceback, nothing left."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pace
import pytest
from launched import Job

from kvstore.launch.signals import is_command

DEADLINE = 280.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: All of them run until they are ended.
COMMANDS = [
    ["run", "-n", "2", "sleep", "1000"],
    ["run", "-n", "1", "-s", "1", "sleep", "1000"],
    ["demo", "--epochs", "1000000000"],
    ["demo", "-n", "2", "--epochs", "1000000000"],
    ["scheduler", "-n", "1", "-s", "1"],
    ["server", "--scheduler", "tcp://127.0.0.1:1"],
]
SCRIPT = shutil.which("kvstore", path=str(Path(sys.executable).parent))


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler; Python itself has none for SIGTERM, so its own is a line of ours."""
    line = next(one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in one)
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def until_first_line(process: subprocess.Popen[bytes]) -> None:
    deadline = pace.deadline(DEADLINE)
    while not catches(process.pid, signal.SIGHUP):  # the last that it takes
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)


def check(
    job: Job, arguments: list[str], number: signal.Signals, delay: float, group: bool, as_module: bool
) -> None:
    launch = ["-m", "kvstore.launch"] if as_module or SCRIPT is None else [SCRIPT]
    process = job.start(*launch, *arguments, start_new_session=True)
    until_first_line(process)
    time.sleep(delay)
    (os.killpg if group else os.kill)(process.pid, number)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 128 + number, err
    assert b"Traceback" not in err, err
    assert b"Error" not in err, err


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_signal_while_the_command_imports(job: Job, arguments: list[str], number: signal.Signals) -> None:
    check(job, arguments, number, 0.0, group=True, as_module=False)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(200))
def test_a_signal_at_any_time(job: Job, seed: int) -> None:
    draw = random.Random(seed)
    delay = draw.choice((draw.uniform(0, 0.3), draw.uniform(0, 3)))
    check(job, draw.choice(COMMANDS), draw.choice(SIGNALS), delay, draw.random() < 0.5, draw.random() < 0.5)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_package_as_it_does_the_command(job: Job, number: signal.Signals) -> None:
    process = job.start("-m", "kvstore", "scheduler", "-n", "1", "-s", "1")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, err) == (128 + number, b"")


def test_a_signal_that_is_ignored_stays_so(job: Job) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        process = job.start("-m", "kvstore.launch", "scheduler", "-n", "1", "-s", "1")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.stdout is not None
    process.stdout.readline()
    assert not catches(process.pid, signal.SIGHUP)
    process.terminate()
    process.communicate(timeout=DEADLINE)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("argv", "original", "is_ours"),
    [
        (["/usr/bin/kvstore", "run"], ["python", "/usr/bin/kvstore", "run"], True),
        (["-m", "run"], ["python", "-u", "-m", "kvstore.launch", "run"], True),
        (["-m", "run"], ["python", "-u", "-m", "kvstore", "run"], True),
        (["-m", "run"], ["python", "-um", "kvstore", "run"], True),
        (["-m"], ["python", "-mkvstore"], False),  # no way of writing it may fail
        (["/lib/kvstore/launch/__main__.py"], ["python", "-c", "spawn_main"], True),
        (["/lib/kvstore/__main__.py"], ["python", "-c", "spawn_main"], True),
        (["-m", "kvstore"], ["python", "-m", "pytest", "kvstore"], False),
        (["-m", "run"], ["python", "-m", "pytest", "run"], False),
        (["train.py"], ["python", "train.py"], False),
        (["/app/__main__.py"], ["python", "/app"], False),
        ([], [], False),
    ],
)
def test_only_the_command_is_the_command(argv: list[str], original: list[str], is_ours: bool) -> None:
    assert is_command(argv, original) is is_ours


def test_an_import_changes_no_handler(job: Job) -> None:
    text = """
import signal
def handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
before = handlers()
import kvstore
assert handlers() == before
"""
    process = job.start("-c", text)
    _, err = process.communicate(timeout=pace.seconds(100))
    assert (process.returncode, err) == (0, b"")
