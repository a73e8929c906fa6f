"""Which of several waiting threads polls a store's sockets: the thread that has waited longest.

It wakes the others when their results arrive. Two threads that alternated would wake each other all the time.
"""

from __future__ import annotations

import itertools
import threading
import time

_LATE = 0.2  # seconds without polling after which a wait leads no other: two of its longest turns


class WakeSignal:
    """Ends one wait, or the next; Ctrl-C cannot leave it half done, as it can `threading.Event`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held until `send`
        self._lock.acquire()

    def send(self) -> None:
        """End the wait."""
        try:  # noqa: SIM105 - Ctrl-C could interrupt a context manager in between
            self._lock.release()
        except RuntimeError:
            pass

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds`."""
        self._lock.acquire(timeout=seconds)


class SocketWait:
    """One thread's wait for messages."""

    __slots__ = ("at_sockets", "changed", "thread")

    def __init__(self) -> None:
        #: Sent when the awaited result may be there, or when this thread may poll the sockets.
        self.changed = WakeSignal()
        self.thread = threading.get_ident()
        #: The time of its last poll of the sockets.
        self.at_sockets = time.monotonic()


class SocketWaits:
    """The current waits, oldest first."""

    def __init__(self) -> None:
        self._all: list[SocketWait] = []

    def begin_wait(self) -> SocketWait:
        """Begin a wait of this thread."""
        wait = SocketWait()
        self._all.append(wait)
        return wait

    def end_wait(self, wait: SocketWait) -> None:
        """End a wait; another thread polls the sockets then."""
        self._all.remove(wait)
        self.wake_all()

    def wake_all(self) -> None:
        """Wake all waiting threads, to check their results."""
        for wait in self._all[:]:
            wait.changed.send()

    def are_several(self) -> bool:
        """Return whether there are other waits to wake."""
        return len(self._all) > 1

    def are_served(self) -> bool:
        """Return whether a wait polls the sockets, or did so a moment ago."""
        return any(map(_is_there, self._all[:]))

    def is_led(self, wait: SocketWait) -> bool:
        """Return whether an older wait, of another thread, polls the sockets."""
        older = itertools.takewhile(lambda one: one is not wait, self._all[:])
        return any(one.thread != wait.thread and _is_there(one) for one in older)


def _is_there(wait: SocketWait) -> bool:
    return time.monotonic() - wait.at_sockets < _LATE
