"""The process that has caused the end of a job, and not one that has only noticed that another had failed.

A process that fails notifies the others before it ends, and its end may need seconds (`atexit`, a framework
that ends its threads). Other processes may end sooner: a server without workers, a worker that raises
`PeerLostError`. The last lines of their stderr name the process that they miss. While that process is about
to end, no failure is reported.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvstore.settings.definitions import DEFAULTS
from kvstore.settings.environment import text_of

from .child_process import ProcessRole, SupervisedProcess

_MISSED = re.compile(
    rb"(?:PeerLost|KVStore)Error: (worker|server) ([0-9]+) "
    rb"(?:is lost: it has failed|of [0-9]+ (?:died|cannot take part))"
)
_ALL_MISSED = b"Error: all workers are lost"


P = TypeVar("P", bound=SupervisedProcess)


def has_failed_after(part: ProcessRole, tail: Sequence[bytes], other: ProcessRole) -> bool:
    """Return whether a process with these last lines has failed because `other` had failed."""
    if part.role != "worker":
        return other.role == "worker" and any(_ALL_MISSED in line for line in tail)
    named = [match.groups() for line in tail if (match := _MISSED.search(line))]
    return (other.role.encode(), b"%d" % other.rank) in named


def patience() -> float:
    """Return the seconds for which a process that is about to end is waited for: the timeout of a store."""
    try:
        return float(text_of("timeout"))
    except ValueError:
        return float(DEFAULTS["timeout"])


@dataclass
class _PendingFailure(Generic[P]):
    """A process that has failed, and the processes that it misses."""

    process: P
    missed: list[P]
    until: float

    @property
    def report_order(self) -> tuple[bool, bool, bool]:
        """Its place among failures at the same time: ends by a signal first, and servers before workers."""
        return bool(self.missed), (self.process.code or 0) >= 0, self.process.part.role == "worker"

    def is_waiting(self, now: float) -> bool:
        """Return whether a missed process is still about to end; a stopped process is not."""
        # Not `has_ended`, which polls: the failure of a process that ends only now is not added yet.
        about_to_end = any(process.code is None and not process.is_stopped() for process in self.missed)
        return about_to_end and now < self.until


class FailureCauses(Generic[P]):
    """Failures whose cause is not yet known."""

    def __init__(self) -> None:
        self._failures: list[_PendingFailure[P]] = []
        #: Whether servers have ended because no worker was left: a restarted worker would find no server.
        self.deserted = False

    @property
    def has_waiting(self) -> bool:
        """Whether there is such a failure."""
        return bool(self._failures)

    def add_failure(self, process: P, others: Iterable[P]) -> None:
        """Add a failure; one of `others` can be its cause."""
        missed = [other for other in others if has_failed_after(process.part, process.tail, other.part)]
        self.deserted = self.deserted or bool(missed and process.part.role != "worker")
        self._failures.append(_PendingFailure(process, missed, time.monotonic() + patience()))

    def pop_causes(self) -> list[P]:
        """Return the failures that miss no process that is about to end, the cause first, and remove them."""
        now = time.monotonic()
        ready = [failure for failure in self._failures if not failure.is_waiting(now)]
        ready.sort(key=lambda failure: failure.report_order)
        self._failures = [one for one in self._failures if one not in ready]
        return [one.process for one in ready]
