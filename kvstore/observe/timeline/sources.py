"""What events of a process come from: its stores, or its server."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

_T = TypeVar("_T")

WORKER = "worker"


class StoreRecord(NamedTuple):
    """What a timeline has to know of one store.

    Attributes
    ----------
    number : int
        The number of its counters in the process: `Event.store`.
    type : str
        ``"server"`` and ``"scheduler"`` beside the types of stores.
    job : str
        Names the job, or is empty.
    rank, size : int
        Of the process in this store.
    slices : dict
        Name of the key of each slice.
    """

    number: int
    type: str
    job: str
    rank: int
    size: int
    slices: dict[int, str]

    @property
    def role(self) -> str:
        """What the process is that has it."""
        return self.type if self.type in ("server", "scheduler") else WORKER


class Sources:
    """Stores that are open, and what was known of those that are gone."""

    def __init__(self) -> None:
        self._open: weakref.WeakKeyDictionary[Any, Callable[[Any], StoreRecord]] = weakref.WeakKeyDictionary()
        self._records: dict[int, StoreRecord] = {}

    def add(self, source: _T, describe: Callable[[_T], StoreRecord]) -> None:
        """Follow a store as long as it is there."""
        self._open[source] = describe
        self._look(source, describe)

    def close(self, source: Any) -> None:
        """Keep what is known of a store, which is about to be closed."""
        describe = self._open.pop(source, None)
        if describe is not None:
            self._look(source, describe)

    @property
    def is_empty(self) -> bool:
        """Whether no store is open."""
        return not self._open

    def records(self) -> list[StoreRecord]:
        """Describe all stores that there have been."""
        for source, describe in list(self._open.items()):
            self._look(source, describe)
        return [self._records[number] for number in sorted(self._records)]

    def _look(self, source: Any, describe: Callable[[Any], StoreRecord]) -> None:
        for _ in range(3):
            with suppress(Exception):  # another thread may just add a key
                record = describe(source)
                self._records[record.number] = record
                return


def chief(records: list[StoreRecord]) -> StoreRecord | None:
    """Return the store by which a process is named: the one with the most members, of these the first."""
    return max(records, key=lambda record: record.size, default=None)
