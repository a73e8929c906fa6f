"""Kinds of the events that `native` records for a timeline."""

from __future__ import annotations

from typing import NamedTuple

from .counters import PHASES
from .native._observe import NO_SLICE as NO_SLICE
from .native._observe import NOBODY as NOBODY
from .native._observe import events

#: In the order of the enumeration of native/events.h; the phases come first.
KINDS = (*PHASES, "call", "arrived", "lost", "back", "step", "bucket")
CALL, ARRIVED, LOST, BACK, STEP, BUCKET = range(len(PHASES), len(KINDS))


#: The fields of an event in memory, with NumPy's names of their types: `kv_event` of native/events.h.
LAYOUT = (
    ("begin", "<u8"),
    ("end", "<u8"),
    ("slice", "<u8"),
    ("round", "<u8"),
    ("nbytes", "<u8"),
    ("thread", "<u4"),
    ("whom", "<i4"),
    ("kind", "<u2"),
    ("store", "<u2"),
    ("written", "<u4"),
)


class Event(NamedTuple):
    """One event; times are in ns of the monotonic clock of its machine.

    `store` is the number of the store in its process, `thread` the system's; `slice` is the store's own
    number of a key or of a part of it, NO_SLICE of several keys or of none, and of a call its place in
    `counters.CALLS`. `whom` is the rank of a worker, or -1 - the rank of a server.
    """

    kind: int
    store: int
    thread: int
    begin: int
    end: int
    slice: int
    round: int
    nbytes: int
    whom: int


def recorded() -> list[Event]:
    """Return the events that are kept, the oldest first; none where no timeline is recorded."""
    return [Event(*one) for one in events()]
