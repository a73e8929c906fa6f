"""Calls with lists of small dense keys and plain arrays, without an object for each key."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...arrays.grouping import Key
from ..key_lists import KeyColumns, KeyLists
from .delivery import Finish
from .native import _shared as shm
from .optimizer import JobUpdater
from .pushing import RoundPusher
from .undelivered import UndeliveredResults
from .waiting import RoundWaiter

Handle = shm.Handle


class QuickLists:
    """Begins one worker's quick calls with lists of keys.

    A result of False means that nothing has happened.
    """

    def __init__(
        self,
        job: shm.Job,
        updater: JobUpdater,
        waiter: RoundWaiter,
        pusher: RoundPusher,
        undelivered: UndeliveredResults,
    ) -> None:
        self._job, self._updater, self._undelivered = job, updater, undelivered
        self._waiter, self._pusher = waiter, pusher
        self._lists = KeyLists[KeyColumns[Handle]]()
        self._known = 0  # number of keys of this process when the lists were made

    def start_sum(self, names: list[Any], value: Any, out: Any, divisor: int) -> Finish | None:
        """Arrive as `push` does, unless there is an updater.

        The returned function can be called again after Ctrl-C.
        """
        if self._updater.updater is not None:
            return None
        finish = self.push(names, value, out, True, divisor)
        return self._undelivered.note_read(names, finish) if callable(finish) else None

    def push(self, names: list[Any], value: Any, out: Any, receives: bool, divisor: int = 1) -> bool | Finish:
        """Arrive, if that needs no wait.

        The returned function waits for the results, or does work for the rounds.
        """
        columns, same = self._find_handles(names), receives and (out is None or out is value)
        if columns is None or (columns.integral and self._updater.updater is not None):
            return False
        values = columns.checked_arrays(value, same)
        outs = columns.checked_arrays(out, True) if receives and not same else values
        if values is None or outs is None or not shm.can_arrive(self._job, columns.keys):
            return False
        if self._undelivered.has_any(names):
            return False
        self._pusher.push_copies(columns.keys, values[0], divisor)
        if not receives:
            return partial(self._waiter.help_all, shm.Calls(columns.keys))
        return partial(self._waiter.complete_all, shm.Calls(columns.keys, outs[0]))

    def pull(self, names: list[Any], out: Any) -> bool | Finish:
        """Record the keys; the returned function waits for their rounds and copies the values."""
        columns = self._find_handles(names)
        outs = None if columns is None else columns.checked_arrays(out, True)
        if columns is None or outs is None or not self._waiter.can_read:
            return False
        return partial(self._waiter.complete_all, shm.Calls(columns.keys, outs[0]))

    def _find_handles(self, names: list[Any]) -> KeyColumns[Handle] | None:
        if self._waiter.logs_members or self._updater.at_work is not None:
            return None
        if self._known != len(self._job.handles):
            self._known = len(self._job.handles)
            self._lists.clear()
        return self._lists.find(names, self._key_columns)

    def _key_columns(self, names: list[Key]) -> KeyColumns[Handle] | None:
        """Return the common part of calls with these keys, if all are dense, small, known and distinct."""
        found = [self._job.handles.get(name) for name in names]
        small = [one for one in found if one is not None and one.small and not one.sparse]
        if not len(small) == len(names) == len(set(names)):
            return None
        ranks = [one.key if isinstance(one.key, int) else one.number for one in small]
        return KeyColumns(small, ranks, [one.like for one in small])
