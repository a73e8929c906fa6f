"""The expected outcome of each program in each way: the single table for the tests and the page.

A program is right where its weights are those of one process within rounding and the same bits on all
workers. The table lists the programs that are not right, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

Way = Mapping[str, Any]


@dataclass(frozen=True)
class Right:
    """The weights are those of one process; `tolerance` is relative."""

    tolerance: float = 1e-4


@dataclass(frozen=True)
class Refused:
    """An error on each worker that has one of these words; "..." stands for any text."""

    words: tuple[str, ...]
    #: Whether workers that do not differ may end well, or without an error of the door.
    by_all: bool = True

    def __init__(self, *words: str, by_all: bool = True) -> None:
        object.__setattr__(self, "words", words)
        object.__setattr__(self, "by_all", by_all)


@dataclass(frozen=True)
class Warned:
    """The weights differ from those of one process, and a warning on each worker has these words."""

    words: str


@dataclass(frozen=True)
class Unnoticed:
    """Workers or weights differ from one process, and no error says so: the reason why none can."""

    why: str


@dataclass(frozen=True)
class Inapplicable:
    """The program cannot be written in this way."""

    why: str


Outcome = Right | Refused | Warned | Unnoticed | Inapplicable
RIGHT = Right()


@dataclass(frozen=True)
class Door:
    """The rows and columns of one front door."""

    title: str
    #: Module of the programs, for the workers, and the names of the modules that they import.
    module: str
    ways: Mapping[str, Way]
    #: Titles of columns, and the ways in each: by a pattern of their names.
    columns: Mapping[str, str]
    #: Headings, and the programs below each with a description.
    rows: Mapping[str, Mapping[str, str]]
    #: By program and pattern of ways, where not all is right.
    exceptions: Mapping[str, Mapping[str, Outcome]]

    def programs(self) -> dict[str, str]:
        """Return all programs, with their descriptions."""
        return {name: text for part in self.rows.values() for name, text in part.items()}

    def outcome(self, program: str, way: str) -> Outcome:
        """Return what the program must do; the first pattern counts."""
        for pattern, found in self.exceptions.get(program, {}).items():
            if any(fnmatch(way, one) for one in pattern.split()):
                return found
        return RIGHT

    def cells(self) -> Iterator[tuple[str, str]]:
        """Return each program in each way in which it can be written."""
        for way in self.ways:
            for program in self.programs():
                if not isinstance(self.outcome(program, way), Inapplicable):
                    yield way, program
