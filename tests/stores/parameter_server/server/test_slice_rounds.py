"""Rounds of one slice that wait: for which workers, and the cost of this check."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.stores.parameter_server.protocol.messages import PayloadLocation, Record, RecordKind
from kvstore.stores.parameter_server.server.slice_rounds import SliceRounds


class Ranks(frozenset[int]):
    """Ranks that rounds wait for; counts the iterations over them."""

    looked = 0

    def __iter__(self) -> Iterator[int]:
        self.looked += 1
        return super().__iter__()


def push(rounds: SliceRounds, rank: int, number: int = 1) -> None:
    record = Record(RecordKind.PUSH, 0, number, number, place=PayloadLocation.FRAME, nbytes=4)
    assert rounds.put(number, rank, record, (b"1234",))


def test_a_round_is_due_when_all_parts_are_there_and_not_looked_through_before() -> None:
    rounds, needed = SliceRounds(0, 0), Ranks(range(100))
    for rank in range(99):
        assert rounds.due(needed) is None
        push(rounds, rank)
    assert needed.looked == 0
    assert rounds.missing(1, needed) == [99]
    push(rounds, 99)
    job = rounds.due(needed)
    assert job is not None
    assert [rank for rank, _, _ in job.parts] == list(range(100))


def test_parts_of_others_complete_no_round() -> None:
    rounds = SliceRounds(0, 0)
    for rank in (5, 6, 7):
        push(rounds, rank)
    assert rounds.due(frozenset({1, 5})) is None
    push(rounds, 1)
    job = rounds.due(frozenset({1, 5}))
    assert job is not None
    assert [rank for rank, _, _ in job.parts] == [1, 5, 6, 7]


def test_no_worker_is_waited_for() -> None:
    rounds = SliceRounds(0, 0)
    assert rounds.due(frozenset()) is None
    push(rounds, 3)
    assert rounds.due(frozenset()) is not None


def test_rounds_that_were_lost_are_passed_over() -> None:
    rounds, needed = SliceRounds(0, 0), frozenset({1, 2})
    for rank in needed:
        rounds.pass_over(rank, 3)
    job = rounds.due(needed)
    assert job is not None
    assert (job.round, job.parts, rounds.round) == (3, [], 2)  # one for all three
    rounds.complete()
    assert rounds.due(needed) is None
    push(rounds, 1, 4)
    assert rounds.due(needed) is None
    push(rounds, 2, 4)
    job = rounds.due(needed)
    assert job is not None
    assert job.round == 4
