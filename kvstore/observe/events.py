"""The events that `native` records for a timeline."""

from __future__ import annotations

import struct
from typing import NamedTuple

from .counters import PHASES
from .native._observe import KINDS as KINDS
from .native._observe import NO_SLICE as NO_SLICE
from .native._observe import NOBODY as NOBODY
from .native._observe import packed_events

CALL, ARRIVED, LOST, BACK, STEP, BUCKET = range(len(PHASES), len(KINDS))

#: An event in memory: `kv_event` of native/events.h. Its last field is no part of `Event`.
PACKED = struct.Struct("<5QIi2HI")


class Event(NamedTuple):
    """One event; times are in ns of the monotonic clock of its machine.

    `slice` is the store's own number of a key or of a part of it, NO_SLICE for several keys or none; for a
    call it is the index in `counters.CALLS`, and `round` is the number of its keys in `timeline.labels`.
    `thread` is the system's number, `whom` the rank of a worker, or -1 - the rank of a server, and `store`
    the number of the store in its process.
    """

    begin: int
    end: int
    slice: int
    round: int
    nbytes: int
    thread: int
    whom: int
    kind: int
    store: int

    @property
    def ns(self) -> int:
        """The length of the event."""
        return self.end - self.begin


def recorded() -> list[Event]:
    """Return the events in the ring, the oldest first; none if no timeline is recorded."""
    return [Event(*fields[:-1]) for fields in PACKED.iter_unpack(packed_events())]
