"""Heartbeats: they are sent by a running process, whatever its Python does, and by no other process."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pace
import pytest
import zmq

from kvstore.settings.keys import JobKeys
from kvstore.stores.parameter_server.transport import options
from kvstore.stores.parameter_server.transport.channel import DealerChannel
from kvstore.stores.parameter_server.transport.context import ZmqContext
from kvstore.stores.parameter_server.transport.heartbeat_echoes import (
    HeartbeatMonitor,
    HeartbeatResponder,
    SchedulerEcho,
)

Contexts = Callable[..., ZmqContext]
Start = Callable[..., subprocess.Popen[str]]
PATIENCE = 20.0
BEAT = 0.05


@pytest.fixture
def pulses(context: Contexts, address: str) -> Iterator[HeartbeatMonitor]:
    made = HeartbeatMonitor(context(), address)
    yield made
    made.router.close()


def beats(pulses: HeartbeatMonitor, name: str, seconds: float) -> int:
    """In how many of the intervals within so many seconds a process was heard."""
    heard = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pulses.ping_all()
        time.sleep(BEAT)
        heard += name in pulses.read_echoes()
    return heard


def wait_for(pulses: HeartbeatMonitor, name: str) -> None:
    end = pace.deadline(PATIENCE)
    while not beats(pulses, name, BEAT):
        assert time.monotonic() < end, f"{name} was never heard"


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_pulse_is_heard_until_it_is_closed(pulses: HeartbeatMonitor) -> None:
    pulse = HeartbeatResponder(pulses.address, "worker 0")
    for _ in range(5):
        wait_for(pulses, "worker 0")
    pulse.close()
    pulse.close()
    time.sleep(BEAT)
    pulses.read_echoes()
    assert beats(pulses, "worker 0", 6 * BEAT) == 0
    assert not pulses._known, "a process that has left is not asked"


def test_each_is_heard_once(pulses: HeartbeatMonitor) -> None:
    found = [HeartbeatResponder(pulses.address, f"worker {rank}") for rank in range(4)]
    for rank in range(4):
        wait_for(pulses, f"worker {rank}")
    for _ in range(5):
        pulses.ping_all()
    heard: set[str] = set()
    end = pace.deadline(PATIENCE)
    while len(heard) < 4:  # some answer later, where the machine is busy
        assert time.monotonic() < end, heard
        time.sleep(4 * BEAT)
        names = pulses.read_echoes()
        assert len(names) == len(set(names)), names
        heard.update(names)
    for pulse in found:
        pulse.close()


def test_a_process_that_was_not_asked_is_not_heard(pulses: HeartbeatMonitor) -> None:
    pulse = HeartbeatResponder(pulses.address, "worker 0")
    wait_for(pulses, "worker 0")
    time.sleep(2 * BEAT)
    pulses.read_echoes()
    time.sleep(4 * BEAT)
    assert pulses.read_echoes() == []
    pulse.close()


def test_with_keys(context: Contexts, job_keys: dict[str, JobKeys]) -> None:
    pulses = HeartbeatMonitor(context(job_keys["scheduler"]), "tcp://127.0.0.1:0")
    pulse = HeartbeatResponder(pulses.address, "worker 0", job_keys["worker"])
    stranger = HeartbeatResponder(pulses.address, "stranger", job_keys["stranger"])
    wait_for(pulses, "worker 0")
    assert beats(pulses, "stranger", 10 * BEAT) == 0
    pulse.close()
    stranger.close()


def test_without_keys_its_job_is_heard_only(context: Contexts, address: str) -> None:
    pulses = HeartbeatMonitor(context(job="a job"), address)
    pulse = HeartbeatResponder(pulses.address, "worker 0", job="a job")
    stranger = HeartbeatResponder(pulses.address, "stranger", job="another job")
    wait_for(pulses, "worker 0")
    assert beats(pulses, "stranger", 10 * BEAT) == 0
    pulse.close()
    stranger.close()


def let_go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("x")
    process.stdin.flush()
    assert said(process) == "held"


def test_a_process_that_holds_the_interpreters_lock_is_alive(pulses: HeartbeatMonitor, start: Start) -> None:
    process = start("pulse", pulses.address, "worker 0", "holds")
    assert said(process) == "beats"
    wait_for(pulses, "worker 0")
    assert said(process) == "holds"
    for _ in range(10):
        wait_for(pulses, "worker 0")
    let_go(process)


def test_it_is_alive_as_soon_as_it_has_a_responder(pulses: HeartbeatMonitor, start: Start) -> None:
    process = start("held_at_once", pulses.address, "worker 0")
    assert said(process) == "holds"
    wait_for(pulses, "worker 0")
    let_go(process)


def test_a_connection_that_breaks_before_it_is_read_ends_nothing(
    pulses: HeartbeatMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, broken = zmq.proxy, [zmq.Again(), zmq.Again()]

    def breaks(*sockets: zmq.Socket[bytes]) -> None:
        if broken:
            raise broken.pop()
        proxy(*sockets)

    monkeypatch.setattr(zmq, "proxy", breaks)
    pulse = HeartbeatResponder(pulses.address, "worker 0")
    wait_for(pulses, "worker 0")
    assert not broken
    pulse.close()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_stopped_or_dead_process_is_silent(
    pulses: HeartbeatMonitor, start: Start, number: signal.Signals
) -> None:
    process = start("pulse", pulses.address, "worker 0")
    wait_for(pulses, "worker 0")
    process.send_signal(number)
    time.sleep(4 * BEAT)
    pulses.read_echoes()
    assert beats(pulses, "worker 0", 1.0) == 0
    if number == signal.SIGSTOP:
        process.send_signal(signal.SIGCONT)
        wait_for(pulses, "worker 0")


def test_a_process_ends_without_closing_its_pulse(pulses: HeartbeatMonitor, start: Start) -> None:
    process = start("pulse", pulses.address, "worker 0")
    wait_for(pulses, "worker 0")
    _, errors = process.communicate("\n", timeout=PATIENCE)
    assert process.returncode == 0
    assert not errors, errors


def test_a_process_ends_whose_scheduler_is_gone(context: Contexts, start: Start) -> None:
    made = context()
    pulses = HeartbeatMonitor(made, "tcp://127.0.0.1:0")
    process = start("pulse", pulses.address, "worker 0")
    wait_for(pulses, "worker 0")
    made.close()
    process.communicate("\n", timeout=PATIENCE)
    assert process.returncode == 0


def test_a_fork_is_not_its_parent(pulses: HeartbeatMonitor, start: Start) -> None:
    process = start("forked_pulse", pulses.address, "worker 0")
    word, child = said(process).split()
    assert word == "child"
    assert process.wait(PATIENCE) == 0
    os.kill(int(child), 0)  # lives
    time.sleep(4 * BEAT)
    pulses.read_echoes()
    assert beats(pulses, "worker 0", 0.5) == 0
    process.communicate("\n", timeout=PATIENCE)  # until the child has closed its end too


def test_it_comes_before_the_scheduler_and_after(context: Contexts) -> None:
    first = context()
    address = HeartbeatMonitor(first, "tcp://127.0.0.1:0").address
    first.close()
    pulse = HeartbeatResponder(address, "worker 0")
    for _ in range(2):
        made = context()
        wait_for(HeartbeatMonitor(made, address), "worker 0")
        made.close()
    pulse.close()


def test_the_asking_process_notices_soon_that_another_has_taken_its_place(
    context: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attacker replays recorded data; ZeroMQ does not report whose place it was."""
    monkeypatch.setattr(options, "_HEARTBEAT", 0)  # the usual way to notice takes 15 s
    echo = SchedulerEcho(context(), "tcp://127.0.0.1:0")
    one = DealerChannel(context(), echo.address, b"worker 0", insists=True, watched=True)
    ask_until_answered(one)
    other = DealerChannel(context(), echo.address, b"worker 0")
    ask_until_answered(other)
    other.close()
    while one.receive() is not None:
        pass
    ask_until_answered(one)


def ask_until_answered(one: DealerChannel) -> None:
    end = pace.deadline(PATIENCE)
    one.send([b"?"])
    while one.receive(0.1) is None:
        assert time.monotonic() < end
        one.send([b"?"])
