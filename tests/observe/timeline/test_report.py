"""The report shows the shares of the time, and the workers that the others wait for."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observation.made import MS, Row, file, row, store

from kvstore.observe.counters import CALLS, MOVING, SUMMING, WAITING
from kvstore.observe.events import ARRIVED, BUCKET, CALL, KINDS, NO_SLICE, NOBODY, STEP
from kvstore.observe.timeline.job import text
from kvstore.observe.timeline.job.model import job_of
from kvstore.observe.timeline.job.report import job_report, worker_steps
from kvstore.observe.timeline.job.spans import SHARES, time_shares
from kvstore.observe.timeline.threads import ENGINE

PUSH, PULL, PUSHPULL = (CALLS.index(name) for name in ("push", "pull", "pushpull"))
WAIT = len(CALLS)


def steps(count: int, waiting: float, whom: int, **about: object) -> list[Row]:
    """Steps of 10 ms: 2 in the store besides the wait, the rest outside."""
    rows = []
    for at in range(count):
        begin, end = 10.0 * at + 8 - waiting, 10.0 * at + 10
        rows += [
            row(CALL, begin, end, slice=PUSHPULL, round=1, **about),
            row(MOVING, begin, begin + 0.5, slice=0, round=at, nbytes=100, **about),
            row(WAITING, begin + 0.5, begin + 0.5 + waiting, slice=0, round=at, whom=whom, **about),
            row(SUMMING, begin + 0.5 + waiting, end - 0.5, slice=0, round=at, **about),
        ]
    return rows


def test_shares_of_a_worker() -> None:
    found = job_report(job_of([file(steps(11, 3, 1))]))["workers"][0]
    assert (found["steps"], found["source"]) == (10, "pushpull of w")
    assert found["step"] == pytest.approx(0.01) and found["usual"] == 10
    wanted = {"computing": 0.5, "waiting": 0.3, "moving": 0.05, "summing": 0.1, "calls": 0.05}
    assert found["shares"] == pytest.approx(dict.fromkeys(SHARES, 0.0) | wanted)


def test_steps_that_wait_for_something_unusual_are_told_and_not_in_the_shares() -> None:
    late = [row(*one[:1], one[1] + 500, one[2] + 500, **one[3]) for one in steps(6, 3, 1)]
    made = job_report(job_of([file([*steps(6, 3, 1), *late])]))
    (found,) = made["workers"]
    assert (found["steps"], found["usual"], found["step"]) == (11, 10, pytest.approx(0.01))
    assert found["longest"] == (pytest.approx(0.05), pytest.approx(0.45))
    wanted = {"computing": 0.5, "waiting": 0.3, "moving": 0.05, "summing": 0.1, "calls": 0.05}
    assert found["shares"] == pytest.approx(dict.fromkeys(SHARES, 0.0) | wanted)
    told = (
        "Not in the shares: 1 steps of worker 0 of more than three times the median; the longest took 450 ms"
    )
    assert any(line.startswith(told) for line in text.report_lines(made))


def test_marks_of_a_trainer_count_before_calls() -> None:
    rows = [row(STEP, 20.0 * at + 15, 20.0 * at + 20) for at in range(5)]
    found = job_report(job_of([file([*steps(10, 3, 1), *rows])]))["workers"][0]
    assert (found["steps"], found["step"]) == (4, pytest.approx(0.02))
    assert found["source"] == "steps of the trainer or hook"


def test_one_call_makes_no_step() -> None:
    found = job_report(job_of([file(steps(1, 3, 1))]))
    assert found["workers"] == []
    assert found["notes"] == ["worker 0 has too few events to find its steps"]
    assert job_report(job_of([file([])]))["workers"] == []


def test_the_key_that_is_called_most_makes_the_steps() -> None:
    rows = [row(CALL, at, at + 1, slice=PULL, round=2) for at in range(0, 100, 25)]
    rows += [row(CALL, at + 3, at + 4, slice=PUSH, round=1) for at in range(0, 100, 5)]
    rows += [row(CALL, at, at + 1, slice=WAIT) for at in range(50)]
    found = worker_steps(job_of([file(rows)]).processes[0])
    assert found is not None and found.source == "push of w" and found.median == pytest.approx(5 * MS)


def test_what_the_store_does_in_the_background_counts_while_a_step_waits_for_it() -> None:
    rows = [
        row(STEP, 0, 1), row(CALL, 2, 2.5, slice=PUSHPULL), row(STEP, 10, 20),
        row(CALL, 2.5, 18, slice=PUSHPULL, thread=7),
        row(WAITING, 4, 12, thread=7), row(MOVING, 12, 17, thread=7),
    ]  # fmt: skip
    process = job_of([file(rows, threads={100: "MainThread", 7: ENGINE})]).processes[0]
    found = time_shares(process, [(1 * MS, 20 * MS)])
    assert {name: ns / MS for name, ns in found.items() if ns} == {
        "computing": 8.5, "waiting": 2, "moving": 5, "calls": 3.5,
    }  # fmt: skip


_EVENT = st.tuples(
    st.integers(0, len(KINDS) - 1), st.integers(0, 300), st.integers(0, 300), st.sampled_from([100, 101, 7]),
    st.integers(-2, 3), st.integers(0, 3),
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(_EVENT, max_size=30), st.integers(0, 300), st.integers(1, 300))
def test_shares_add_up_whatever_the_events_are(
    events: list[tuple[int, ...]], begin: int, length: int
) -> None:
    rows = [
        row(kind, min(a, b), max(a, b), thread=thread, whom=whom, slice=slice)
        for kind, a, b, thread, whom, slice in events
    ]
    one = file(rows, threads={100: "MainThread", 7: ENGINE})
    found = time_shares(job_of([one]).processes[0], [(begin * MS, (begin + length) * MS)])
    assert sum(found.values()) == length * MS
    assert min(found.values()) >= 0
    made = job_report(job_of([one, file(rows, rank=1)]))
    assert all(sum(worker["shares"].values()) == pytest.approx(1) for worker in made["workers"])
    json.dumps(made)
    list(text.report_lines(made))


def test_servers_see_the_last_worker_and_its_delay() -> None:
    rows = []
    for round in range(10):
        late, lead = (1, 3) if round < 8 else (0, 2)
        rows += [
            row(ARRIVED, 10.0 * round, 10.0 * round, slice=0, round=round, whom=2),
            row(ARRIVED, 10.0 * round + 1, 10.0 * round + 1, slice=0, round=round, whom=1 - late),
            row(ARRIVED, 10.0 * round + 1 + lead, 10.0 * round + 1 + lead, slice=0, round=round, whom=late),
            row(ARRIVED, 10.0 * round + 9, 10.0 * round + 9, slice=0, round=round, whom=2),  # again
        ]
    rows.append(row(ARRIVED, 200, 200, slice=0, round=99, whom=2))
    found = job_report(job_of([file([]), file(rows, role="server")]))["last"]
    assert [(one["rank"], one["rounds"], one["of"]) for one in found] == [(1, 8, 10), (0, 2, 10)]
    assert [one["lead"] for one in found] == [pytest.approx(0.003), pytest.approx(0.002)]


def test_workers_of_a_shared_store_say_themselves_when_they_arrive() -> None:
    """One of them has another store besides it, and numbers its stores differently."""
    files = []
    for rank in range(3):
        nth = int(rank == 1)
        times = [10 * at + 3 * rank for at in range(5)]
        rows = [row(ARRIVED, at, at, round=at // 10, whom=NOBODY, store=nth) for at in times]
        stores = [store(rank, kind="local"), store(rank, number=1)] if nth else [store(rank)]
        files.append(file(rows, rank=rank, stores=stores))
    often = {"rounds": 5, "of": 5, "lead": pytest.approx(0.003)}
    assert job_report(job_of(files))["last"] == [{"rank": 2, **often}]
    assert job_report(job_of(files[:2]))["last"] == [{"rank": 1, **often}]


def test_communication_that_the_backward_pass_hides() -> None:
    rows = []
    for at in range(4):
        begin = 100.0 * at
        rows += [
            row(BUCKET, begin + 50, begin + 70),
            row(BUCKET, begin + 65, begin + 95),
            row(STEP, begin + 85, begin + 97),
        ]
    found = job_report(job_of([file(rows)]))["workers"][0]["overlap"]
    assert found == pytest.approx({"communication": 0.045, "exposed": 0.010})
    assert job_report(job_of([file(steps(5, 3, 1))]))["workers"][0]["overlap"] is None


def test_keys_that_cost_most() -> None:
    rows = [
        row(MOVING, 0, 5, slice=1, nbytes=10), row(WAITING, 5, 6, slice=0),
        row(MOVING, 6, 8, slice=0, nbytes=1), row(MOVING, 8, 9, slice=77),
    ]  # fmt: skip
    found = job_report(job_of([file(rows), file(rows, rank=1)]))["keys"]
    assert [(one["key"], one["nbytes"]) for one in found] == [("b", 20), ("w", 2), ("slice 77", 0)]
    assert [one["seconds"] for one in found] == [
        pytest.approx(0.01),
        pytest.approx(0.006),
        pytest.approx(0.002),
    ]
    assert found[1]["phases"]["moving"] == pytest.approx(0.004)


def test_parts_of_a_key_count_as_the_key() -> None:
    slices = {0: "w (part 1 of 2)", 1: "w (part 2 of 2)", 2: "w (part 1)"}
    one = file(
        [row(MOVING, at, at + 1, slice=at) for at in range(3)], stores=[store()._replace(slices=slices)]
    )
    assert {found["key"]: found["seconds"] for found in job_report(job_of([one]))["keys"]} == {
        "w": pytest.approx(0.002), "w (part 1)": pytest.approx(0.001),
    }  # fmt: skip


def test_what_is_about_all_parts_of_a_key_counts_as_the_key_of_the_call() -> None:
    slices = {0: "w (part 1 of 2)", 1: "w (part 2 of 2)", 2: "b"}
    rows = [
        row(CALL, 0, 9, slice=PUSH, round=1), row(MOVING, 1, 4, slice=NO_SLICE, nbytes=10),
        row(WAITING, 4, 5, slice=1),
        row(CALL, 10, 19, slice=PUSH, round=2), row(MOVING, 11, 13, slice=NO_SLICE, nbytes=5),
        row(MOVING, 30, 31, slice=NO_SLICE), row(MOVING, 2, 8, slice=NO_SLICE, thread=101, nbytes=1),
    ]  # fmt: skip
    one = file(rows, stores=[store()._replace(slices=slices)], labels=["w", "w and 1 more"])
    keys = job_report(job_of([one]))["keys"]
    assert {found["key"]: (found["seconds"], found["nbytes"]) for found in keys} == {
        "w": (pytest.approx(0.004), 10), "(several keys)": (pytest.approx(0.009), 6),
    }  # fmt: skip


def test_the_report_as_text() -> None:
    rows = [row(ARRIVED, at, at, slice=0, round=at // 10, whom=at % 10 // 5) for at in range(0, 100, 5)]
    rows += [row(SUMMING, at + 6, at + 8, slice=0, round=at) for at in range(0, 100, 10)]
    files = [file(steps(11, 3, 1)), file(steps(11, 0, 0), rank=1), file(rows, role="server")]
    assert (
        "\n".join(text.report_lines(job_report(job_of(files, ["something"]))))
        == """\
0.1 s are recorded; clocks agree within 0 us
note: something

          steps   step  computing  waiting  moving  summing  updating  converting  calls
worker 0     10  10 ms      50.0%    30.0%    5.0%    10.0%      0.0%        0.0%   5.0%
worker 1     10  10 ms      80.0%     0.0%    5.0%    10.0%      0.0%        0.0%   5.0%
Steps are counted by: pushpull of w.

Worker 1 came last in 10 of 10 rounds of keys or parts of keys, 5 ms (median) after the one before it.

          waiting  moving  summing  updating  converting
server 0     0.0%    0.0%    21.7%      0.0%        0.0%

Keys that cost most in these steps, in all workers together:
key    all  waiting  moving  summing  updating  converting   bytes
w    60 ms    30 ms   10 ms    20 ms      0 us        0 us  2.2 KB"""
    )
