"""Lines of the log about who takes part in a store: each change once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping


class MembershipLog:
    """Compares what is known of stores with what was told.

    Parameters
    ----------
    log : logging.Logger
    loss : int
        Level of the lines about losses; all others are of level INFO.
    """

    def __init__(self, log: logging.Logger, loss: int = logging.INFO) -> None:
        self._log, self._loss = log, loss
        self._epochs: dict[int, int] = {}
        self._lost: dict[int, set[str]] = {}
        self._members: dict[int, dict[str, int]] = {}

    def saw(self, store: int, epoch: int, members: Mapping[str, int], lost: Iterable[str]) -> None:
        """Tell what is new in an epoch of a store; an old one has nothing new.

        `members` are workers and servers that are there, each with a number that is another after a restart.
        """
        if epoch <= self._epochs.get(store, 0):
            return
        self._epochs[store] = epoch
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
        names = ", ".join(sorted(members)) or "nobody"
        self._log.info("store %d is in epoch %d, with %s", store, epoch, names)
