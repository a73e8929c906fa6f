"""A worker that dies, and a command that is stopped: the messages, and no remaining processes."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched import until
from nightly import nightly_unless

LONG = ("--rounds", "10000")


@pytest.mark.parametrize(
    ("store", "moment"),
    nightly_unless(
        lambda *case: case == ("shared", "measuring"),
        itertools.product(["shared", "dist_sync"], ["starting", "measuring"]),
    ),
)
def test_a_worker_that_is_killed_is_named(bench: Callable[..., Any], store: str, moment: str) -> None:
    command = bench("--store", store, "--peers", "none", *LONG)
    if moment == "measuring":
        command.wait_for("measuring")
    until(lambda: 1 in command.workers("kvstore"))
    os.kill(command.workers("kvstore")[1], signal.SIGKILL)
    assert command.finish(60) == 1
    assert "the workers of kvstore failed: rank 1 was ended by SIGKILL" in command.error


def test_a_server_that_is_killed_is_named(bench: Callable[..., Any]) -> None:
    command = bench("--store", "dist_sync", "--peers", "none", *LONG)
    command.wait_for("measuring")
    servers = [
        pid for pid in command.job.alive() if b"\0server\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(servers[0], signal.SIGKILL)
    assert command.finish(60) == 1
    assert "server 0 was ended by SIGKILL" in command.error


def shared_files(command: Any, peer: str) -> set[str]:
    """Files in shared memory that the workers of a peer have open."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in command.workers(peer).values()]
    return {name for text in maps for name in re.findall(r" (/dev/shm/mpich\S+)$", text, re.MULTILINE)}


def test_a_worker_of_mpi_that_is_killed(bench: Callable[..., Any], mpi: None) -> None:
    command = bench("--peers", "mpi", *LONG)
    command.wait_for("measuring")
    files, victim = shared_files(command, "mpi"), command.workers("mpi")[1]
    os.kill(victim, signal.SIGKILL)
    assert command.finish(60) == 1
    assert re.search(r"the workers of mpi failed: rank \d \(process \d+\) has ended", command.error)
    assert [name for name in files if os.path.exists(name)] == []


@pytest.mark.parametrize(
    ("number", "moment"),
    nightly_unless(
        lambda *case: case == (signal.SIGTERM, "measuring"),
        itertools.product([signal.SIGINT, signal.SIGTERM], ["starting", "measuring"]),
    ),
)
def test_a_signal_ends_everything(
    bench: Callable[..., Any], mpi: None, number: signal.Signals, moment: str
) -> None:
    command = bench("--peers", "mpi", *LONG)
    if moment == "measuring":
        command.wait_for("measuring")
    until(lambda: 1 in command.workers("mpi"))
    files = shared_files(command, "mpi")
    command.process.send_signal(number)
    assert command.finish(60) == 128 + number
    assert f"kvstore bench: ended, because of {number.name}" in command.shown
    assert command.out == ""
    assert [name for name in files if os.path.exists(name)] == []


def test_the_processes_end_with_a_command_that_is_killed(bench: Callable[..., Any]) -> None:
    command = bench("--store", "dist_sync", "--peers", "none", *LONG)
    command.wait_for("measuring")
    command.process.kill()
    assert command.finish(60) == -signal.SIGKILL
