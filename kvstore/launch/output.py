"""Output of processes: streams that are cut into lines, and sinks that are written without blocking."""

from __future__ import annotations

import collections
import errno
import math
import os
import select
import time
from collections.abc import Callable
from typing import IO

CHUNK = 1 << 16  # bytes of a read
_PIPE = 1 << 20  # bytes that a pipe can hold at most
_PIPE_BUF = 4096  # bytes that a writable pipe accepts without blocking
_FULL = 1 << 20  # bytes that may wait for the reader before the processes have to
_LONGEST = 1 << 23  # bytes of a line; a longer one is cut
_KEPT = 4096  # bytes of a line in the tail

#: A function that gets one line, with its prefix and its newline.
Write = Callable[[bytes], None]


class OutputSink:
    """A stream of this process that is written as far as it accepts data without blocking."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        #: Whether the reader is gone, or nothing more can be written.
        self.broken = False
        #: The reason, such as a full disk; empty if the reader is gone.
        self.reason = ""
        self._pending = bytearray()
        self._patience, self._taken_at = math.inf, 0.0

    def write(self, data: bytes) -> None:
        """Queue `data`; `flush` writes it."""
        if not self.broken:
            self._pending += data

    def lose_after(self, patience: float) -> None:
        """From now on drop pending data when the reader has read nothing for `patience` seconds."""
        self._patience, self._taken_at = patience, time.monotonic()

    def flush(self) -> None:
        """Write what the stream accepts now."""
        try:
            while self._pending and select.select([], [self.fd], [], 0)[1]:
                del self._pending[: os.write(self.fd, self._pending[:_PIPE_BUF])]
                self._taken_at = time.monotonic()
        except OSError as error:
            self._mark_broken("" if error.errno == errno.EPIPE else os.strerror(error.errno or 0))
        if self._pending and time.monotonic() > self._taken_at + self._patience:
            self._mark_broken(f"the reader has taken nothing for {self._patience:g} s")

    def _mark_broken(self, reason: str) -> None:
        self.broken, self.reason = True, reason
        self._pending.clear()

    @property
    def is_empty(self) -> bool:
        """Whether all data is written."""
        return not self._pending

    @property
    def is_full(self) -> bool:
        """Whether so much data is pending that the launcher should not read more."""
        return len(self._pending) > _FULL


class LineReader:
    """A stream of a process, cut into lines; `write` gets each line with the prefix.

    `tail` keeps the last `keep` lines, without the prefix. `longest` is the length at which a line is cut.
    """

    def __init__(
        self, stream: IO[bytes] | None, write: Write, prefix: bytes, keep: int = 0, longest: int = _LONGEST
    ) -> None:
        assert stream is not None
        os.set_blocking(stream.fileno(), False)
        self.stream = stream
        #: Whether the process has closed it.
        self.ended = False
        self.tail: collections.deque[bytes] = collections.deque(maxlen=keep)
        self.longest = longest
        self._write, self._prefix = write, prefix
        self._parts: list[bytes] = []
        self._length = 0

    def read(self) -> bool:
        """Read what is available, and return whether there was anything."""
        try:
            data = os.read(self.stream.fileno(), CHUNK)
        except BlockingIOError:
            return False
        self.ended = not data
        self._split_data(data)
        return bool(data)

    def catch_up(self) -> None:
        """Read as much as a pipe holds; a process that never stops writing is not followed further."""
        for _ in range(_PIPE // CHUNK):
            if self.stream.closed or not self.read():
                break

    def close(self) -> None:
        """Read the rest and close the stream. A last line without a newline gets one."""
        self.catch_up()
        if self._parts:
            self._write_line(b"")
        self.stream.close()

    def _split_data(self, data: bytes) -> None:
        *whole, rest = data.split(b"\n")
        for line in whole:
            self._write_line(line)
        if rest:
            self._parts.append(rest)
            self._length += len(rest)
        if self._length > self.longest:
            self._write_line(b"")

    def _write_line(self, end: bytes) -> None:
        line = b"".join([*self._parts, end])
        self._parts.clear()
        self._length = 0
        self._write(self._prefix + line + b"\n")
        self.tail.append(line[:_KEPT])
