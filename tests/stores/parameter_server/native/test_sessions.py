"""Sessions: each request is taken once, in any order, and the numbers of C are those of Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore.stores.parameter_server.native as native
from kvstore.stores.parameter_server.native._native import Effects, Session
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.protocol.messages import SPAN, PayloadLocation, Record, RecordKind
from kvstore.stores.parameter_server.server.slice_rounds import OPEN, SliceActivity

SOURCES = "".join(path.read_text() for path in sorted(Path(native.__file__).parent.glob("*.h")))


def session(low: int = 0, above: tuple[int, ...] = ()) -> Session:
    made = Session(0, 0, 1)
    made.restore(low, above)
    return made


@given(st.lists(st.integers(1, 40), max_size=200))
def test_each_number_is_taken_once(numbers: list[int]) -> None:
    worker = session()
    taken = []
    for number in numbers:
        if not worker.has_come(number):
            assert worker.take(number)
            taken.append(number)
    assert sorted(taken) == sorted(set(numbers))
    assert {one for one in range(1, 41) if worker.has_come(one)} == set(numbers)


@given(st.permutations(range(1, 60)))
def test_no_number_is_kept_when_the_gaps_are_filled(numbers: list[int]) -> None:
    worker = session()
    for number in numbers:
        worker.take(number)
    assert (worker.low, worker.above) == (59, [])


@pytest.mark.parametrize("low", [0, 1, SPAN - 1, SPAN, 5 * SPAN + 7])
def test_a_number_too_far_ahead_is_not_taken(low: int) -> None:
    worker = session(low)
    assert not worker.take(low + SPAN + 1)
    assert worker.take(low + SPAN)
    assert worker.above == [low + SPAN]
    assert worker.take(low + 1)
    assert worker.take(low + SPAN + 1)
    assert not worker.has_come(low + 2)


@given(
    st.sets(st.integers(1, 30)),
    st.sets(st.integers(1, 30)),
    st.integers(1, 40),
    st.sampled_from([0, SPAN - 10, 3 * SPAN - 15]),
)
def test_what_was_answered_elsewhere_counts_as_come(
    come: set[int], unanswered: set[int], end: int, low: int
) -> None:
    worker = session(low, tuple(low + one for one in come))
    left = {one for one in unanswered if one < end}
    for _ in range(2):
        worker.resume(low + end, [low + one for one in left])
        known = {one for one in range(1, 60) if worker.has_come(low + one)}
        assert known == come | set(range(1, end)) - left
        assert worker.has_come(low)
    for one in sorted(left - come):
        worker.take(low + one)
    assert worker.low >= low + end - 1
    assert worker.above == [low + one for one in sorted(come) if low + one > worker.low]


def test_of_what_was_answered_elsewhere_only_the_window_is_kept() -> None:
    worker = session(0, (1, 7, SPAN))
    worker.resume(2**63 - 1, [2 * SPAN])
    assert worker.low == 2 * SPAN - 1
    assert worker.above == list(range(2 * SPAN + 1, 3 * SPAN))
    worker.resume(1, ())
    assert worker.low == 2 * SPAN - 1
    worker.resume(2**63 - 1, [0])
    assert (worker.low, worker.above) == (3 * SPAN - 1, [])


@given(
    st.sets(st.integers(1, 30)), st.sets(st.integers(1, 30)), st.sampled_from([0, SPAN - 10, 3 * SPAN - 15])
)
def test_answered_are_exactly_those_that_do_not_wait(come: set[int], waiting: set[int], low: int) -> None:
    worker = session(low)
    for number in come:
        worker.take(low + number)
    for number in waiting & come:
        worker.wait(low + number)
    again = session(*worker.answered())  # type: ignore[arg-type]
    assert {one for one in range(1, 31) if again.has_come(low + one)} == come - waiting


def test_an_answer_ends_a_wait_and_nothing_else() -> None:
    worker, effects = session(), Effects()
    for number in (1, 2):
        worker.wait(number)
    effects.answer(worker, RecordKind.DONE, Record(RecordKind.PUSH, 7, 1), 3)
    assert [worker.waits(number) for number in (1, 2)] == [False, True]
    (reply,) = effects.replies()
    assert [(kind, record.slice, record.sequence, round) for kind, record, round, _ in reply.answers] == [
        (RecordKind.DONE, 7, 1, 3)
    ]
    assert effects.replies() == []


def test_a_process_that_is_gone_gets_no_message() -> None:
    worker, effects = session(), Effects()
    worker.gone = True
    effects.answer(worker, RecordKind.DONE, Record(RecordKind.PUSH, 7, 1), 3)
    assert effects.replies() == []


def test_a_session_lives_until_it_is_answered() -> None:
    effects = Effects()
    worker = session()
    worker.peer = "here"
    effects.answer(
        worker, RecordKind.FAILED, Record(RecordKind.PULL, 7, 1), 3, m.Failure("KVStoreError", "why")
    )
    del worker
    (reply,) = effects.replies()
    assert reply.peer == "here"
    assert reply.answers[0][3] == m.Failure("KVStoreError", "why")


@pytest.mark.parametrize(
    "record",
    [
        (),
        ("push",),
        Record(RecordKind.PUSH, -1, 1),
        Record(RecordKind.PUSH, 2**32, 1),
        Record(RecordKind.PUSH, 0, 2**64),
    ],
)
def test_what_is_not_a_record_changes_nothing(record: Record) -> None:
    effects = Effects()
    with pytest.raises((TypeError, OverflowError)):
        effects.answer(session(), RecordKind.DONE, record, 0)
    assert effects.replies() == []


def number_of(name: str) -> int:
    """Value of a name in an enum of the headers; C counts on from the one before."""
    enums = [re.sub(r"/\*.*?\*/", "", one) for one in re.findall(r"enum[^{]*\{([^}]*)\}", SOURCES)]
    listed = next(one for one in enums if re.search(rf"(^|,)\s*{name}\s*(=|,|$)", one))
    value = -1
    for entry in listed.split(","):
        left, _, right = entry.partition("=")
        value = int(right) if right.strip() else value + 1
        if left.strip() == name:
            return value
    raise AssertionError(name)


def test_numbers_of_c_are_those_of_the_protocol() -> None:
    kinds = {name: RecordKind[name] for name in RecordKind.__members__ if f"KP_{name}" in SOURCES}
    assert len(kinds) > 10
    for name, kind in kinds.items():
        assert number_of(f"KP_{name}") == kind
    assert number_of("KP_FRAME") == PayloadLocation.FRAME
    assert number_of("KP_PROBE") == m.PROBE
    assert number_of("KP_SPAN") == SPAN
    assert number_of("KP_OPEN_ROUNDS") == OPEN
    assert number_of("KP_ROUND") == SliceActivity.ROUND
