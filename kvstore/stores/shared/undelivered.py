"""Asynchronous reads that have yet to write their results: the next push of their keys comes after them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable

from ...arrays.grouping import Key


class CallOnce:
    """Something to be done once, by whichever thread comes first; all are told how it went."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run
        self._error: Exception | None = None
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether it was done, well or not."""
        return self._run is None

    def __call__(self) -> None:
        """Do it, or wait until it is done. Raises what it raised."""
        with self._lock:
            if self._run is not None:
                try:
                    self._run()
                except Exception as error:
                    self._error = error
                self._run = None  # after Ctrl-C, which is the caller's, the next one does it
        if self._error is not None:
            raise self._error


class UndeliveredResults:
    """The asynchronous reads of one worker, by key, until a push of the key sees them done."""

    def __init__(self) -> None:
        self._reads: dict[Key, tuple[CallOnce, ...]] = {}

    def note(self, keys: Iterable[Key], finish: Callable[[], None]) -> CallOnce:
        """Return what finishes a read of these keys, in the background or before a push."""
        read = CallOnce(finish)
        alone = (read,)  # one for all keys: hundreds of lists would be looked through for garbage
        for key in keys:
            earlier = [one for one in self._reads.get(key, ()) if not one.done]
            self._reads[key] = (*earlier, read) if earlier else alone
        return read

    def has_any(self, keys: Iterable[Key]) -> bool:
        """Whether a push of these keys has to see reads done."""
        return any(not one.done for key in keys for one in self._reads.get(key, ()))

    def deliver(self, keys: Iterable[Key]) -> None:
        """See the reads of these keys done."""
        for key in keys:
            for read in self._reads.get(key, ()):
                with contextlib.suppress(Exception):  # whoever holds the operation's handle is told
                    read()
            self._reads.pop(key, None)  # not before: after Ctrl-C the next push sees to them
