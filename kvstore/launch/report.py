"""The pipe on which a scheduler tells the launcher where it is."""

from __future__ import annotations

import os

_MOST = 1 << 10  # bytes of an address


class Report:
    """Two ends of a pipe; `theirs` is for the scheduler to inherit."""

    def __init__(self) -> None:
        self.ours, self.theirs = os.pipe()
        os.set_blocking(self.ours, False)
        self._text = b""
        self._open = {self.ours, self.theirs}

    def read(self) -> str | None:
        """Take what is there; the address once it is complete. An empty text: none will come."""
        try:
            data = os.read(self.ours, _MOST)
        except BlockingIOError:
            return None
        self._text += data
        line, newline, _ = self._text.partition(b"\n")
        if newline:
            return line.decode(errors="replace")
        return None if data and len(self._text) < _MOST else ""

    def sent(self) -> None:
        """Close the end that the scheduler has inherited by now."""
        self._close(self.theirs)

    def close(self) -> None:
        """Close what is open. A second call does nothing."""
        self._close(self.theirs)
        self._close(self.ours)

    def _close(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._open.remove(descriptor)
            os.close(descriptor)
