"""Times of all processes in one clock."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from observation.made import MS, file, row, sample

from kvstore.observe.counters import WAITING
from kvstore.observe.timeline.clocks import ClockSample, SchedulerClock, both_clocks, name_of_clock
from kvstore.observe.timeline.job.alignment import align_clocks
from kvstore.observe.timeline.job.model import job_of


def moved(*files: object) -> list[int]:
    """Where each file's moment 1 s is, in ms."""
    return [int(one.apply(np.array([1000 * MS]))[0]) // MS for one in align_clocks(files)]  # type: ignore[arg-type]


def test_processes_with_one_clock_need_no_comparison() -> None:
    one, other = file([]), file([], rank=1, realtime=5, scheduler=[sample(0, 3, 1)])
    scheduler = file([], role="scheduler")
    assert moved(one, other, scheduler) == [1000, 1000, 1000]
    assert [a.uncertainty for a in align_clocks([one, other, scheduler])] == [0, 0, 0]


def test_another_host_counts_by_its_best_comparison_with_the_scheduler() -> None:
    scheduler = file([], role="scheduler")
    there = file([], clock="b", scheduler=[sample(10, 77, 4), sample(500, 70, 0.25)])
    beside = file([], rank=1, clock="b")  # its own comparison is missing, and its clock is the same
    assert moved(scheduler, there, beside) == [1000, 1070, 1070]
    assert [a.uncertainty for a in align_clocks([scheduler, there, beside])] == [0, MS // 4, MS // 4]


def test_without_the_schedulers_file_all_are_in_its_time() -> None:
    one = file([], scheduler=[sample(0, 1000, 1)])
    other = file([], rank=1, clock="b", scheduler=[sample(0, -500, 1)])
    assert moved(one, other) == [2000, 500]


def test_comparisons_of_a_long_job_are_interpolated() -> None:
    there = file([], clock="b", scheduler=[sample(0, 100, 0.1), sample(100_000, 200, 0.1)])
    found = align_clocks([file([], role="scheduler"), there])[1]
    at = np.array([0, 50_000 * MS, 100_000 * MS, 200_000 * MS])
    assert (found.apply(at) - at).tolist() == [100 * MS, 150 * MS, 200 * MS, 200 * MS]


def test_without_a_comparison_the_time_of_day_tells_and_it_is_said() -> None:
    files = [
        file([row(WAITING, 5, 6)], realtime=1000 * MS),
        file([], rank=1, realtime=1000 * MS),
        file(
            [row(WAITING, 2005, 2007)], rank=2, clock="b", host="b", monotonic=2000 * MS, realtime=1003 * MS
        ),
    ]
    job = job_of(files)
    assert [one.alignment.uncertainty for one in job.processes] == [0, 0, None]
    assert [(event.begin, event.end) for event in job.processes[0].events] == [(0, MS)]
    assert [(event.begin, event.end) for event in job.processes[2].events] == [(3 * MS, 5 * MS)]
    assert job.notes == ["no clock was compared with that of worker 2: by the time of day of its host"]


def test_a_host_whose_clock_began_later_has_times_before_zero() -> None:
    there = file([row(WAITING, 1, 2)], clock="b", scheduler=[sample(0, -1000, 0.1)])
    job = job_of([file([row(WAITING, 0, 1)], role="scheduler"), there])
    assert [process.events[0].begin for process in job.processes] == [999 * MS, 0]


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1))
def test_an_offset_is_right_within_its_uncertainty(trips: list[tuple[int, int, int]]) -> None:
    clock, offset = SchedulerClock(), 123_456_789
    for sent, there, back in sorted(trips):
        clock.add(sent, sent + there + offset, sent + there + back)
    for one in clock.samples:
        assert abs(one.offset - offset) <= one.uncertainty + 1


def test_the_shortest_round_trip_counts_and_a_late_one_too() -> None:
    clock = SchedulerClock()
    for sent, trip in ((0, 400), (1000, 200), (2000, 900)):
        clock.add(sent, sent + 7000 + trip // 2, sent + trip)
    assert clock.samples == [ClockSample(1200, 7000, 100)]
    hour = 3600 * 10**9
    clock.add(hour, hour + 9000 + 500, hour + 1000)  # clocks may have drifted apart since
    assert clock.samples == [ClockSample(1200, 7000, 100), ClockSample(hour + 1000, 9000, 500)]
    clock.add(hour, hour, hour - 1)
    assert len(clock.samples) == 2


def test_clocks_of_this_machine() -> None:
    assert name_of_clock() == name_of_clock() != ""
    monotonic, real = both_clocks()
    assert abs((time.time_ns() - real) - (time.monotonic_ns() - monotonic)) < 10**9
