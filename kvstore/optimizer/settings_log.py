"""The settings of a store's optimizer: the changes of all workers in one order, and the resulting settings.

A change has the place in the program at which its worker has made it: the number of earlier calls in which
all workers take part. Changes are ordered by place, at one place by the optimizer that they belong to, then
by rank. So the settings of a place result from all changes up to it, and do not depend on the timing of
workers.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import ConfigError
from .descriptions import changed_text

#: Kinds of changes: another optimizer, or None; settings of the optimizer; its update counts; states are kept
#: for one more round.
OPTIMIZER, NONE, CONFIGURE, COUNTS, STEPS = "optimizer", "none", "configure", "counts", "steps"
#: Kinds of changes that begin with fresh states and counts.
NEW = (OPTIMIZER, NONE)


class SettingsAt(NamedTuple):
    """The settings at a place of the program."""

    #: Number of optimizers that were set, including the present one; None counts.
    ordinal: int = 0
    #: The optimizer in the form of `descriptions.text_of`; empty without an optimizer.
    text: str = ""
    #: Number of the change that has set the update counts; see `UpdateClock`.
    epoch: int = 0
    #: Whether states are kept for one more round, so that a step can be withdrawn.
    keeps_states: bool = False


@dataclass(slots=True, eq=False)
class SettingsChange:
    """One change of a worker; workers that make the same change at the same place share it."""

    kind: str
    place: int
    #: Number of optimizers that its worker had set; including this change, if it sets one.
    ordinal: int
    #: The text of an optimizer, or of changed settings; see `descriptions.changes_of`.
    text: str
    rank: int
    #: The number of the change among those of its worker.
    number: int
    #: How often its worker had made the same change at this place before.
    times: int = 0
    epoch: int = 0
    #: The settings after this change, and before the next.
    settings: SettingsAt = field(default_factory=SettingsAt)

    def key(self) -> tuple[int, int, bool, int, int]:
        """Return the sort key in the order of all changes."""
        return self.place, self.ordinal, self.kind not in NEW, self.rank, self.number

    def is_like(self, kind: str, ordinal: int, text: str) -> bool:
        """Return whether this change is the same as that of another worker."""
        return (self.kind, self.ordinal, self.text) == (kind, ordinal, text)


class SettingsLog:
    """All valid changes, in order.

    Attributes
    ----------
    changes : list of Change
    first : SettingsAt
        The settings before all changes.
    """

    def __init__(self) -> None:
        self.changes: list[SettingsChange] = []
        self.first = SettingsAt()
        self._numbers = self._epochs = 0
        #: By rank: the place of its last changes, and how often the worker has made each of them there.
        self._made: dict[int, tuple[int, dict[tuple[str, int, str], int]]] = {}

    @property
    def newest(self) -> SettingsAt:
        """Return the settings after all changes."""
        return self.changes[-1].settings if self.changes else self.first

    def find(self, rank: int, place: int, kind: str, ordinal: int, text: str) -> SettingsChange | None:
        """Return the equal change of another worker at this place, or None."""
        times = self._count_of(rank, place, (kind, ordinal, text))
        begin = bisect.bisect_left(self.changes, place, key=_change_place)
        end = bisect.bisect_right(self.changes, place, key=_change_place)
        there = (one for one in self.changes[begin:end] if one.is_like(kind, ordinal, text))
        return next((one for one in there if one.times == times), None)

    def share(self, change: SettingsChange, rank: int) -> list[SettingsChange]:
        """Let a worker share a change. The shared change has the later of its two places in the order.

        Returns the changes with different resulting settings.
        """
        self._note_change(rank, change)
        self._numbers += 1
        if rank <= change.rank:
            return []
        before, key, held = list(self.changes), (change.rank, change.number), self.settings_at(change.place)
        begin = self.changes.index(change)
        del self.changes[begin]
        change.rank, change.number = rank, self._numbers
        bisect.insort(self.changes, change, key=SettingsChange.key)
        try:
            told = self._recompute_from(begin)
        except ConfigError:
            self.changes, (change.rank, change.number) = before, key
            self._recompute_from(begin)
            return []
        return told if self.settings_at(change.place) == held else [change, *told]

    def add(
        self, rank: int, place: int, kind: str, ordinal: int, text: str
    ) -> tuple[SettingsChange, list[SettingsChange]]:
        """Add a change; return it, and the changes with different resulting settings.

        Raises
        ------
        ConfigError
            The change sets the learning rate, and a schedule is set; or it sets a schedule, and another
            worker has set the learning rate at a later place. Nothing has changed.
        """
        self._numbers += 1
        times = self._count_of(rank, place, (kind, ordinal, text))
        change = SettingsChange(kind, place, ordinal, text, rank, self._numbers, times)
        if kind in NEW or kind == COUNTS:
            self._epochs += 1
            change.epoch = self._epochs
        told = self._insert_change(change)
        self._note_change(rank, change)
        return change, told

    def withdraw(
        self, change: SettingsChange
    ) -> tuple[list[SettingsChange], dict[SettingsChange, ConfigError]]:
        """Remove a change, and those that are invalid without it.

        Returns the changes with different resulting settings, and the other removed changes, each with the
        reason.
        """
        at = self.changes.index(change)
        del self.changes[at]
        dropped: dict[SettingsChange, ConfigError] = {}
        told = self._recompute_from(at, dropped)
        self.changes = [one for one in self.changes if one not in dropped]
        return told, dropped

    def settings_at(self, place: int) -> SettingsAt:
        """Return the settings at a place of the program, after all changes there."""
        at = bisect.bisect_right(self.changes, place, key=_change_place)
        return self.changes[at - 1].settings if at else self.first

    def settings_for(self, change: SettingsChange) -> SettingsAt:
        """Return the settings of the optimizer that a change belongs to, at the place of the change."""
        after = (change.place, change.ordinal + 1)
        at = bisect.bisect_left(self.changes, after, key=_place_and_ordinal)
        return self.changes[at - 1].settings if at else self.first

    def forget(self, rank: int) -> None:
        """Remove the record of a worker's last changes."""
        self._made.pop(rank, None)

    def place_of(self, rank: int) -> int:
        """Return the place of a worker's last change; -1 if it has made none."""
        made = self._made.get(rank)
        return -1 if made is None else made[0]

    def drop_old(self, keep: int, passed: int) -> list[SettingsChange]:
        """Drop old changes; return them, oldest first.

        Parameters
        ----------
        keep : int
            Least number of changes that are kept.
        passed : int
            Changes at this place and at later places are kept.
        """
        end = min(len(self.changes) - keep, bisect.bisect_left(self.changes, passed, key=_change_place))
        if 0 < end < len(self.changes):  # either all changes of a place are kept, or none
            end = bisect.bisect_left(self.changes, self.changes[end].place, key=_change_place)
        if end <= 0:
            return []
        dropped = self.changes[:end]
        self.first = dropped[-1].settings
        del self.changes[:end]
        return dropped

    def _count_of(self, rank: int, place: int, what: tuple[str, int, str]) -> int:
        """Return how often a worker has made a change at a place."""
        last, made = self._made.get(rank, (-1, {}))
        return made.get(what, 0) if last == place else 0

    def _note_change(self, rank: int, change: SettingsChange) -> None:
        place, made = self._made.get(rank, (-1, {}))
        if place != change.place:
            made = {}
        what = change.kind, change.ordinal, change.text
        made[what] = made.get(what, 0) + 1
        self._made[rank] = change.place, made

    def _insert_change(self, change: SettingsChange) -> list[SettingsChange]:
        at = bisect.bisect_left(self.changes, change.key(), key=SettingsChange.key)
        self.changes.insert(at, change)
        try:
            return self._recompute_from(at)
        except ConfigError:
            del self.changes[at]
            self._recompute_from(at)
            raise

    def _recompute_from(
        self, begin: int, dropped: dict[SettingsChange, ConfigError] | None = None
    ) -> list[SettingsChange]:
        """Compute the settings from a change on; return the changes with different resulting settings.

        An invalid change is skipped, and added to `dropped` with its error; if `dropped` is None, the error
        is raised.
        """
        settings = self.changes[begin - 1].settings if begin else self.first
        told: list[SettingsChange] = []
        for change in self.changes[begin:]:
            try:
                settings = _settings_after(settings, change)
            except ConfigError as error:
                if dropped is None:
                    raise
                dropped[change] = error
                continue
            if settings != change.settings:
                change.settings = settings
                told.append(change)
        return told


def _change_place(change: SettingsChange) -> int:
    return change.place


def _place_and_ordinal(change: SettingsChange) -> tuple[int, int]:
    return change.place, change.ordinal


def _settings_after(before: SettingsAt, change: SettingsChange) -> SettingsAt:
    """Return the settings after a change; a change that belongs to an earlier optimizer has no effect."""
    if change.kind == STEPS:
        return before._replace(keeps_states=True)
    if change.kind in NEW:
        if change.ordinal <= before.ordinal:
            return before
        return before._replace(ordinal=change.ordinal, text=change.text, epoch=change.epoch)
    if change.ordinal != before.ordinal or not before.text:
        return before
    if change.kind == COUNTS:
        return before._replace(epoch=change.epoch)
    return before._replace(text=changed_text(before.text, change.text))
