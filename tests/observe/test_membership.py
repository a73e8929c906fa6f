"""Losses and returns of processes are reported and counted once, however many stores they were in."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvstore.observe.events import BACK
from kvstore.observe.membership import MembershipLog

ALL = {"worker 0": 10, "worker 1": 11, "server 2": 12}


class Counted:
    """In the place of the counters."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def lose(self, whom: int) -> None:
        self.seen.append(("lost", whom))

    def instant(self, kind: int, whom: int) -> None:
        assert kind == BACK
        self.seen.append(("back", whom))


@pytest.fixture
def counted() -> Any:
    return Counted()


@pytest.fixture
def members(counted: Any) -> MembershipLog:
    made = MembershipLog(logging.getLogger("kvstore.ps"))
    made.counters = counted
    made.saw(0, 1, ALL, [])
    made.saw(1, 1, ALL, [])
    return made


def test_a_loss_is_counted_once(members: MembershipLog, counted: Any) -> None:
    left = {name: number for name, number in ALL.items() if name != "worker 1"}
    members.saw(0, 2, left, ["worker 1"])
    members.saw(0, 3, left, ["worker 1"])
    members.saw(0, 2, left, [])  # an old one
    members.saw(1, 2, left, ["worker 1"])
    assert counted.seen == [("lost", 1)]
    members.saw(1, 3, left, ["worker 1", "server 2"])
    assert counted.seen[1:] == [("lost", -3)]


def test_a_return_is_recorded_once(members: MembershipLog, counted: Any) -> None:
    members.saw(0, 2, {**ALL, "server 2": 99}, [])
    members.saw(1, 2, {**ALL, "server 2": 99}, [])
    assert counted.seen == [("back", -3)]
    for store in (0, 1):
        members.saw(store, 3, {"worker 0": 10}, ["worker 1"])
    for store in (0, 1):
        members.saw(store, 4, {"worker 0": 10, "worker 1": 50}, [])
    assert counted.seen[1:] == [("lost", 1), ("back", 1)]


def test_nothing_is_counted_without_counters() -> None:
    members = MembershipLog(logging.getLogger("kvstore.ps"))
    members.saw(0, 1, ALL, [])
    members.saw(0, 2, {}, ALL)
