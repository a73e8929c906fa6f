"""Asynchronous reads that have yet to write their results: the next push of their keys waits for them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable

from ...arrays.grouping import Key


class CallOnce:
    """A function that runs once, in the first thread that calls it; all callers get its error."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run
        self._error: Exception | None = None
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether the function has run, with or without an error."""
        return self._run is None

    def __call__(self) -> None:
        """Run the function, or wait until it has run; raise its error."""
        with self._lock:
            if self._run is not None:
                try:
                    self._run()
                except Exception as error:
                    self._error = error
                self._run = None  # after Ctrl-C, which ends the caller, the next call runs it
        if self._error is not None:
            raise self._error


class UndeliveredResults:
    """The asynchronous reads of one worker, by key, until a push of the key completes them."""

    def __init__(self) -> None:
        self._reads: dict[Key, tuple[CallOnce, ...]] = {}

    def note_read(self, keys: Iterable[Key], finish: Callable[[], None]) -> CallOnce:
        """Return the function that finishes a read of these keys, in the background or before a push."""
        read = CallOnce(finish)
        alone = (read,)  # one tuple for all keys: hundreds would burden the garbage collector
        for key in keys:
            earlier = [one for one in self._reads.get(key, ()) if not one.done]
            self._reads[key] = (*earlier, read) if earlier else alone
        return read

    def has_any(self, keys: Iterable[Key]) -> bool:
        """Return whether a push of these keys must wait for reads."""
        return any(not one.done for key in keys for one in self._reads.get(key, ()))

    def deliver_keys(self, keys: Iterable[Key]) -> None:
        """Complete the reads of these keys."""
        for key in keys:
            for read in self._reads.get(key, ()):
                with contextlib.suppress(Exception):  # the read's `Work` raises the error
                    read()
            self._reads.pop(key, None)  # not before: after Ctrl-C the next push completes the reads
