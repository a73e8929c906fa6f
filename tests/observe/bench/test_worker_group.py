"""The engine of both benches: workers that answer, end, say nothing, or do not end."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator

import pytest
from launched import until

from kvstore.observe.bench.worker_group import PeerFailure, WorkerGroup

CONNECT = """
import json, os, signal, sys, time
from multiprocessing.connection import Client
rank = int(sys.argv[1])
link = Client("\\0" + sys.argv[2], "AF_UNIX")
def say(message):
    link.send_bytes(json.dumps(message).encode())
say({"rank": rank})
"""
ECHO = """
while True:
    try:
        say({"rank": rank, "asked": json.loads(link.recv_bytes())})
    except EOFError:
        sys.exit()
"""

Start = Callable[..., WorkerGroup]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a worker for each program; their output is kept."""
    made: list[WorkerGroup] = []

    def group(*programs: str, ranks: tuple[int, ...] = (0, 1)) -> WorkerGroup:
        address = f"kvstore/bench/{secrets.token_hex(8)}"
        made.append(WorkerGroup("some", len(programs), "\0" + address, os.memfd_create("output")))
        for rank, program in zip(ranks, programs, strict=False):
            command = [sys.executable, "-c", CONNECT + program, str(rank), address]
            made[-1].start(command, dict(os.environ))
        return made[-1]

    yield group
    for one in made:
        one.end(0.0)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_answers_are_in_the_order_of_the_ranks(start: Start) -> None:
    group = start(ECHO, "time.sleep(0.2)" + ECHO, ranks=(1, 0))
    group.meet(60)
    for number in range(3):
        assert group.ask({"n": number}, 60) == [{"rank": r, "asked": {"n": number}} for r in (0, 1)]
    pids = list(group.pids.values())
    group.end(60)
    assert alive(pids) == []
    assert [process.returncode for process in group.processes] == [0, 0]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("link.recv_bytes()", r"^the workers of some failed: rank 1 \(process \d+\) has ended$"),
        ("say({'error': 'no room'}); time.sleep(1)", "^the workers of some failed: no room$"),
        (
            "link.recv_bytes(); print('kvstore run: rank 1 was ended by SIGKILL; its stderr ended with:')",
            "^the workers of some failed: rank 1 was ended by SIGKILL$",
        ),
    ],
)
def test_a_failure_names_its_cause(start: Start, program: str, words: str) -> None:
    group = start("link.recv_bytes(); time.sleep(1)", program)
    group.meet(60)
    with pytest.raises(PeerFailure, match=words) as raised:
        group.ask({}, 60)
    assert raised.value.printed == group.printed()


def test_workers_that_do_not_answer_are_named(start: Start) -> None:
    group = start(ECHO, "time.sleep(5)")
    group.meet(60)
    with pytest.raises(PeerFailure, match="no answer within 2 s from rank 1"):
        group.ask({}, 2)


def test_processes_that_are_jobs_of_their_own(start: Start) -> None:
    with pytest.raises(PeerFailure, match="each process is a job of its own"):
        start(ECHO, ECHO, ranks=(0, 0)).meet(60)


def test_a_worker_that_ends_before_all_have_connected(start: Start) -> None:
    group = start(ECHO, "", ranks=(0, 1))
    group.workers = 3
    with pytest.raises(PeerFailure, match="some ended before all had started"):
        group.meet(60)


def test_a_worker_that_ignores_everything_is_killed(start: Start) -> None:
    group = start("signal.signal(signal.SIGTERM, signal.SIG_IGN); say(0); time.sleep(600)")
    group.meet(60)
    until(lambda: group.links[0].poll(0.1))
    (pid,) = group.pids.values()
    group.end(0.0)
    assert alive([pid]) == []
    assert group.processes[0].returncode == -signal.SIGKILL
