"""The clock of the events of a process, and its offset to the scheduler's."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..native._observe import now

#: How much two clocks may drift apart, in parts of the time since they were compared.
_DRIFT = 20e-6


class ClockSample(NamedTuple):
    """One comparison with the scheduler's clock, in ns."""

    at: int  # by the clock of this process
    offset: int  # scheduler's clock minus the clock of this process
    uncertainty: int  # of the offset: half of the round trip


class SchedulerClock:
    """Compares the clock of this process with the scheduler's, by the shortest round trips.

    It keeps two samples: the best of the first second, and the best one since then. A newer sample is better
    by the drift of the clocks that is possible since the older one.
    """

    _FIRST = 1_000_000_000

    def __init__(self) -> None:
        self._first: ClockSample | None = None
        self._last: ClockSample | None = None

    @property
    def samples(self) -> list[ClockSample]:
        """The samples, the oldest first."""
        found = [one for one in (self._first, self._last) if one is not None]
        return found[:1] if found[1:] == found[:1] else found

    def add(self, sent: int, theirs: int, received: int) -> None:
        """Add a round trip: two times of our clock, and the time of the scheduler's between them."""
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
    """Name the monotonic clock of this process by the boot of the system and the time namespace.

    Processes with the same clock return the same name; it is empty if the system does not give it.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = ""
        with suppress(OSError):  # Linux before 5.6 has none
            namespace = os.readlink("/proc/self/ns/time")
        return f"{boot} {namespace}".strip()
    return ""


def both_clocks() -> tuple[int, int]:
    """Return the monotonic and the real time of one moment, in ns, by the shortest of several tries."""
    tries = []
    for _ in range(5):
        before = now()
        real = time.time_ns()
        after = now()
        tries.append((after - before, (before + after) // 2, real))
    return min(tries)[1:]
