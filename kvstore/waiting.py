"""The clock of a wait: when it is over, and when it is time to say that it lasts."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

NOTICE_AFTER = 10.0  # seconds until a wait says what it waits for
_BEFORE_END = 10.0  # seconds before the end of a wait at which the process says where it is
_LONG = 20.0  # seconds of a deadline for which it does

#: Tests put here what holds a process up at the worst moments; else nothing does.
stall: Callable[[], None] | None = None
#: `kvstore.observe.stacks` puts here what says where the process is, some time before the end of a long wait.
before_end: Callable[[WaitClock], None] | None = None


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

    __slots__ = ("_describe", "_notice", "_report", "_start", "_timeout", "_told", "thread", "waited")

    def __init__(self, timeout: float, notice_after: float | None = None) -> None:
        self._timeout = timeout
        self._notice = min(NOTICE_AFTER if notice_after is None else notice_after, timeout)
        self._told = False
        self._report = math.inf  # seconds after which it is told where the process is
        self._start = time.monotonic()
        #: Seconds from the start to the last reading.
        self.waited = 0.0

    def read(self) -> float:
        """Look at the time; return the seconds since the start."""
        self.waited = time.monotonic() - self._start
        if stall is not None:
            stall()
        if self.waited > self._report:
            self._report = math.inf
            if before_end is not None:
                before_end(self)
        return self.waited

    def described_by(self, describe: Callable[[float], str]) -> WaitClock:
        """Make a context of the wait, inside of which `open_waits` lists it.

        `describe` says, from the seconds so far, for what and for whom it is, without a lock or a message.
        """
        self._describe = describe
        if self._timeout > _LONG:
            self._report = self._timeout - _BEFORE_END
        #: Ident of the thread that waits.
        self.thread = threading.get_ident()
        return self

    def __enter__(self) -> WaitClock:
        _open[id(self)] = self
        return self

    def __exit__(self, *error: object) -> None:
        _open.pop(id(self), None)

    def description(self) -> str:
        """Say for what and for whom it waits, now."""
        return self._describe(time.monotonic() - self._start)

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


_open: dict[int, WaitClock] = {}


def open_waits() -> list[WaitClock]:
    """List the waits of this process that can be described, also in the handler of a signal."""
    return list(_open.values())
