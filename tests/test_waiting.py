"""The clock of a wait; a waiting thread checks once more before it reports a timeout."""

from __future__ import annotations

import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import waiting
from kvstore.engine import InterruptibleEvent, Work
from kvstore.errors import TimeoutError
from kvstore.observe.native._observe import Counters
from kvstore.observe.stacks import warn_of_end
from kvstore.stores.parameter_server.protocol.messages import MissingReply
from kvstore.stores.parameter_server.transport.socket_waits import SocketWaits, WakeSignal
from kvstore.stores.parameter_server.worker.driver import MachineDriver
from kvstore.waiting import WaitClock


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_it_is_over_and_tells_by_its_last_reading(clock: Clock) -> None:
    wait = WaitClock(20.0)
    clock.now += 30.0
    assert not wait.is_over
    assert not wait.notice_due()
    assert wait.seconds_left == 0.0
    assert wait.read() == 30.0
    assert wait.is_over
    assert wait.notice_due()
    assert not wait.notice_due()


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 100))
def test_the_notice_comes_before_the_end(timeout: float, notice: float, waited: float) -> None:
    wait = WaitClock(timeout, notice)
    wait.waited = waited
    assert wait.notice_due() or not wait.is_over
    assert wait.near_notice(1.0) or not wait.is_over


def test_what_holds_a_process_up_in_a_test_comes_after_the_reading(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = WaitClock(20.0)

    def stall() -> None:
        clock.now += 30.0

    monkeypatch.setattr(waiting, "stall", stall)
    assert wait.read() == 0.0
    assert not wait.is_over
    assert wait.read() == 30.0


class StoppedDriver(MachineDriver):
    """A worker that is stopped in its turn at the sockets, until long after the awaited event has arrived."""

    def __init__(self, clock: Clock) -> None:
        self.timeout = 20.0
        self._lock = threading.RLock()
        self._waiters, self._waits = deque(), SocketWaits()
        self._called = WakeSignal()
        self._quick = None
        self._counters = Counters("dist_sync", "", 3, 4)
        member = SimpleNamespace(welcome=SimpleNamespace(rank=3))
        self._machine: Any = SimpleNamespace(missing=None, has_met_scheduler=True, member=member)
        self._clock = clock
        self.ready = self.inquired = False

    def check_alive(self) -> None:
        pass

    def _inquire(self, operation: Any) -> str:
        self.inquired = True
        return ""

    def _drive(self) -> None:
        self._clock.now += 60.0
        self.ready = True


def test_an_event_in_the_turn_in_which_the_deadline_passes_is_not_late(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    driver = StoppedDriver(clock)
    driver.wait(lambda: driver.ready, "the others")
    assert not driver.inquired
    assert not caplog.records


def test_a_wait_for_the_job_to_start_knows_its_rank_before_the_store_does(clock: Clock) -> None:
    driver = StoppedDriver(clock)
    assert driver._waiting("the others", 10.0) == "worker 3 has waited 10 s for the others"


def test_what_really_is_late_is_told(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    driver = StoppedDriver(clock)
    with pytest.raises(TimeoutError, match=r"worker 3 has waited 120 s for the others$"):
        driver.wait(lambda: False, "the others")
    assert driver.inquired
    assert len(caplog.records) == 1


def test_a_wait_that_ends_hears_for_whom_it_was_though_it_stood_still(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = StoppedDriver(clock)

    def drive() -> None:
        clock.now += 60.0
        if driver.inquired:
            driver._machine.missing = MissingReply(-1, -1, 0, ranks=(1,))

    monkeypatch.setattr(driver, "_drive", drive)
    with pytest.raises(TimeoutError, match=r"for the others; missing: worker 1$"):
        driver.wait(lambda: False, "the others")


class LateLatch(InterruptibleEvent):
    """Set at the very end of a wait, too late for it to notice."""

    def wait(self, timeout: float) -> bool:
        self.set()
        return False


def test_an_operation_that_completes_at_the_end_of_a_wait_is_complete() -> None:
    work = Work("push of key 1", 20.0)
    work._finished = LateLatch()
    work.wait()
    work.wait(0.0)


def test_a_long_wait_says_once_where_the_process_is_before_it_ends(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "before_end", warn_of_end)
    with WaitClock(30.0).described_by("for {:.0f} s".format) as wait:
        assert [one.description() for one in waiting.open_waits()] == ["for 0 s"]
        for now in (119.0, 121.0, 123.0):
            clock.now = now
            wait.read()
    assert waiting.open_waits() == []
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "a wait ends with an error in 9 s" in record.message
    assert "thread MainThread: for 21 s" in record.message
    assert "test_a_long_wait_says_once" in record.message


def test_a_short_wait_does_not(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "before_end", warn_of_end)
    with WaitClock(20.0).described_by("for {:.0f} s".format) as wait:
        clock.now += 19.0
        wait.read()
    assert caplog.records == []
