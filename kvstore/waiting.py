"""The clock of a wait: when it is over, and when it is time to say that it lasts."""

from __future__ import annotations

import time
from collections.abc import Callable

NOTICE_AFTER = 10.0  # seconds until a wait says what it waits for

#: Tests put here what holds a process up at the worst moments; else nothing does.
stall: Callable[[], None] | None = None


class WaitClock:
    """Measures one wait.

    It is read before the question whether the wait is over, so that nothing which has come by then is called
    late, even if the process was stopped in between::

        while True:
            clock.read()
            if ready():
                return
            if clock.over:
                raise TimeoutError(...)
            if clock.tells():
                log.warning(...)

    Parameters
    ----------
    timeout : float
        Seconds until the wait is over.
    notice_after : float, optional
        Seconds until it is time to say that it lasts; no later than its end.
    """

    __slots__ = ("_notice", "_start", "_timeout", "_told", "waited")

    def __init__(self, timeout: float, notice_after: float | None = None) -> None:
        self._timeout = timeout
        self._notice = min(NOTICE_AFTER if notice_after is None else notice_after, timeout)
        self._told = False
        self._start = time.monotonic()
        #: Seconds from the start to the last reading.
        self.waited = 0.0

    def read(self) -> float:
        """Look at the time; return the seconds since the start."""
        self.waited = time.monotonic() - self._start
        if stall is not None:
            stall()
        return self.waited

    @property
    def left(self) -> float:
        """Seconds until the end; 0 after it."""
        return max(0.0, self._timeout - (time.monotonic() - self._start))

    @property
    def over(self) -> bool:
        """Whether the end had come at the last reading."""
        return self.waited > self._timeout

    @property
    def is_long(self) -> bool:
        """Whether half of the time to the notice had passed at the last reading."""
        return self.waited > self._notice / 2

    def near_notice(self, seconds: float) -> bool:
        """Whether it was at most so many seconds to the notice at the last reading."""
        return self.waited > self._notice - seconds

    def tells(self) -> bool:
        """Whether to say that the wait lasts; once."""
        due = not self._told and self.waited > self._notice
        self._told = self._told or due
        return due
