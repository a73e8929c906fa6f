"""Names of the threads in a timeline; some have ended when it is written."""

from __future__ import annotations

import threading

#: The name of the thread of the engine, which runs operations in the background.
ENGINE = "kvstore-engine"

_keeps_names = threading.Event()
_ended: dict[int, str] = {}


def keep_names() -> None:
    """Keep names from now on."""
    _keeps_names.set()


def remember() -> None:
    """Keep the name of the calling thread, which may end before the process does."""
    thread = threading.current_thread()
    if _keeps_names.is_set() and thread.native_id is not None:
        _ended[thread.native_id] = thread.name


def names() -> dict[int, str]:
    """Return the names of threads, by the system's number."""
    there = {one.native_id: one.name for one in threading.enumerate() if one.native_id is not None}
    return _ended | there
