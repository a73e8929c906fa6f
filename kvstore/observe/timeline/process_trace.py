"""The trace that one process writes for a timeline: a file in Chrome's format.

`otherData` has all that is known of the process. An event has the fields of `Event`: its kind as its name,
its times in microseconds since `origin`, and the rest in `args`, without those that say nothing.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ...atomic_files import atomic_replacement
from ..events import KINDS, NO_SLICE, NOBODY, PACKED, Event
from ..native._observe import trace_text
from .sources import StoreRecord

FORMAT, VERSION = "kvstore-timeline", 3

_LONGEST = 1 << 60  # ns for which a machine has run, or by which clocks differ: 36 years
_AT_ONCE = 4096 * PACKED.size  # bytes of events that become text together

# Limits of numbers that a process writes, so that all times can be aligned.
Duration = Annotated[float, msgspec.Meta(ge=0, le=_LONGEST / 1000)]
Clock = Annotated[int, msgspec.Meta(ge=-_LONGEST, le=_LONGEST)]
TimeOfDay = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]  # until the year 2116
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]  # of processes of a role


class ProcessTrace(msgspec.Struct, omit_defaults=True, tag=FORMAT, tag_field="format"):
    """The content of the file of a process."""

    version: int  # of this format
    role: str  # "worker", "server" or "scheduler"
    rank: int
    size: Number  # number of processes of its role
    job: str  # the same in all processes of a job
    host: str
    pid: int
    clock: str  # the name of the clock of the events, the same for processes with the same clock; or empty
    monotonic: Clock  # the time of that clock, in ns
    realtime: TimeOfDay  # the time of day at the same moment
    scheduler: Sequence[tuple[Clock, Clock, Clock]]  # each a `ClockSample`, the oldest first
    stores: list[StoreRecord]
    labels: list[str]  # keys of calls: events refer to the first by number 1
    threads: dict[int, str]  # names by the system's number
    overwritten: int = 0  # number of old events that newer ones have replaced in the ring
    workers: Number = 0  # numbers of processes of the job; 0 if no variable gives them to this process
    servers: Number = 0
    origin: Clock = 0  # the time of `clock` to which the times of the file are relative
    events: list[Event] = []

    @property
    def name(self) -> str:
        """The name of its file."""
        host = re.sub(r"[^A-Za-z0-9_.]", "_", self.host)[:64]
        return f"{self.role}-{self.rank}-{host}-{self.pid}.json"


class _About(msgspec.Struct):
    slice: int = NO_SLICE
    round: int = 0
    bytes: int = 0
    whom: int = NOBODY
    store: int = 0


class _TraceEvent(msgspec.Struct):
    name: str
    tid: int
    ts: Duration
    dur: Duration
    args: _About


class _Trace(msgspec.Struct, rename="camel"):
    other_data: ProcessTrace
    trace_events: list[_TraceEvent]


def trace_head(facts: Any) -> bytes:
    """Return the text of a trace before its events, which `TAIL` follows."""
    return b'{"displayTimeUnit":"ms","otherData":' + msgspec.json.encode(facts) + b',"traceEvents":[\n'


#: The text of a trace after its events.
TAIL = b"\n]}\n"
_CHECKSUM = b'\n],"checksum":'  # CRC-32 of the text before it


def write(content: ProcessTrace, folder: Path, packed: bytes = b"") -> Path:
    """Write a file into `folder`, which is made if it is missing, and return its path.

    The file has the events of `content` and those of `packed`, as the ring has them.

    Raises
    ------
    OSError
        The system refuses it. An older file of the process is unchanged.
    """
    os.makedirs(folder, exist_ok=True)
    path = folder / content.name
    packed = b"".join(PACKED.pack(*event, 0) for event in content.events) + packed
    with atomic_replacement(path) as unfinished, unfinished.open("wb") as file:
        checksum = 0
        for text in _trace_texts(content, packed):
            checksum = zlib.crc32(text, checksum)
            file.write(text)
        file.write(b"%b%d}\n" % (_CHECKSUM, checksum))
    return path


def _trace_texts(content: ProcessTrace, packed: bytes) -> Iterator[bytes]:
    yield trace_head(msgspec.structs.replace(content, events=[]))
    for at in range(0, len(packed), _AT_ONCE):
        yield b",\n" * (at > 0) + trace_text(packed[at : at + _AT_ONCE], content.origin, content.pid)


def read_trace(path: Path) -> ProcessTrace:
    """Read a file.

    Raises
    ------
    OSError, ValueError
        It cannot be read; it has another format, another version, or is damaged.
    """
    whole = path.read_bytes()
    text, _, checksum = whole.rpartition(_CHECKSUM)
    try:
        if checksum != b"%d}\n" % zlib.crc32(text):
            raise ValueError
        trace = msgspec.json.decode(whole, type=_Trace)
        kinds = [KINDS.index(one.name) for one in trace.trace_events]
    except ValueError:
        raise ValueError("it is damaged, or another version of kvstore has written it") from None
    content = trace.other_data
    if content.version != VERSION:
        raise ValueError(f"it has version {content.version} of the format, and this kvstore reads {VERSION}")
    events = [
        _event_in(one, kind, content.origin) for one, kind in zip(trace.trace_events, kinds, strict=True)
    ]
    return msgspec.structs.replace(content, events=events)


def _event_in(one: _TraceEvent, kind: int, origin: int) -> Event:
    begin, about = origin + round(one.ts * 1000), one.args
    end = begin + round(one.dur * 1000)
    return Event(begin, end, about.slice, about.round, about.bytes, one.tid, about.whom, kind, about.store)
