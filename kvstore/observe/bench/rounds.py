"""Turns: in each round every way to do the work has one turn, while the processes of the others wait."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Item = TypeVar("Item")
Kind = TypeVar("Kind", bound="PeerWay")


@dataclass
class PeerWay:
    """One way in which a peer does the work; the quickest way of a peer counts.

    `run` makes a number of calls and returns the seconds of each. `calls` is the number in a turn, `first`
    the seconds of a call before the first round. `seconds` has the median of the calls of each round.
    """

    peer: str
    name: str
    run: Callable[[int], list[float]]
    calls: int = 1
    first: float = 0.0
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.seconds)

    def try_out(self, turn: float, least: int, most: int) -> None:
        """Time `least` calls, and choose how many fill a turn of `turn` seconds, `most` at most."""
        self.first = statistics.median(self.run(least))
        self.calls = int(min(max(turn / max(self.first, 1e-9), least), most))

    def measure_turn(self, warm: int = 0) -> list[float]:
        """Note the median of a turn, and return its times; `warm` calls before it are not timed."""
        times = self.run(warm + self.calls)[warm:]
        self.seconds.append(statistics.median(times))
        return times


def close_ways(ways: Sequence[Kind], slower: float, most: int | None = None) -> list[Kind]:
    """Return the ways that are at most `slower` times the quickest of their peer, and `most` of each."""
    kept: list[Kind] = []
    for peer in dict.fromkeys(way.peer for way in ways):
        quickest, *others = sorted((way for way in ways if way.peer == peer), key=lambda way: way.first)
        kept += [quickest, *(way for way in others if way.first <= slower * quickest.first)][:most]
    return kept


def in_turn(things: Sequence[Item], number: int) -> list[Item]:
    """Return the order of a round: each round begins with the next thing."""
    start = number % len(things)
    return [*things[start:], *things[:start]]


def best_ways(ways: Sequence[Kind]) -> list[Kind]:
    """Return the quickest way of each peer over all rounds, in the order of the peers."""
    peers = dict.fromkeys(way.peer for way in ways)
    return [min((way for way in ways if way.peer == peer), key=lambda way: way.median) for peer in peers]


def round_ratios(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the ratios of the times of a peer to those of another one, round by round."""
    return [a / b for a, b in zip(times, base, strict=True)]
