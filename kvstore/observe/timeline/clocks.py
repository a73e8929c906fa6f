"""Which clock the events of a process are in, and how far it is from the scheduler's."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..native._observe import now

#: How much two clocks may drift apart, in parts of the time since they were compared.
_DRIFT = 20e-6


class ClockSample(NamedTuple):
    """One comparison with the scheduler's clock: all in ns.

    Attributes
    ----------
    at : int
        When it was, by the clock of this process.
    offset : int
        What is added to a time of this process to have one of the scheduler.
    uncertainty : int
        The offset is right within so much: half of the round trip.
    """

    at: int
    offset: int
    uncertainty: int


class SchedulerClock:
    """Compares the clock of this process with the scheduler's, by round trips; the shortest counts.

    Two samples are kept: the best of the first second, and the best one since, where a newer one counts
    as better by as much as clocks may have drifted apart meanwhile.
    """

    _FIRST = 1_000_000_000

    def __init__(self) -> None:
        self._first: ClockSample | None = None
        self._last: ClockSample | None = None

    @property
    def samples(self) -> list[ClockSample]:
        """What there is, the oldest first."""
        found = [one for one in (self._first, self._last) if one is not None]
        return found[:1] if found[1:] == found[:1] else found

    def add(self, sent: int, theirs: int, received: int) -> None:
        """Take in a round trip: times of our clock, and the one that the scheduler had between them."""
        half = (received - sent + 1) // 2
        if half < 0:
            return
        new = ClockSample(received, theirs - (received - half), half)
        if self._first is None or (
            received - self._first.at < self._FIRST and half < self._first.uncertainty
        ):
            self._first = new
        if self._last is None or half <= self._last.uncertainty + _DRIFT * (received - self._last.at):
            self._last = new


def name_of_clock() -> str:
    """Name the monotonic clock of this process: the same text in all processes that have the same clock.

    It is that of the running system, and of the time namespace. Empty where the system does not say.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = ""
        with suppress(OSError):  # Linux before 5.6 has none
            namespace = os.readlink("/proc/self/ns/time")
        return f"{boot} {namespace}".strip()
    return ""


def both_clocks() -> tuple[int, int]:
    """Return the monotonic and the real time of one moment, in ns: of several tries the quickest."""
    import time

    tries = []
    for _ in range(5):
        before = now()
        real = time.time_ns()
        after = now()
        tries.append((after - before, (before + after) // 2, real))
    return min(tries)[1:]
