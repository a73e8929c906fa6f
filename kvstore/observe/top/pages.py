"""The pages of counters of processes of this machine: a memfd with a known name."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.observe.native._observe import PAGE_NAME, ask_for_times, now, read_page
from kvstore.observe.processes import memfds


class CounterPage(NamedTuple):
    """The page of a process at one moment, in ns; `stores` is None if another version has written it."""

    process: int
    path: Path
    at: int
    stores: list[dict[str, Any]] | None

    def ask_for_times(self, seconds: float) -> None:
        """Have the process take times for some seconds."""
        with suppress(OSError), self.path.open("r+b", buffering=0) as file:
            ask_for_times(file.fileno(), now() + int(seconds * 1e9))


def counter_pages() -> list[CounterPage]:
    """Read all pages that this user may open."""
    found: dict[int, CounterPage] = {}  # by the memfd: a child has that of its parent between fork and exec
    for process, path in memfds(PAGE_NAME):
        with suppress(OSError), path.open("rb") as file:
            owner, stores = read_page(file.fileno()) or (process, None)
            memfd = os.fstat(file.fileno()).st_ino
            if memfd not in found or owner == process:
                found[memfd] = CounterPage(process, path, now(), stores)
    return sorted(found.values(), key=lambda page: page.process)
