"""Locks of keys: operations on one key run one after the other, operations on different keys concurrently."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterable, Sequence

from .errors import TimeoutError
from .waiting import WaitClock

#: Share of the waiting time during which a thread that waits for several keys reserves those that are free.
#: Not 1: a busy key may become free only after another process has received an operation on a reserved one.
_RESERVED_SHARE = 0.1


class LockWaiter:
    """A thread that waits for the locks of keys.

    Parameters
    ----------
    keys : frozenset of Hashable or None
        The keys whose locks it waits for; None for all.
    """

    __slots__ = ("_since", "keys", "thread")

    def __init__(self, keys: frozenset[Hashable] | None) -> None:
        self.keys = keys
        #: Identifier of the thread.
        self.thread = threading.get_ident()
        self._since = time.monotonic()

    def waits_for_any(self, keys: Iterable[Hashable] | None) -> bool:
        """Return whether the thread waits for one of these keys; None means all."""
        return keys is None or self.keys is None or not self.keys.isdisjoint(keys)

    def reserves_free_keys(self) -> bool:
        """Return whether its free keys are reserved now, although another of its keys is busy."""
        return (time.monotonic() - self._since) % 1 < _RESERVED_SHARE


class KeyLocks:
    """The locks of a store's keys, held by operations that may wait for other processes.

    Threads acquire a key in the order of their calls, so that a thread which calls in a loop does not exclude
    the others.

    Parameters
    ----------
    lock : RLock
        The store's lock; a thread that waits for keys releases it while it waits.
    """

    def __init__(self, lock: threading.RLock) -> None:
        #: The thread that holds each key. Keys are added under the lock and removed without it.
        self.holders: dict[Hashable, int] = {}
        self._lock = lock
        self._free = threading.Condition(lock)
        #: Threads that wait for keys, in the order of their calls.
        self.waiters: dict[LockWaiter, None] = {}

    def acquire(self, keys: Sequence[Hashable], timeout: float) -> None:
        """Acquire the locks of the keys; the caller holds `lock`."""
        if self.holders or self.waiters:
            self._wait_for_keys(keys, timeout)
        self.holders.update(dict.fromkeys(keys, threading.get_ident()))

    def release(self, keys: Sequence[Hashable]) -> None:
        """Release those of the keys that this thread holds."""
        me = threading.get_ident()
        taken = self.holders
        for key in keys:
            if taken.get(key) == me:
                del taken[key]
        if self.waiters and self.has_waiter(keys):
            self.wake()

    def has_waiter(self, keys: Iterable[Hashable]) -> bool:
        """Return whether a thread waits for one of the keys."""
        return any(waiter.waits_for_any(keys) for waiter in list(self.waiters))

    def wake(self) -> None:
        """Wake the waiting threads, which check their keys again."""
        with self._lock:  # the condition's own `with` is Python code: Ctrl-C could leave it locked
            self._free.notify_all()

    def wait_until_free(self, timeout: float) -> None:
        """Wait until no thread holds a key; the caller holds `lock`."""
        self._wait_for_keys(None, timeout)

    def _wait_for_keys(self, keys: Sequence[Hashable] | None, timeout: float) -> None:
        clock, me = WaitClock(timeout), LockWaiter(None if keys is None else frozenset(keys))
        try:
            self.waiters[me] = None
            while True:
                clock.read()
                busy, first = self._busy_keys(me), self._is_next(me)
                if not busy and (first or clock.is_over):
                    return
                if clock.is_over:
                    raise TimeoutError(
                        f"another thread of this process has been busy with key {busy[0]!r} for "
                        f"{timeout:g} s, perhaps waiting for other workers"
                    )
                # No longer: a thread that gives up, or whose lock Ctrl-C releases, wakes no other thread.
                self._free.wait(min(clock.seconds_left, _RESERVED_SHARE))
        finally:
            self.waiters.pop(me, None)

    def _busy_keys(self, waiter: LockWaiter) -> list[Hashable]:
        """List the keys of a waiter that other threads hold.

        A key that Ctrl-C has left with this thread does not count.
        """
        keys, taken = waiter.keys, list(self.holders.items())  # other threads release keys concurrently
        return [key for key, thread in taken if thread != waiter.thread and (keys is None or key in keys)]

    def _is_next(self, waiter: LockWaiter) -> bool:
        """Return whether no earlier waiter has reserved one of its keys."""
        for other in list(self.waiters):
            if other is waiter:
                break
            if other.waits_for_any(waiter.keys) and (
                not self._busy_keys(other) or other.reserves_free_keys()
            ):
                return False
        return True
