"""Turns of keys: operations of one key come one after the other, those of different keys side by side."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterable, Sequence

from .errors import TimeoutError
from .waiting import WaitClock

#: Seconds of each second of a wait in which others stand back for a thread that needs a busy key and theirs.
#: Always would be a deadlock where that key gets free only after another process has seen their operation.
_STAND_BACK = 0.1


class Waiter:
    """A thread that waits for a turn.

    Parameters
    ----------
    keys : frozenset of Hashable or None
        The keys that it waits for; None for all.
    """

    __slots__ = ("_since", "keys", "thread")

    def __init__(self, keys: frozenset[Hashable] | None) -> None:
        self.keys = keys
        #: Its ident.
        self.thread = threading.get_ident()
        self._since = time.monotonic()

    def meets(self, keys: Iterable[Hashable] | None) -> bool:
        """Whether one of these keys is one of its own; None for all."""
        return keys is None or self.keys is None or not self.keys.isdisjoint(keys)

    def holds_others_back(self) -> bool:
        """Whether others stand back for it at this time although it cannot go."""
        return (time.monotonic() - self._since) % 1 < _STAND_BACK


class Turns:
    """Who is inside an operation that may wait for other processes, by key.

    Who comes first goes first, so that a thread which calls in a loop does not keep others from its key.

    Parameters
    ----------
    lock : RLock
        The store's; whoever waits for a turn lets it go meanwhile.
    """

    def __init__(self, lock: threading.RLock) -> None:
        #: Which thread is busy with a key. Under the lock keys are added; leaving takes none.
        self.taken: dict[Hashable, int] = {}
        self._lock = lock
        self._free = threading.Condition(lock)
        #: Who waits for a turn, in the order in which they came.
        self.waiting: dict[Waiter, None] = {}

    def take(self, keys: Sequence[Hashable], timeout: float) -> None:
        """Wait until no other thread is busy with any of the keys, and keep others from them; locked."""
        if self.taken or self.waiting:
            self._wait(keys, timeout)
        self.taken.update(dict.fromkeys(keys, threading.get_ident()))

    def leave(self, keys: Sequence[Hashable]) -> None:
        """Let others have those of the keys that this thread has taken."""
        me = threading.get_ident()
        taken = self.taken
        for key in keys:
            if taken.get(key) == me:
                del taken[key]
        if self.waiting and self.wanted(keys):
            self.tell()

    def wanted(self, keys: Iterable[Hashable]) -> bool:
        """Whether a thread waits for one of the keys."""
        return any(waiter.meets(keys) for waiter in list(self.waiting))

    def tell(self) -> None:
        """Have threads that wait for a turn look again."""
        with self._lock:  # of the condition, which is entered in Python code: Ctrl-C would leave it taken
            self._free.notify_all()

    def wait_for_all(self, timeout: float) -> None:
        """Wait until no thread is busy with any key; locked."""
        self._wait(None, timeout)

    def _wait(self, keys: Sequence[Hashable] | None, timeout: float) -> None:
        clock, me = WaitClock(timeout), Waiter(None if keys is None else frozenset(keys))
        try:
            self.waiting[me] = None
            while True:
                clock.read()
                busy, first = self._busy(me), self._comes_first(me)
                if not busy and (first or clock.over):
                    return
                if clock.over:
                    raise TimeoutError(
                        f"another thread of this process has been busy with key {busy[0]!r} for "
                        f"{timeout:g} s, perhaps waiting for other workers"
                    )
                # No longer: of who gives up nobody is told, nor of a turn that Ctrl-C ends.
                self._free.wait(min(clock.left, _STAND_BACK))
        finally:
            self.waiting.pop(me, None)

    def _busy(self, waiter: Waiter) -> list[Hashable]:
        """List the keys of a waiter that other threads are busy with; what is its own Ctrl-C has left."""
        keys, taken = waiter.keys, list(self.taken.items())  # others leave meanwhile
        return [key for key, thread in taken if thread != waiter.thread and (keys is None or key in keys)]

    def _comes_first(self, waiter: Waiter) -> bool:
        """Whether it stands back for nobody who came earlier."""
        for other in list(self.waiting):
            if other is waiter:
                break
            if other.meets(waiter.keys) and (not self._busy(other) or other.holds_others_back()):
                return False
        return True
