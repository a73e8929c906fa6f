"""The clock of a wait: it measures when the wait ends, and when a notice about a long wait is logged."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

NOTICE_AFTER = 10.0  # seconds until the notice about a long wait
_BEFORE_END = 10.0  # seconds before the end of a wait at which the stacks of the process are logged
_LONG = 20.0  # least timeout in seconds for which they are

#: Hook of the tests: a function that delays the process at critical points.
stall: Callable[[], None] | None = None
#: Hook of `kvstore.observe.stacks`: logs the stacks of the process some time before the end of a long wait.
before_end: Callable[[WaitClock], None] | None = None


class WaitClock:
    """Measures one wait.

    The clock is read before the condition is checked. An event that arrived before the reading is therefore
    never reported as late, even if the process was stopped between the two::

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
        Seconds until a notice that the wait lasts long; at most `timeout`.
    """

    __slots__ = ("_describe", "_notice", "_report", "_start", "_timeout", "_told", "thread", "waited")

    def __init__(self, timeout: float, notice_after: float | None = None) -> None:
        self._timeout = timeout
        self._notice = min(NOTICE_AFTER if notice_after is None else notice_after, timeout)
        self._told = False
        self._report = math.inf  # seconds until the stacks are logged
        self._start = time.monotonic()
        #: Seconds from the start to the last reading.
        self.waited = 0.0

    def read(self) -> float:
        """Read the time; return the seconds since the start."""
        self.waited = time.monotonic() - self._start
        if stall is not None:
            stall()
        if self.waited > self._report:
            self._report = math.inf
            if before_end is not None:
                before_end(self)
        return self.waited

    def described_by(self, describe: Callable[[float], str]) -> WaitClock:
        """Return a context for the body of the wait; `open_waits` lists the wait while it is open.

        `describe` returns a text from the seconds so far: the object of the wait and the missing processes.
        It uses no lock and sends no message.
        """
        self._describe = describe
        if self._timeout > _LONG:
            self._report = self._timeout - _BEFORE_END
        #: Identifier of the thread that waits.
        self.thread = threading.get_ident()
        return self

    def __enter__(self) -> WaitClock:
        _open[id(self)] = self
        return self

    def __exit__(self, *error: object) -> None:
        _open.pop(id(self), None)

    def description(self) -> str:
        """Return the present description of the wait: its object and the missing processes."""
        return self._describe(time.monotonic() - self._start)

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the end; 0 after it."""
        return max(0.0, self._timeout - (time.monotonic() - self._start))

    @property
    def is_over(self) -> bool:
        """Return whether the timeout had passed at the last reading."""
        return self.waited > self._timeout

    @property
    def is_long(self) -> bool:
        """Return whether half of the time until the notice had passed at the last reading."""
        return self.waited > self._notice / 2

    def near_notice(self, seconds: float) -> bool:
        """Return whether at most so many seconds were left until the notice at the last reading."""
        return self.waited > self._notice - seconds

    def notice_due(self) -> bool:
        """Return whether the notice is due; True once."""
        due = not self._told and self.waited > self._notice
        self._told = self._told or due
        return due


_open: dict[int, WaitClock] = {}


def open_waits() -> list[WaitClock]:
    """List the waits of this process that have a description; also called in a signal handler."""
    return list(_open.values())
