"""The pages of counters of processes of this machine: a memfd with a known name, in /proc/PID/fd."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from typing import Any

from kvstore.observe.native._observe import PAGE_MAGIC, PAGE_NAME, PAGE_VERSION, ask_for_times, now, read_page

from .proc import ProcessFacts, facts

_LINK = f"/memfd:{PAGE_NAME}"
_HEAD = struct.Struct("=8sII")  # as kv_page begins: magic, version, process


class CounterPage:
    """The page of one process, held open; `is_readable` is False if it has the layout of another version."""

    def __init__(self, process: int, descriptor: int, started: int) -> None:
        self.process, self._descriptor, self._started = process, descriptor, started
        magic, version, self.owner = _HEAD.unpack(
            os.pread(descriptor, _HEAD.size, 0).ljust(_HEAD.size, b"\0")
        )
        self.is_readable = magic.rstrip(b"\0") == PAGE_MAGIC and version == PAGE_VERSION
        self.identity = os.fstat(descriptor).st_ino

    def facts(self) -> ProcessFacts | None:
        """Look at the process; None if it has ended."""
        found = facts(self.process)
        return found if found and found.started == self._started else None

    def stores(self) -> list[dict[str, Any]]:
        """Read the counters of its stores."""
        with contextlib.suppress(ValueError, OSError):  # it is shorter than a page of this version
            return read_page(self._descriptor) if self.is_readable else []
        return []

    def ask_for_times(self, seconds: float) -> None:
        """Have the process take times for some seconds."""
        with contextlib.suppress(ValueError, OSError):
            if self.is_readable:
                ask_for_times(self._descriptor, now() + int(seconds * 1e9))

    def close(self) -> None:
        """Close its descriptor."""
        os.close(self._descriptor)


class CounterPages:
    """All pages that this user may open; they stay open between two looks."""

    def __init__(self) -> None:
        self._known: dict[int, CounterPage] = {}

    def look(self) -> list[CounterPage]:
        """Open new pages, and close those of processes that have ended."""
        for page in [one for one in self._known.values() if one.facts() is None]:
            self._forget(page)
        for process in _processes():
            if process not in self._known and (found := _opened(process)):
                self._add(found)
        return sorted(self._known.values(), key=lambda one: one.process)

    def close(self) -> None:
        """Close all pages."""
        for page in list(self._known.values()):
            self._forget(page)

    def _add(self, page: CounterPage) -> None:
        """Add a page; a child has the page of its parent between fork and exec."""
        twin = next((one for one in self._known.values() if one.identity == page.identity), None)
        if twin is not None and page.owner != page.process:
            page.close()
            return
        if twin is not None:
            self._forget(twin)
        self._known[page.process] = page

    def _forget(self, page: CounterPage) -> None:
        del self._known[page.process]
        page.close()


def _processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _opened(process: int) -> CounterPage | None:
    """Open the page of a process; None if it has none, has ended, or belongs to another user."""
    folder = f"/proc/{process}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):  # it is closed by now
                if os.readlink(f"{folder}/{name}").startswith(_LINK) and (found := facts(process)):
                    descriptor = os.open(f"{folder}/{name}", os.O_RDWR | os.O_CLOEXEC)
                    return CounterPage(process, descriptor, found.started)
    return None
