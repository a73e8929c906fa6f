"""Turns of keys: operations of one key come one after the other, those of different keys side by side."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence

from .errors import TimeoutError
from .waiting import WaitClock


class Turns:
    """Who is inside an operation that may wait for other processes, by key.

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
        #: How many threads wait for a turn.
        self.waiting = 0

    def take(self, keys: Sequence[Hashable], timeout: float) -> None:
        """Wait until no other thread is busy with any of the keys, and keep others from them; locked."""
        if self.taken:
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
        clock = WaitClock(timeout)
        try:
            self.waiting += 1
            wanted = None if keys is None else set(keys)
            while True:
                clock.read()
                busy = [key for key in list(self.taken) if wanted is None or key in wanted]  # others leave
                if not busy:
                    return
                if clock.over:
                    raise TimeoutError(
                        f"another thread of this process has been busy with key {busy[0]!r} for "
                        f"{timeout:g} s, perhaps waiting for other workers"
                    )
                self._free.wait(clock.left)
        finally:
            self.waiting -= 1
