"""Turns of keys: operations of one key come one after the other, those of different keys side by side."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence

from .errors import TimeoutError
from .waiting import WaitClock

#: Seconds for which a thread whose keys are free stands back for those that came first and need others, too.
#: For ever would be a deadlock where these get free only after another process has seen its operation.
_STAND_BACK = 0.1


class Turns:
    """Who is inside an operation that may wait for other processes, by key.

    Who comes first goes first, so that threads which call in a loop leave no other one waiting.

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
        #: The keys that threads wait for, in the order in which they came; None where it is all keys.
        self.waiting: dict[object, frozenset[Hashable] | None] = {}

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
        if self.waiting:
            self.tell()

    def tell(self) -> None:
        """Have threads that wait for a turn look again."""
        with self._lock:  # of the condition, which is entered in Python code: Ctrl-C would leave it taken
            self._free.notify_all()

    def wait_for_all(self, timeout: float) -> None:
        """Wait until no thread is busy with any key; locked."""
        self._wait(None, timeout)

    def _wait(self, keys: Sequence[Hashable] | None, timeout: float) -> None:
        clock, me = WaitClock(timeout), object()
        wanted = None if keys is None else frozenset(keys)
        try:
            self.waiting[me] = wanted
            while True:
                clock.read()
                busy = self._busy(wanted)
                stands_back = self._stands_back(me, wanted, clock.waited < _STAND_BACK)
                if not busy and not stands_back:
                    return
                if busy and clock.over:
                    raise TimeoutError(
                        f"another thread of this process has been busy with key {busy[0]!r} for "
                        f"{timeout:g} s, perhaps waiting for other workers"
                    )
                self._free.wait(_STAND_BACK if stands_back else clock.left)
        except BaseException:
            self.waiting.pop(me, None)
            self.tell()  # who stood back
            raise
        finally:
            self.waiting.pop(me, None)

    def _busy(self, wanted: frozenset[Hashable] | None) -> list[Hashable]:
        return [key for key in list(self.taken) if wanted is None or key in wanted]  # others leave meanwhile

    def _stands_back(self, me: object, wanted: frozenset[Hashable] | None, patient: bool) -> bool:
        """Whether somebody who came earlier goes first: who can, or, if `patient`, who waits for more."""
        for other, keys in list(self.waiting.items()):
            if other is me:
                return False
            shared = wanted is None or keys is None or not keys.isdisjoint(wanted)
            if shared and (patient or not self._busy(keys)):
                return True
        return False
