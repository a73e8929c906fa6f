"""Turns of ways whose times are given: their order, their lengths, the counted turns."""

from __future__ import annotations

import pytest

from kvstore.observe.bench.command import measure_in_turn
from kvstore.observe.bench.rounds import PeerWay, best_ways, close_ways, in_turn, round_ratios


def ways(asked: list[str], **seconds: float) -> list[PeerWay]:
    """`a_x` is the way `x` of peer `a`."""

    def way(name: str, each: float) -> PeerWay:
        def run(calls: int) -> list[float]:
            asked.append(name)
            return [each] * calls

        peer, _, of = name.partition("_")
        return PeerWay(peer, of, run)

    return [way(name, each) for name, each in seconds.items()]


def run(found: list[PeerWay], rounds: int) -> dict[str, PeerWay]:
    return {way.peer: way for way in measure_in_turn(found, rounds)}


def test_peers_take_turns_and_another_one_begins_each_round() -> None:
    asked: list[str] = []
    run(ways(asked, a_=1.0, b_=1.0, c_=1.0), 3)
    assert "".join(name[0] for name in asked[3:]) == "abcbcacab"


def test_the_best_way_of_a_peer_counts() -> None:
    found = run(ways([], a_x=0.12, a_y=0.10, b_=0.5), 2)
    assert (found["a"].name, found["a"].median, found["b"].median) == ("y", 0.10, 0.5)


def test_a_way_that_is_much_slower_is_not_measured_further() -> None:
    asked: list[str] = []
    found = run(ways(asked, a_x=0.10, a_y=0.30, b_=3.0), 5)
    assert (asked.count("a_x"), asked.count("a_y"), asked.count("b_")) == (6, 1, 6)
    assert set(found) == {"a", "b"}


@pytest.mark.parametrize(("seconds", "calls"), [(1e-6, 400), (0.01, 10), (0.05, 2), (3.0, 1)])
def test_quick_calls_are_repeated(seconds: float, calls: int) -> None:
    assert run(ways([], a_=seconds), 1)["a"].calls == calls


def test_calls_that_only_warm_the_caches_do_not_count() -> None:
    way = PeerWay("a", "", lambda calls: [9.0] * 2 + [1.0, 2.0, 3.0][: calls - 2], calls=3)
    assert way.measure_turn(warm=2) == [1.0, 2.0, 3.0]
    assert way.median == 2.0


def test_of_each_peer_only_so_many_ways_are_kept() -> None:
    found = ways([], a_x=1.2, a_y=1.0, a_z=1.1, b_x=2.0, b_y=9.0)
    for way in found:
        way.try_out(1.0, 1, 10)
    kept = [f"{way.peer}{way.name}" for way in close_ways(found, 1.5, 2)]
    assert kept == ["ay", "az", "bx"]
    assert len(close_ways(found, 1.5)) == 4


def test_the_best_ways_are_in_the_order_of_the_peers() -> None:
    found = ways([], b_x=2.0, a_x=1.0, b_y=1.5)
    for way in found:
        way.measure_turn()
    assert [(way.peer, way.name) for way in best_ways(found)] == [("b", "y"), ("a", "x")]


def test_ratios_are_taken_round_by_round() -> None:
    assert round_ratios([3.0, 8.0], [1.0, 2.0]) == [3.0, 4.0]
    with pytest.raises(ValueError, match="zip"):
        round_ratios([1.0], [1.0, 2.0])
    assert [in_turn("abc", number) for number in (1, 3)] == [["b", "c", "a"], ["a", "b", "c"]]
