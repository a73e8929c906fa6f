"""Who is to be held responsible for the end of a job: not whoever only noticed that another one had failed.

A process that fails tells the others before it ends, and its end may take seconds (`atexit`, a framework that
tears its threads down). Those that it leaves behind may be quicker: a server that has no workers any more, a
worker that raises `PeerLostError`. What they say last on stderr names whom they miss, and while that one is
still about to end nobody is held responsible.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvstore.settings.definitions import DEFAULTS
from kvstore.settings.environment import text_of

from .child_process import ProcessRole

_MISSED = re.compile(
    rb"(?:PeerLost|KVStore)Error: (worker|server) ([0-9]+) "
    rb"(?:is lost: it has failed|of [0-9]+ (?:died|cannot take part))"
)
_ALL_MISSED = b"Error: all workers are lost"


class Ending(Protocol):
    """A process, as far as its end goes."""

    @property
    def part(self) -> ProcessRole:
        """Say what it is in its job."""

    @property
    def code(self) -> int | None:
        """Exit code once its end was seen; negative for a signal."""

    @property
    def tail(self) -> Sequence[bytes]:
        """Its last words, once it has ended."""

    def stopped(self) -> bool:
        """Whether it is known to stand still, as after SIGSTOP."""


E = TypeVar("E", bound=Ending)


def misses(part: ProcessRole, tail: Sequence[bytes], other: ProcessRole) -> bool:
    """Whether the last words of a failed process say that it failed because `other` had."""
    if part.role != "worker":
        return other.role == "worker" and any(_ALL_MISSED in line for line in tail)
    named = [match.groups() for line in tail if (match := _MISSED.search(line))]
    return (other.role.encode(), b"%d" % other.rank) in named


def patience() -> float:
    """Seconds that a process which is about to end is waited for: as long as a store waits for anything."""
    try:
        return float(text_of("timeout"))
    except ValueError:
        return float(DEFAULTS["timeout"])


@dataclass
class _Failure(Generic[E]):
    """A process that has failed, and those that it misses."""

    process: E
    missed: list[E]
    until: float

    @property
    def place(self) -> tuple[bool, bool, bool]:
        """Order it among those that failed at the same time.

        One that a signal killed did not end because of the others, and a server not because of a worker.
        """
        return bool(self.missed), (self.process.code or 0) >= 0, self.process.part.role == "worker"

    def waits(self, now: float) -> bool:
        """Whether one that it misses is still about to end; what is stopped is not."""
        # Not `ended`, which looks: one whose end is seen only now has not been added yet.
        about = any(one.code is None and not one.stopped() for one in self.missed)
        return about and now < self.until


class Causes(Generic[E]):
    """Failed processes for which nobody was held responsible yet."""

    def __init__(self) -> None:
        self._held: list[_Failure[E]] = []
        #: Whether servers have left because there was no worker any more: a worker that is started again
        #: would find nobody.
        self.deserted = False

    @property
    def waiting(self) -> bool:
        """Whether a failure has still nobody held responsible."""
        return bool(self._held)

    def add(self, process: E, others: Iterable[E]) -> None:
        """Take in a failure; `others` are those on whom it can be laid."""
        missed = [one for one in others if misses(process.part, process.tail, one.part)]
        self.deserted = self.deserted or bool(missed and process.part.role != "worker")
        self._held.append(_Failure(process, missed, time.monotonic() + patience()))

    def take(self) -> list[E]:
        """Hand over those that need not wait for another one's end, the one responsible first."""
        now = time.monotonic()
        ready = sorted((one for one in self._held if not one.waits(now)), key=lambda one: one.place)
        self._held = [one for one in self._held if one not in ready]
        return [one.process for one in ready]
