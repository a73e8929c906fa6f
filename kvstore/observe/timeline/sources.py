"""The stores of a process, or its server, in a timeline."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from ..processes import role_of

_T = TypeVar("_T")


class StoreRecord(NamedTuple):
    """The description of one store in a timeline."""

    number: int  # of its counters in the process: `Event.store`
    type: str  # of the store; "server" or "scheduler" for those processes
    job: str  # can be empty
    rank: int
    size: int
    slices: dict[int, str]  # the name of the key of each slice

    @property
    def role(self) -> str:
        """The role of the process that has the store."""
        return role_of(self.type)


class Sources:
    """Stores that are open, and the records of those that are closed."""

    def __init__(self) -> None:
        self._open: weakref.WeakKeyDictionary[Any, Callable[[Any], StoreRecord]] = weakref.WeakKeyDictionary()
        self._records: dict[int, StoreRecord] = {}

    def add(self, source: _T, describe: Callable[[_T], StoreRecord]) -> None:
        """Describe a store as long as it exists."""
        self._open[source] = describe
        self._look(source, describe)

    def close(self, source: Any) -> None:
        """Keep the record of a store that is about to be closed."""
        describe = self._open.pop(source, None)
        if describe is not None:
            self._look(source, describe)

    @property
    def is_empty(self) -> bool:
        """Whether no store is open."""
        return not self._open

    def records(self) -> list[StoreRecord]:
        """Return the records of all stores, also of closed ones."""
        for source, describe in list(self._open.items()):
            self._look(source, describe)
        return [self._records[number] for number in sorted(self._records)]

    def _look(self, source: Any, describe: Callable[[Any], StoreRecord]) -> None:
        for _ in range(3):
            with suppress(Exception):  # another thread may add a key at the same time
                record = describe(source)
                self._records[record.number] = record
                return
