"""Of several threads that wait the oldest is at the sockets, and an end is never missed."""

from __future__ import annotations

import threading
import time

import pace
import pytest

from kvstore.stores.parameter_server.transport import socket_waits
from kvstore.stores.parameter_server.transport.socket_waits import SocketWait, SocketWaits, WakeSignal


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(socket_waits, "time", made)
    return made


def begin_elsewhere(waits: SocketWaits, thread: int = 1) -> SocketWait:
    """Begin a wait of another thread."""
    wait = waits.begin_wait()
    wait.thread += thread
    return wait


def is_sent(signal: WakeSignal) -> bool:
    """Take a signal that was sent."""
    return signal._lock.acquire(blocking=False)


def test_the_oldest_leads_and_then_the_next(clock: Clock) -> None:
    waits = SocketWaits()
    assert not waits.are_served()
    first, second = waits.begin_wait(), begin_elsewhere(waits)
    assert waits.are_served()
    assert waits.are_several()
    assert not waits.is_led(first)
    assert waits.is_led(second)
    waits.end_wait(first)
    assert is_sent(second.changed)
    assert not waits.is_led(second)
    assert not waits.are_several()
    waits.end_wait(second)
    assert not waits.are_served()


def test_a_wait_within_a_wait_of_the_same_thread_is_not_led(clock: Clock) -> None:
    """A signal handler's, which has interrupted the other."""
    waits = SocketWaits()
    waits.begin_wait()
    assert not waits.is_led(waits.begin_wait())


def test_a_late_thread_leads_none_until_it_returns(clock: Clock) -> None:
    waits = SocketWaits()
    first, second = waits.begin_wait(), begin_elsewhere(waits)
    clock.now += 1.0
    assert not waits.is_led(second)
    assert not waits.are_served()
    first.at_sockets = clock.now
    assert waits.is_led(second)


def test_of_those_that_wait_on_one_takes_the_place_of_a_late_thread(clock: Clock) -> None:
    """Else they would wake each other until the peer returns, and that may be never."""
    waits = SocketWaits()
    waits.begin_wait()
    second, third = begin_elsewhere(waits), begin_elsewhere(waits, 2)
    clock.now += 1.0
    assert not waits.is_led(second)
    second.at_sockets = clock.now
    assert waits.is_led(third)


def test_all_are_told(clock: Clock) -> None:
    waits = SocketWaits()
    both = waits.begin_wait(), begin_elsewhere(waits)
    for _ in range(2):  # a signal that is sent twice is one
        waits.wake_all()
    assert all(is_sent(one.changed) for one in both)
    assert not any(is_sent(one.changed) for one in both)


def test_a_signal_that_comes_first_ends_the_next_wait() -> None:
    signal = WakeSignal()
    signal.send()
    begin = time.monotonic()
    signal.wait(60.0)
    assert time.monotonic() - begin < pace.seconds(30)
    threading.Timer(0.05, signal.send).start()
    signal.wait(60.0)
    assert time.monotonic() - begin < pace.seconds(30)
    signal.wait(0.01)  # and no later one
