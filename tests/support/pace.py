"""How slow the machine is now: deadlines of tests are for an idle one, and follow it."""

from __future__ import annotations

import os
import time
from pathlib import Path

_USUAL = 4.0  # processes a core: the tests' own, which the deadlines for an idle machine allow for
_SHARED = 2.0  # the processes of a job share the processors that one process would have


def running() -> int:
    """How many threads of the machine compute now, or wait for a processor."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])


def slowness() -> float:
    """How many times longer things may take than on an idle machine: 1, or by how many want a processor.

    The mean of a minute and the current load count, because the load of other processes changes.
    """
    load = max(os.getloadavg()[0], running()) / len(os.sched_getaffinity(0))
    return _SHARED * load if load > _USUAL else 1.0


def seconds(idle: float) -> float:
    """Convert seconds of an idle machine to seconds of this one."""
    return idle * slowness()


def variable(idle: float) -> str:
    """Write the same for a variable of the environment."""
    return f"{seconds(idle):.3f}"


def deadline(idle: float) -> float:
    """Return when so many seconds of an idle machine are over, by `time.monotonic`."""
    return time.monotonic() + seconds(idle)
