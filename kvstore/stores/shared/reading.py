"""Reads of values by Python: each is of one round, also if rounds do not wait for this worker.

They do not after `join`, nor before the first push of a restarted rank; and after a loss, a round may still
be completed. Such a value is copied, and copied again if it has changed during the copy: see
native/reading.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..entry import Array
from .native import _shared as shm
from .waiting import RoundWaiter

Handle = shm.Handle
T = TypeVar("T")


class ValueReader:
    """The reads of one worker of a job."""

    def __init__(self, waiter: RoundWaiter) -> None:
        self._waiter = waiter

    def read(self, handle: Handle, copy: Callable[[], T]) -> T:
        """Return the result of `copy`, which reads the value of a key; it is called once or several times."""
        stays = handle.is_stable
        found = copy() if stays else self._read_apart(handle, copy)
        if not handle.is_stable:
            self._waiter.check_open()  # a worker that was fenced during the read may have read anything
        return found

    def read_value(self, handle: Handle) -> Array:
        """Return the value in use, for reading: live memory, or a copy if it may change."""
        return handle.value() if handle.is_stable else self.read(handle, lambda: handle.value().copy())

    def _read_apart(self, handle: Handle, copy: Callable[[], T]) -> T:
        reading = shm.ValueRead(handle)
        found: list[T] = []

        def step() -> int:
            try:
                outcome = reading.begin()
                return _copy_value(reading, copy, found) if outcome == shm.READY else outcome
            except BaseException:
                reading.end()  # Ctrl-C interrupted the copy; rounds may wait for this read
                raise

        self._waiter.wait(step, handle)
        return found[0]


def _copy_value(reading: shm.ValueRead, copy: Callable[[], T], found: list[T]) -> int:
    """Make a copy; `TICK`: it is not of one round, and an error that it has raised means nothing."""
    error: Exception | None = None
    try:
        found[:] = [copy()]
    except Exception as caught:
        error = caught
    finally:
        is_whole = reading.end()
    if is_whole and error is not None:
        raise error
    return shm.READY if is_whole else shm.TICK
