"""Lines of the log about the members of a store: each change once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from .events import BACK
from .processes import number_of

if TYPE_CHECKING:
    from .native._observe import Counters


class MembershipLog:
    """Compares the members of stores with those of the last line.

    Parameters
    ----------
    log : logging.Logger
    loss : int
        Level of the lines about losses; other lines have level INFO.
    """

    def __init__(self, log: logging.Logger, loss: int = logging.INFO) -> None:
        self._log, self._loss = log, loss
        #: Counts losses, if it is set: each process once, even if it was in several stores.
        self.counters: Counters | None = None
        self._epochs: dict[int, int] = {}
        self._lost: dict[int, set[str]] = {}
        self._members: dict[int, dict[str, int]] = {}
        self._back: set[tuple[str, int]] = set()

    def saw(self, store: int, epoch: int, members: Mapping[str, int], lost: Iterable[str]) -> None:
        """Log the changes of a new epoch of a store; an older epoch has none.

        `members` are the present workers and servers, each with a number that changes with a restart.
        """
        if epoch <= self._epochs.get(store, 0):
            return
        self._epochs[store] = epoch
        everywhere = set().union(*self._lost.values())
        before, now = self._lost.get(store, set()), set(lost)
        self._lost[store] = now
        known = self._members.setdefault(store, {})
        back = [name for name, number in members.items() if known.get(name, number) != number]
        back += [name for name in before - now if name in members and name not in back]
        known |= members
        for name in sorted(now - before):
            self._log.log(self._loss, "%s is lost; epoch %d", name, epoch)
        for name in sorted(back):
            self._log.info("%s is back; epoch %d", name, epoch)
        self._count_changes(now - everywhere, {(name, members[name]) for name in back})
        names = ", ".join(sorted(members)) or "nobody"
        self._log.info("store %d is in epoch %d, with %s", store, epoch, names)

    def _count_changes(self, lost: Iterable[str], back: set[tuple[str, int]]) -> None:
        """Count losses and returns that were not counted for another store."""
        if self.counters is not None:
            for name in lost:
                self.counters.lose(number_of(name))
            for name, _ in back - self._back:
                self.counters.instant(BACK, number_of(name))
        self._back |= back
