"""The workers that the rounds of a server wait for: those that are reported, and those that are not."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from kvstore.observe.stragglers import LatePart, StragglerLog, straggler

MS = 1_000_000


def late(
    rank: int, waits: int, ms: int, *, first: int = 0, rounds: int = 1, slice_: int = 7
) -> list[LatePart]:
    """Have rounds wait for a worker, so many times and so long each."""
    begins = [first * MS + at * 2 * ms * MS for at in range(waits)]
    return [LatePart(rank, begin, begin + ms * MS, rounds, ms * MS, slice_) for begin in begins]


@pytest.mark.parametrize(
    ("found", "rank"),
    [
        ([], None),
        (late(1, 20, 99), None),  # less than 2 of 10 s
        (late(1, 20, 100), 1),
        (late(1, 1, 3000), 1),  # one round, but a long one
        (late(1, 40, 60) * 3, 1),
        (late(1, 33, 60) * 3, None),  # the same time counts once
        (late(1, 40, 60) + late(0, 10, 60), 1),
        (late(1, 40, 60) + late(0, 40, 60, first=60), None),  # they take turns
        (late(1, 40, 60) + late(0, 20, 60, first=60) + late(2, 20, 60, first=60), None),
    ],
)
def test_the_worker_for_which_the_others_wait(found: list[LatePart], rank: int | None) -> None:
    assert straggler(found, 10.0) == rank


class Rounds:
    """In the place of a server."""

    def __init__(self, *answers: tuple[int, Sequence[LatePart]]) -> None:
        self.answers = list(answers)

    def take(self) -> tuple[int, Sequence[LatePart]]:
        return self.answers.pop(0)


def test_a_line_sums_up_a_period(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvstore.ps")
    first = late(2, 100, 38, rounds=2) + late(2, 18, 61, first=9000, slice_=8) + late(1, 2, 50, first=20000)
    rounds = Rounds((240, first), (300, []), (9, late(2, 3, 1500, slice_=1 << 32 | 5)))
    told = StragglerLog(logging.getLogger("kvstore.ps"), rounds.take, lambda: {7: "w", 8: "w3"}, 100.0)
    for now in (100.1, 109.9, 110.0, 115.0, 120.0, 121.0):
        told.look(now)
    told.look(123.4, at_end=True)
    assert [record.getMessage() for record in caplog.records] == [
        "worker 2 came last by more than 10 ms in 218 of 240 rounds of the last 10.0 s: by 38 ms in the "
        "median, 61 ms at most (key 'w3'); the others waited 4.9 s for it",
        "worker 2 came last by more than 10 ms in 3 of 9 rounds of the last 3.4 s: by 1.5 s in the "
        "median, 1.5 s at most (slice 5); the others waited 4.5 s for it",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}
