"""The parts of a history: calls with their times and outcomes, and the faults of processes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import NamedTuple

Key = Hashable
ABANDONED = "Abandoned"  # the error of a call that its caller did not wait for any more


class Push(NamedTuple):
    """The n-th push of a process into a key."""

    slot: int
    number: int


#: The pushes in a value, each as often as the value has it. None: no set of pushes gives this value.
Contents = tuple[Push, ...] | None


class Read(NamedTuple):
    """One key as it was read: from which cell on it has which contents. More than one piece: it is torn."""

    pieces: tuple[tuple[int, Contents], ...]

    def at(self, cell: int) -> Contents:
        """Contents of a cell."""
        return [contents for start, contents in self.pieces if start <= cell][-1]


class Event(NamedTuple):
    """One call of a process.

    A step is one call, `step`, from the end of its block on; `begin` is a step whose block ended with an
    error.
    """

    slot: int  # rank + workers * incarnation; a thread of `local` has one of its own
    verb: str
    keys: tuple[Key, ...] = ()
    called: float = 0.0
    returned: float = math.inf  # never
    error: str = ""  # class of the exception
    text: str = ""
    pushed: Mapping[Key, int] = {}  # number of the push into each key
    read: Mapping[Key, Read] = {}
    bad: frozenset[tuple[Key, int]] = frozenset()  # cells that were pushed so that the update must fail

    @property
    def good(self) -> bool:
        """Whether it has returned, and not by an error."""
        return self.returned < math.inf and not self.error


class Fault(NamedTuple):
    """A fault of a process: killed; stopped for so long that it is lost; or paused, for less."""

    kind: str  # killed, stopped, paused
    role: str = "worker"
    slot: int = 0
    start: float = 0.0
    end: float = math.inf


class History(NamedTuple):
    """All of a job that a checker needs."""

    events: tuple[Event, ...]
    workers: int
    kind: str = "sync"  # sync; async; local: as async, and a push has taken effect when it returns
    keeps: str = "all"  # pushes in a value: all, where an optimizer adds them up; last, where they replace it
    on_peer_loss: str = "raise"
    faults: tuple[Fault, ...] = ()
    #: (saved, crashed) of servers restarted from a snapshot: pushes acknowledged between the two are lost.
    forgotten: tuple[tuple[float, float], ...] = ()
    #: Rounds after which rejoined processes begin, by process, key and cell, where that is known.
    bases: Mapping[tuple[int, Key, int], int] = {}
    noticed: float = math.inf  # seconds after a death within which all servers know of it


class Violation(NamedTuple):
    """One broken promise."""

    kind: str
    text: str
