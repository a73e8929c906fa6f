"""Writes one file after the other, each in its own thread, while the caller continues."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from ..errors import StateFileError, TimeoutError
from ..waiting import WaitClock

log = logging.getLogger("kvstore")

_LOOK = 1.0  # seconds between two checks of the time


class BackgroundWriter:
    """At most one write in the background; the next call of `wait` raises its error."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._what, self._written, self._nbytes = "", 0, 0

    def start(self, what: str, nbytes: int, write: Callable[[Callable[[int], None]], None]) -> None:
        """Start ``write(tell)``, which calls `tell` with the size of each written piece.

        No other write is running.
        """
        self._what, self._written, self._nbytes = what, 0, nbytes
        # Not a daemon thread: the last checkpoint of a program that ends without `close` is also written.
        thread = threading.Thread(target=self._run_write, args=(write,), name="kvstore checkpoint")
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            text = f"{what} has not begun: no thread can be started ({error}); free some, and save again"
            self._record_failure(StateFileError(text))
            return
        self._thread = thread

    def _run_write(self, write: Callable[[Callable[[int], None]], None]) -> None:
        try:
            write(self._add_written)
        except Exception as error:
            self._record_failure(error)

    def _record_failure(self, error: Exception) -> None:
        self._error = error
        log.error("%s", error)  # logged, because the program may end without a wait

    def _add_written(self, nbytes: int) -> None:
        self._written += nbytes

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the write in the background.

        Raises
        ------
        TimeoutError
            The write is not complete yet. It continues.
        Exception
            The error of the last write, once.
        """
        if self._thread is not None:
            self._join_thread(self._thread, self._timeout if timeout is None else timeout)
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _join_thread(self, thread: threading.Thread, timeout: float) -> None:
        clock = WaitClock(timeout)
        with clock.described_by(self._describe_write):
            while True:
                clock.read()
                thread.join(min(_LOOK, clock.seconds_left))
                if not thread.is_alive():
                    return
                if clock.is_over or timeout == 0:
                    raise TimeoutError(
                        f"{self._describe_write(clock.waited)}; the write continues: wait again, or give the "
                        "manager a longer timeout"
                    )
                if clock.notice_due():
                    log.warning("%s", self._describe_write(clock.waited))

    def _describe_write(self, waited: float) -> str:
        done = f"{self._written / 1e6:,.0f} of {self._nbytes / 1e6:,.0f} MB are written"
        return f"process {os.getpid()} has waited {waited:.0f} s for {self._what}: {done}"
