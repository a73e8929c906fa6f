"""Turns of workers that are told how long they take: their order, their lengths, what counts."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.observe.bench.rounds import Way, measure


class Workers:
    """Workers that answer with given seconds, and note what they were asked."""

    def __init__(self, asked: list[str], **seconds: list[float]) -> None:
        self.asked, self.seconds = asked, seconds

    def ask(self, message: dict[str, Any], patience: float) -> list[dict[str, Any]]:
        assert patience >= 5
        assert message["do"] == "run"
        self.asked.append(message["way"])
        return [{"seconds": [one] * message["calls"]} for one in self.seconds[message["way"]]]


def ways(asked: list[str], **seconds: list[float]) -> list[Way]:
    """`a_x` is the way `x` of peer `a`."""
    workers = Workers(asked, **seconds)
    return [Way(*name.partition("_")[::2], workers, name) for name in seconds]


def run(found: list[Way], rounds: int) -> tuple[dict[str, Way], int]:
    done: list[int] = []
    best = measure(found, rounds, 5.0, done.append)
    return {way.peer: way for way in best}, sum(done)


def test_the_slowest_worker_is_the_time_of_a_call() -> None:
    best, done = run(ways([], a_=[0.1, 0.3, 0.2]), 4)
    assert best["a"].seconds == [0.3] * 4
    assert done == 5


def test_peers_take_turns_and_another_one_begins_each_round() -> None:
    asked: list[str] = []
    run(ways(asked, a_=[1.0], b_=[1.0], c_=[1.0]), 3)
    assert "".join(name[0] for name in asked[3:]) == "abcbcacab"


def test_the_best_way_of_a_peer_counts() -> None:
    best, _ = run(ways([], a_x=[0.12], a_y=[0.10], b_=[0.5]), 2)
    assert (best["a"].name, best["a"].median, best["b"].median) == ("y", 0.10, 0.5)


def test_a_way_that_is_much_slower_is_not_measured_further() -> None:
    asked: list[str] = []
    best, done = run(ways(asked, a_x=[0.10], a_y=[0.30], b_=[3.0]), 5)
    assert (asked.count("a_x"), asked.count("a_y"), asked.count("b_")) == (6, 1, 6)
    assert done == 3 * 6
    assert set(best) == {"a", "b"}


@pytest.mark.parametrize(("seconds", "calls"), [(1e-6, 400), (0.01, 10), (0.05, 2), (3.0, 1)])
def test_quick_calls_are_repeated(seconds: float, calls: int) -> None:
    best, _ = run(ways([], a_=[seconds]), 1)
    assert best["a"].calls == calls
