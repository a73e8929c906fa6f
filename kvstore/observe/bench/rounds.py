"""Turns: in each round every way of every peer has one, and all other processes sleep meanwhile."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .link import Message

_TURN = 0.1  # seconds that a turn should take, as far as one call does not take longer
_MOST = 400  # calls in a turn
_CLOSE = 1.5  # a way that takes so many times as long as the best of its peer is not measured further
_SLOWER = 20.0  # a turn may take so many times as long as expected, beyond what any answer may take


class Asked(Protocol):
    """Workers that answer together."""

    def ask(self, message: Message, patience: float) -> list[Message]:
        """Send all workers the same message, and wait for their answers."""


@dataclass
class Way:
    """One way in which a peer sums all keys.

    Attributes
    ----------
    peer, name : str
        Of the peer, and of the way; the latter is empty where there is only one.
    group : Asked
        The workers of the peer.
    order : str
        What they know the way by.
    calls : int
        Calls in a turn.
    seconds : list of float
        One for each round: the median of its calls, each of which took as long as its slowest worker.
    """

    peer: str
    name: str
    group: Asked
    order: str
    calls: int = 1
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.seconds)

    def turn(self, patience: float) -> float:
        """Have its workers do their calls; return the median of these."""
        answers = self.group.ask({"do": "run", "way": self.order, "calls": self.calls}, patience)
        calls = zip(*(answer["seconds"] for answer in answers), strict=True)
        return float(statistics.median(max(times) for times in calls))


def measure(ways: Sequence[Way], rounds: int, patience: float, advance: Callable[[int], object]) -> list[Way]:
    """Measure, and return the best way of each peer.

    Parameters
    ----------
    ways : sequence of Way
        All, in the order of the table.
    rounds : int
        Turns of each.
    patience : float
        Seconds that workers have for any answer, beside the time of the calls.
    advance : callable
        Called with the number of turns that are done, or need not be done.
    """
    first = {id(way): _first(way, patience, advance) for way in ways}
    kept = [
        way
        for way in ways
        if first[id(way)] <= _CLOSE * min(first[id(o)] for o in ways if o.peer == way.peer)
    ]
    advance(rounds * (len(ways) - len(kept)))
    for number in range(rounds):
        start = number % len(kept)
        for way in kept[start:] + kept[:start]:
            way.seconds.append(way.turn(patience + _SLOWER * (way.calls + 1) * first[id(way)]))
            advance(1)
    return list(_best(kept))


def _first(way: Way, patience: float, advance: Callable[[int], object]) -> float:
    """Find out how many calls make a turn; return the seconds of one."""
    seconds = way.turn(patience)
    way.calls = max(1, min(_MOST, round(_TURN / max(seconds, 1e-9))))
    advance(1)
    return seconds


def _best(ways: Sequence[Way]) -> Iterator[Way]:
    for peer in dict.fromkeys(way.peer for way in ways):
        yield min((way for way in ways if way.peer == peer), key=lambda way: way.median)
