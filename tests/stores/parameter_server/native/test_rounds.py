"""Slices in C: parts in rank order, waiting workers, and the requests that are left to Python."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.observe.stragglers import LatePart
from kvstore.stores.parameter_server.native._native import (
    Effects,
    Members,
    Session,
    SliceState,
    applied_usual,
    take_usual,
)
from kvstore.stores.parameter_server.protocol.messages import (
    PROBE,
    Batch,
    PayloadLocation,
    Record,
    RecordKind,
)
from kvstore.stores.parameter_server.server.slice_rounds import SliceActivity

K = RecordKind
ROUND = SliceActivity.ROUND


class Server:
    """One slice, its workers, and the results of their requests."""

    def __init__(self, workers: int = 2) -> None:
        self.slice = SliceState(0, 5)
        self.slice.defined = self.slice.ready = True
        self.sessions = [Session(0, rank, 100 + rank) for rank in range(workers)]
        self.effects, self.members = Effects(), Members()
        self.members.set(range(workers), True)

    def ask(self, rank: int, kind: RecordKind, round_: int = 0, **more: Any) -> list[Record]:
        """Send one request; return the requests that are left to Python."""
        place = PayloadLocation.FRAME if kind in (K.PUSH, K.PUSHPULL) else PayloadLocation.NONE
        record = Record(kind, **{"slice": 5, "sequence": self.sessions[rank].low + 1, **more})
        record = record._replace(round=round_, place=place, nbytes=4 * (place == PayloadLocation.FRAME))
        batch = Batch(0, rank, 100 + rank, 1, [record], (f"{rank}:{round_}",))
        return take_usual(self.effects, self.members, self.sessions[rank], {5: self.slice}, batch)

    def told(self) -> list[tuple[int, RecordKind, int]]:
        """Rank, kind and round of all answers."""
        return [
            (reply.batch.rank, kind, round_)
            for reply in self.effects.replies()
            for kind, _, round_, _ in reply.answers
        ]

    def jobs(self) -> list[Any]:
        return [job for apply in self.effects.rounds() for job in apply.jobs]


@given(st.permutations(range(5)))
def test_parts_are_in_rank_order(order: list[int]) -> None:
    server = Server(5)
    for rank in order:
        assert server.jobs() == []
        assert server.ask(rank, K.PUSHPULL, 1, version=rank, clock=10 - rank) == []
    (job,) = server.jobs()
    assert (job.slice, job.round, job.version, job.clock) == (5, 1, 4, 10)
    assert [(rank, frames) for rank, _, frames in job.parts] == [(rank, (f"{rank}:1",)) for rank in range(5)]
    assert applied_usual(server.effects, server.members, server.slice)
    assert sorted(server.told()) == [(rank, K.VALUE, 1) for rank in range(5)]


def test_a_round_that_is_complete_already_begins_with_the_end_of_the_one_before() -> None:
    server = Server()
    for rank in range(2):
        for round_ in (1, 2):
            assert server.ask(rank, K.PUSH, round_) == []
    assert [job.round for job in server.jobs()] == [1]
    assert applied_usual(server.effects, server.members, server.slice)
    assert [job.round for job in server.jobs()] == [2]


def test_a_pull_waits_for_its_round() -> None:
    server = Server()
    assert server.ask(0, K.PULL) == []
    assert server.told() == [(0, K.VALUE, 0)]
    assert server.ask(0, K.PULL, 1) == []
    assert server.told() == []
    assert server.sessions[0].waits(2)


def test_a_worker_that_has_been_answered_waits_no_more() -> None:
    server = Server()
    assert server.ask(0, K.PULL, 1) == []
    for round_ in (1, 2):
        for rank in range(2):
            assert server.ask(rank, K.PUSH, round_) == []
        assert len(server.jobs()) == 1
        server.told()
        assert applied_usual(server.effects, server.members, server.slice)
        assert server.told() == ([(0, K.VALUE, 1)] if round_ == 1 else [])


@pytest.mark.parametrize(
    "change",
    [
        lambda server: setattr(server.slice, "ready", False),
        lambda server: setattr(server.slice, "special", True),
        lambda server: setattr(server.slice, "round", 1),
        lambda server: server.members.set([0, 1], False),
        lambda server: server.slice.wait_to_push(server.sessions[1], Record(K.PUSH, 5, 9, 4)),
        lambda server: server.slice.put(1, 0, Record(K.PUSH, 5, 9, 1), ()),
        lambda server: setattr(server.slice, "busy", ROUND),
    ],
    ids=["no-value", "special", "old-round", "loss", "waiting-push", "is-in-it", "being-summed"],
)
def test_what_needs_more_is_left_to_python_and_changes_nothing(change: Any) -> None:
    server = Server()
    change(server)
    before = server.slice.parts(1)
    (record,) = server.ask(0, K.PUSH, 1)
    assert record.kind == K.PUSH
    assert server.slice.parts(1) == before
    assert (server.told(), server.jobs(), server.sessions[0].low) == ([], [], 0)


@pytest.mark.parametrize(
    ("kind", "round_", "more"),
    [
        (K.INIT, 0, {}),
        (K.PULL_ROWS, 0, {}),
        (K.PUSH, 0, {}),
        (K.PUSH, 3, {}),
        (K.PUSH, 1, {"flags": PROBE}),
        (K.PUSH, 1, {"sequence": 2}),
        (K.PULL, 0, {"sequence": 2}),
        (K.PULL, 0, {"slice": 6}),
    ],
)
def test_other_requests_are_left_to_python(kind: RecordKind, round_: int, more: dict[str, int]) -> None:
    server = Server()
    assert len(server.ask(0, kind, round_, **more)) == 1
    assert (server.told(), server.jobs(), server.sessions[0].low) == ([], [], 0)


def test_all_behind_a_request_that_is_left_to_python_are_left_too() -> None:
    server = Server()
    records = [Record(K.PULL, 5, 1), Record(K.FETCH_STATE, 5, 2), Record(K.PULL, 5, 3)]
    batch = Batch(0, 0, 100, 1, records)
    left = take_usual(server.effects, server.members, server.sessions[0], {5: server.slice}, batch)
    assert left == records[1:]
    assert server.told() == [(0, K.VALUE, 0)]


def test_a_worker_that_leaves_waits_no_more() -> None:
    server = Server()
    for rank in range(2):
        server.slice.wait_for_value(server.sessions[rank], Record(K.PULL, 5, 1, 4), ())
        server.slice.wait_to_push(server.sessions[rank], Record(K.PUSH, 5, 2, 4))
    server.slice.leave(server.sessions[0])
    assert [one[0] for one in server.slice.take_value_waiters()] == [server.sessions[1]]
    assert [one[0] for one in server.slice.take_push_waiters()] == [server.sessions[1]]
    assert server.slice.take_value_waiters() == []


class Frame:
    """The payload of a message; it can be watched."""


def test_frames_are_released_with_the_round() -> None:
    server = Server()
    frame = Frame()
    watched = weakref.ref(frame)
    frames = (frame,)
    server.slice.put(1, 0, Record(K.PUSH, 5, 1, 1), frames)
    server.slice.wait_for_value(server.sessions[0], Record(K.PULL_ROWS, 5, 2, 1), frames)
    del frame, frames
    server.slice.complete()
    gc.collect()
    assert watched() is not None
    server.slice.take_value_waiters()
    assert watched() is None


def test_a_slice_releases_what_it_has() -> None:
    frame = Frame()
    watched = weakref.ref(frame)
    slice_ = SliceState(0, 5)
    slice_.put(1, 0, Record(K.PUSH, 5, 1, 1), (frame,))
    del frame, slice_
    assert watched() is None


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=12), st.sets(st.integers(0, 3)))
def test_parts_of_some_ranks_are_dropped(put: list[tuple[int, int]], ranks: set[int]) -> None:
    slice_ = SliceState(0, 5)
    kept: dict[int, set[int]] = {}
    for round_, rank in put:
        new = slice_.put(round_, rank, Record(K.PUSH, 5, 1, round_), ())
        assert new == (rank not in kept.setdefault(round_, set()))
        kept[round_].add(rank)
    assert slice_.open_rounds() == sorted(kept)
    for round_ in kept:
        slice_.drop_parts(round_, ranks)
    left = {round_: sorted(there - ranks) for round_, there in kept.items() if there - ranks}
    assert {round_: slice_.ranks(round_) for round_ in slice_.open_rounds()} == left


LATE = 0.015  # seconds; from 10 ms on a round is late


def test_the_last_worker_of_a_round_and_its_delay() -> None:
    server = Server(3)
    server.effects.watch_arrivals()
    for round_ in (1, 2):  # in the first one all begin
        for rank in (0, 2, 1):
            time.sleep(LATE if rank == 1 else 0)
            assert server.ask(rank, K.PUSH, round_) == []
        assert len(server.jobs()) == 1
        assert applied_usual(server.effects, server.members, server.slice)
    rounds, (found,) = server.effects.take_late()
    late = LatePart(*found)
    assert (rounds, late.rank, late.rounds, late.slice) == (1, 1, 1, 5)
    assert late.longest == late.end - late.begin >= LATE * 1e9
    assert server.effects.take_late() == (0, [])


def test_late_rounds_that_overlap_are_one_also_of_slices_that_python_handles() -> None:
    effects = Effects()
    effects.watch_arrivals()
    slices = [SliceState(1, number) for number in range(3)]
    for rank in range(2):
        time.sleep(LATE)
        for slice_ in slices:
            slice_.round = 1
            record = Record(K.PUSH, slice_.id, 1, 2)
            assert slice_.put(2, rank, record, ())
            effects.note_arrival(slice_, rank, record)
    for slice_ in slices:
        effects.count_round(slice_)
        slice_.complete()
    rounds, (found,) = effects.take_late()
    late = LatePart(*found)
    assert (rounds, late.rank, late.rounds, late.slice >> 32) == (3, 1, 3, 1)
    assert late.end - late.begin >= late.longest >= LATE * 1e9


def test_late_rounds_without_end_take_no_more_memory() -> None:
    effects = Effects()
    effects.watch_arrivals()
    rounds = [SliceState(0, number) for number in range(2000)]
    for rank in (0, 1):
        for slice_ in rounds:
            slice_.round = 1
            last = (slice_.id + rank) % 2  # each worker for every other slice, so that none is the same time
            slice_.put(2, last, Record(K.PUSH, slice_.id, 1, 2), ())
            effects.note_arrival(slice_, last, Record(K.PUSH, slice_.id, 1, 2))
        time.sleep(LATE)
    for slice_ in rounds:
        effects.count_round(slice_)
    complete, late = effects.take_late()
    assert complete == 2000
    assert len(late) == 1024


def test_nothing_is_noted_without_a_request() -> None:
    server = Server()
    for round_ in (1, 2):
        for rank in range(2):
            time.sleep(LATE)
            server.ask(rank, K.PUSH, round_)
        assert applied_usual(server.effects, server.members, server.slice)
    assert server.effects.take_late() == (0, [])
