"""The phases of a thread: one at a time, in the counters and in the ring of events."""

from __future__ import annotations

import subprocess
import sys

import pace

RUN = """
import threading, time
from kvstore.observe.counters import MOVING, SUMMING, WAITING
from kvstore.observe.events import NO_SLICE, NOBODY, Event, recorded
from kvstore.observe.native import _observe as native

native.record_events(1 << 10)
counters, other = native.Counters("local", "", 0, 1), native.Counters("local", "", 0, 1)


def new():
    global seen
    found = recorded()
    found, seen = found[seen:], len(found)
    return found


seen = 0
counters.enter(MOVING)  # nobody asks
counters.leave()
assert new() == [] and not any(counters.read()["ns"])
counters.take_times()
other.take_times()
"""


def run(text: str) -> None:
    subprocess.run([sys.executable, "-c", RUN + text], check=True, timeout=pace.seconds(60))


def test_a_phase_ends_the_one_before() -> None:
    run("""
counters.enter(MOVING, 3, 4, 5, -2)
counters.enter(SUMMING)
with counters.during(MOVING, 7):
    time.sleep(0.01)
counters.leave()
first, second, third = new()
assert (first.kind, first.store) == (MOVING, 0)
assert (first.slice, first.round, first.nbytes, first.whom) == (3, 4, 5, -2)
assert (second.kind, second.slice, second.whom) == (SUMMING, NO_SLICE, NOBODY)
assert (third.kind, third.slice) == (MOVING, 7)
assert first.end == second.begin and second.end == third.begin and third.end - third.begin >= 10_000_000
numbers = counters.read()
assert numbers["spans"] == [0, 2, 1, 0, 0]
assert numbers["ns"][MOVING] == first.end - first.begin + third.end - third.begin
""")


def test_a_wait_goes_on_and_is_about_what_was_missing_last() -> None:
    run("""
counters.enter(WAITING, 1, 2, 0, 3)
since = counters.read()["waiting_since"]
assert since
counters.enter(WAITING, 1, 2, 0, 4)
counters.enter(WAITING)  # nothing more is known
numbers = counters.read()
assert (numbers["waiting_since"], numbers["slice"], numbers["round"], numbers["whom"]) == (since, 1, 2, 4)
moment = native.now()
time.sleep(0.01)
counters.leave(moment)
(one,) = new()
assert (one.kind, one.begin, one.end, one.slice, one.round, one.whom) == (WAITING, since, moment, 1, 2, 4)
numbers = counters.read()
assert numbers["waiting_since"] == 0 and sum(numbers["waits"]) == 1
counters.enter(WAITING)
other.enter(WAITING)  # of another store
counters.leave()
assert [(one.kind, one.store) for one in new()] == [(WAITING, 0), (WAITING, 1)]
""")


def test_each_thread_has_its_own() -> None:
    run("""
counters.enter(WAITING)
def work():
    with counters.during(MOVING):
        pass
thread = threading.Thread(target=work)
thread.start()
thread.join()
assert [one.kind for one in new()] == [MOVING]
counters.leave()
assert [one.kind for one in new()] == [WAITING]
""")


def test_counters_that_are_not_shown_are_in_no_page() -> None:
    run("""
hidden = native.Counters("hidden", "", 0, 1, shown=False)
assert hidden.number == -1
hidden.move(2, 5, 6)
assert hidden.read()["sent"][2] == 5
assert "hidden" not in [one["store"] for one in native.read_own()]
native.take_times()
assert not native.Counters("hidden", "", 0, 1, shown=False).timed
""")
