"""The pages of counters of processes of this machine: a memfd with a known name."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.observe.native._observe import PAGE_MAGIC, PAGE_NAME, PAGE_VERSION, ask_for_times, now, read_page
from kvstore.observe.processes import memfds

_HEAD = struct.Struct("=8sII")  # as kv_page begins: magic, version, process


class CounterPage(NamedTuple):
    """The page of one process; `is_readable` is False if it has the layout of another version."""

    process: int
    path: Path
    is_readable: bool

    def stores(self) -> list[dict[str, Any]]:
        """Read the counters of its stores; none if the process has ended."""
        with suppress(OSError), self.path.open("rb") as file:
            return read_page(file.fileno()) if self.is_readable else []
        return []

    def ask_for_times(self, seconds: float) -> None:
        """Have the process take times for some seconds."""
        with suppress(OSError), self.path.open("r+b", buffering=0) as file:
            if self.is_readable:
                ask_for_times(file.fileno(), now() + int(seconds * 1e9))


def counter_pages() -> list[CounterPage]:
    """Find all pages that this user may open."""
    found: dict[int, CounterPage] = {}  # by the memfd: a child has that of its parent between fork and exec
    for process, path in memfds(PAGE_NAME):
        with suppress(OSError), path.open("rb") as file:
            magic, version, owner = _HEAD.unpack(file.read(_HEAD.size).ljust(_HEAD.size, b"\0"))
            memfd = os.fstat(file.fileno()).st_ino
            if memfd not in found or owner == process:
                is_readable = magic.rstrip(b"\0") == PAGE_MAGIC and version == PAGE_VERSION
                found[memfd] = CounterPage(process, path, is_readable)
    return sorted(found.values())
