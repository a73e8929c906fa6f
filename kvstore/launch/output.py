"""The workers' output on its way through the launcher: whole lines, and no waiting for whoever reads them."""

from __future__ import annotations

import collections
import errno
import math
import os
import select
import time
from typing import IO, Protocol

_CHUNK = 1 << 16
_PIPE = 1 << 20  # bytes that a pipe can hold at most
_PIPE_BUF = 4096  # what a pipe that is ready takes without blocking
_FULL = 1 << 20  # bytes that may wait for the reader before the workers have to
_LONGEST = 1 << 23  # bytes of a line; what is longer is passed on in pieces
_KEPT = 4096  # bytes of a line that the tail remembers


class Writes(Protocol):
    """Where the lines of a stream go."""

    def write(self, data: bytes) -> None:
        """Take a line, with what marks it and its newline."""


class Sink:
    """One of our own streams, written only as far as it takes without blocking."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        #: The reader is gone, or nothing more can be written.
        self.broken = False
        #: Why, unless the reader is gone: the disk is full.
        self.reason = ""
        self._pending = bytearray()
        self._patience, self._taken_at = math.inf, 0.0

    def write(self, data: bytes) -> None:
        """Queue `data`; `flush` writes it."""
        if not self.broken:
            self._pending += data

    def lose_after(self, patience: float) -> None:
        """Drop what waits, from now on, when the reader has taken nothing for so many seconds."""
        self._patience, self._taken_at = patience, time.monotonic()

    def flush(self) -> None:
        """Write what the stream takes now."""
        try:
            while self._pending and select.select([], [self.fd], [], 0)[1]:
                del self._pending[: os.write(self.fd, self._pending[:_PIPE_BUF])]
                self._taken_at = time.monotonic()
        except OSError as error:
            self._break("" if error.errno == errno.EPIPE else os.strerror(error.errno or 0))
        if self._pending and time.monotonic() > self._taken_at + self._patience:
            self._break(f"the reader has taken nothing for {self._patience:g} s")

    def _break(self, reason: str) -> None:
        self.broken, self.reason = True, reason
        self._pending.clear()

    @property
    def empty(self) -> bool:
        """Whether all is written."""
        return not self._pending

    @property
    def full(self) -> bool:
        """Whether so much waits that nothing more should be read."""
        return len(self._pending) > _FULL


class Lines:
    """One stream of a worker, cut into lines; each goes to the sink with a prefix."""

    def __init__(self, stream: IO[bytes] | None, sink: Writes, prefix: bytes, keep: int = 0) -> None:
        assert stream is not None
        os.set_blocking(stream.fileno(), False)
        self.stream = stream
        #: The other side has closed it.
        self.ended = False
        #: The last lines, without the prefix.
        self.tail: collections.deque[bytes] = collections.deque(maxlen=keep)
        self._sink = sink
        self._prefix = prefix
        self._parts: list[bytes] = []
        self._length = 0

    def read(self) -> bool:
        """Take what is there and return whether there was anything."""
        try:
            data = os.read(self.stream.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        self.ended = not data
        self._feed(data)
        return bool(data)

    def catch_up(self) -> None:
        """Take what is there, unless all was taken and it is closed."""
        if self.stream.closed:
            return
        for _ in range(_PIPE // _CHUNK):  # no more than a pipe holds: somebody may write for ever
            if not self.read():
                break

    def close(self) -> None:
        """Take what is left and close the stream. A last line without a newline gets one."""
        self.catch_up()
        if self._parts:
            self._line(b"")
        self.stream.close()

    def _feed(self, data: bytes) -> None:
        *whole, rest = data.split(b"\n")
        for line in whole:
            self._line(line)
        if rest:
            self._parts.append(rest)
            self._length += len(rest)
        if self._length > _LONGEST:
            self._line(b"")

    def _line(self, end: bytes) -> None:
        line = b"".join([*self._parts, end])
        self._parts.clear()
        self._length = 0
        self._sink.write(self._prefix + line + b"\n")
        self.tail.append(line[:_KEPT])
