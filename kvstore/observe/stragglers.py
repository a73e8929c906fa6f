"""Lines of the log about a worker for which rounds wait: at most one in a period."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from .intervals import length, union

#: Seconds that a line sums up.
PERIOD = 10.0
#: Part of the period for which the other workers must have waited for one worker.
SHARE = 0.2


class LatePart(NamedTuple):
    """A time in which rounds waited for one worker alone, each for more than 10 ms."""

    rank: int
    begin: int  # ns of the monotonic clock: the arrival of the last part but one
    end: int  # the arrival of the last part
    rounds: int  # of keys, or of parts of keys
    longest: int  # ns of the longest wait
    slice: int  # the key, or part of a key, of that wait


class StragglerLog:
    """Writes a line about the worker for which the rounds of a server wait.

    Parameters
    ----------
    log : logging.Logger
    take : callable
        Returns how many rounds were complete since its last call, and the fields of each `LatePart`.
    names : callable
        Returns names of slices.
    now : float
    """

    def __init__(
        self,
        log: logging.Logger,
        take: Callable[[], tuple[int, Sequence[tuple[int, int, int, int, int, int]]]],
        names: Callable[[], Mapping[int, str]],
        now: float,
    ) -> None:
        self._log, self._take, self._names, self._since = log, take, names, now

    def look(self, now: float, at_end: bool = False) -> None:
        """Write a line if one is due: a period is over, or the job is at its end."""
        seconds = now - self._since
        if seconds < PERIOD and not at_end:
            return
        self._since = now
        rounds, found = self._take()
        late = [LatePart(*one) for one in found]
        rank = straggler(late, max(seconds, PERIOD))
        if rank is not None:
            mine = [one for one in late if one.rank == rank]
            self._log.info("%s", _line_text(mine, rounds, seconds, self._names()))


def straggler(late: Iterable[LatePart], seconds: float) -> int | None:
    """Return the worker for which rounds waited much of the time, and longer than for all other workers."""
    by_rank = defaultdict(list)
    for one in late:
        by_rank[one.rank].append(one)
    waited = {rank: _covered_ns(times) for rank, times in by_rank.items()}
    rank = max(waited, key=waited.__getitem__, default=-1)
    if rank < 0 or waited[rank] < SHARE * seconds * 1e9 or 2 * waited[rank] <= sum(waited.values()):
        return None
    return rank


def _line_text(late: Sequence[LatePart], rounds: int, seconds: float, names: Mapping[int, str]) -> str:
    """Describe how often, by how much and with which key one worker arrived last."""
    worst = max(late, key=lambda one: one.longest)
    name = names.get(worst.slice)
    where = f"slice {worst.slice & 0xFFFFFFFF}" if name is None else f"key {name!r}"
    often = f"{sum(one.rounds for one in late)} of {rounds} rounds of the last {seconds:.1f} s"
    usual = _length_text(median(one.longest for one in late))
    return (
        f"worker {worst.rank} came last by more than 10 ms in {often}: by {usual} in the median, "
        f"{_length_text(worst.longest)} at most ({where}); "
        f"the others waited {_length_text(_covered_ns(late))} for it"
    )


def _covered_ns(late: Iterable[LatePart]) -> int:
    """Return the ns of times that may overlap."""
    return length(union((one.begin, one.end) for one in late))


def _length_text(ns: float) -> str:
    return f"{ns * 1e-9:.1f} s" if ns >= 1e9 else f"{ns * 1e-6:.0f} ms"
