"""Which of several threads that wait is at a store's sockets: the one that has waited longest.

It tells the others what they wait for. Two that took turns would wake each other all the time.
"""

from __future__ import annotations

import itertools
import threading
import time

_LATE = 0.2  # seconds away from the sockets after which a wait leads no other: two of its longest turns


class WakeSignal:
    """Ends one wait, or the next; Ctrl-C leaves nothing half done, as it can in `threading.Event`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # taken until somebody sends
        self._lock.acquire()

    def send(self) -> None:
        """End the wait."""
        try:  # noqa: SIM105 - a context manager is a step of its own
            self._lock.release()
        except RuntimeError:
            pass

    def wait(self, seconds: float) -> None:
        """Wait for so many seconds at most."""
        self._lock.acquire(timeout=seconds)


class SocketWait:
    """A wait of one thread for what comes over the sockets."""

    __slots__ = ("at_sockets", "changed", "thread")

    def __init__(self) -> None:
        #: Sent when what it is for may be there, or when it may be its turn.
        self.changed = WakeSignal()
        self.thread = threading.get_ident()
        #: When it was at the sockets last.
        self.at_sockets = time.monotonic()


class SocketWaits:
    """The waits that go on, in the order of their beginning."""

    def __init__(self) -> None:
        self._all: list[SocketWait] = []

    def begin(self) -> SocketWait:
        """Begin a wait of this thread."""
        wait = SocketWait()
        self._all.append(wait)
        return wait

    def end(self, wait: SocketWait) -> None:
        """End it; another goes to the sockets then."""
        self._all.remove(wait)
        self.tell()

    def tell(self) -> None:
        """Have all look whether what they wait for is there."""
        for wait in self._all[:]:
            wait.changed.send()

    def are_several(self) -> bool:
        """Whether there is anybody to tell."""
        return len(self._all) > 1

    def are_served(self) -> bool:
        """Whether a wait is at the sockets, or was a moment ago."""
        return any(map(_is_there, self._all[:]))

    def is_led(self, wait: SocketWait) -> bool:
        """Whether an older wait, of another thread, is at the sockets."""
        older = itertools.takewhile(lambda one: one is not wait, self._all[:])
        return any(one.thread != wait.thread and _is_there(one) for one in older)


def _is_there(wait: SocketWait) -> bool:
    return time.monotonic() - wait.at_sockets < _LATE
