"""Meetings of a worker; the test plays the other workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvstore as kv
from kvstore.collective.meeting import ALL_REDUCE, MeetingMessage, SideKeys, WorkerMeetings
from kvstore.engine import AsyncEngine

Array = Any


class Others:
    """Workers that answer as worker 0 does, but for those that are `absent`, of which some are `expected`."""

    def __init__(self, size: int) -> None:
        self.size, self.absent, self.expected = size, set[int](), set[int]()
        self.asked: list[int] = []
        self.meetings = WorkerMeetings(
            SideKeys(
                0, size, True, AsyncEngine(9), lambda *_: None, self.pushpull, lambda *_: None, self.expects
            )  # type: ignore[arg-type, return-value]
        )

    def pushpull(self, key: str, mine: Array, out: Array) -> None:
        slot = self.meetings.slot // 4
        for rank in range(self.size):
            out[rank * slot : (rank + 1) * slot] = 0 if rank in self.absent else mine[:slot]

    def expects(self, rank: int) -> bool:
        self.asked.append(rank)
        return rank in self.expected


def test_a_worker_that_takes_no_part_any_more_is_asked_for_once() -> None:
    others = Others(4)
    said, content = MeetingMessage(ALL_REDUCE, b"x", 8), [np.ones(1)]
    assert others.meetings.exchange_messages(said, content).said == [said] * 4
    others.absent = {1, 3}
    for _ in range(3):
        heard = others.meetings.exchange_messages(said, content)
        assert heard.said == [said, None, said, None]
        assert heard.present == [0, 2]
        assert bytes(heard.content(2)) == np.ones(1).tobytes()
    assert others.asked == [1, 3]


def test_a_missing_and_expected_worker_is_an_error() -> None:
    others = Others(3)
    others.absent = others.expected = {2}
    for _ in range(2):
        with pytest.raises(
            kv.KVStoreError, match="the message of worker 2 was lost with the memory of a restarted server"
        ):
            others.meetings.exchange_messages(MeetingMessage(ALL_REDUCE, b"x", 0))
    others.absent = set()
    assert others.meetings.exchange_messages(MeetingMessage(ALL_REDUCE, b"x", 0)).present == [0, 1, 2]


@pytest.mark.parametrize("size", [2, 3, 8, 16, 64])
def test_slots_hold_some_numbers(size: int) -> None:
    meetings = Others(size).meetings
    assert meetings.fits_slot(MeetingMessage(ALL_REDUCE, b"x" * 96, 128))
    assert meetings.slot % 8 == 0
    assert not meetings.fits_slot(MeetingMessage(ALL_REDUCE, b"", 1024))
