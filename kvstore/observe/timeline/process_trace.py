"""The trace that one process writes for a timeline: a file in Chrome's format.

`otherData` has all that is known of the process. An event has the fields of `Event`: its kind as its name,
its times in microseconds since `origin`, and the rest in `args`.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ...atomic_files import atomic_replacement
from ...errors import StateFileError
from ..events import KINDS, Event
from .clocks import ClockSample
from .sources import StoreRecord

FORMAT, VERSION = "kvstore-timeline", 2

_LONGEST = 1 << 60  # ns for which a machine has run, or by which clocks differ: 36 years
_TIME_OF_DAY = 1 << 62  # ns: the year 2116
_MOST = 1 << 24  # processes of a role
_AT_ONCE = 4096  # events that are encoded together
_CHECKSUM = b'{"checksum":"%08x",'
_DAMAGED = "it is damaged: it has numbers that no process writes"

Time = Annotated[float, msgspec.Meta(ge=0, le=_LONGEST / 1000)]


class ProcessTrace(msgspec.Struct, omit_defaults=True, tag=FORMAT, tag_field="format"):
    """The content of the file of a process."""

    version: int  # of this format
    role: str  # "worker", "server" or "scheduler"
    rank: int
    size: int  # number of processes of its role
    job: str  # the same in all processes of a job
    host: str
    pid: int
    clock: str  # the name of the clock of the events, the same for processes with the same clock; or empty
    monotonic: int  # the time of that clock, in ns
    realtime: int  # the time of day at the same moment
    scheduler: list[ClockSample]  # comparisons with the scheduler's clock, the oldest first
    stores: list[StoreRecord]
    labels: list[str]  # keys of calls: events refer to the first by number 1
    threads: dict[int, str]  # names by the system's number
    overwritten: int = 0  # number of old events that newer ones have replaced in the ring
    workers: int = 0  # numbers of processes of the job; 0 if no variable gives them to this process
    servers: int = 0
    origin: int = 0  # the time of `clock` to which the times of the file are relative
    events: list[Event] = []

    @property
    def name(self) -> str:
        """The name of its file."""
        host = re.sub(r"[^A-Za-z0-9_.]", "_", self.host)[:64]
        return f"{self.role}-{self.rank}-{host}-{self.pid}.json"


class _About(msgspec.Struct):
    slice: int
    round: int
    bytes: int
    whom: int
    store: int


class _TraceEvent(msgspec.Struct):
    name: str
    tid: int
    ts: Time
    dur: Time
    args: _About


class _Trace(msgspec.Struct, rename="camel"):
    other_data: ProcessTrace
    trace_events: list[_TraceEvent]


def encoded(facts: Any, events: Iterable[Any]) -> Iterator[bytes]:
    """Yield the text of a trace in pieces, without its first character."""
    encode = msgspec.json.Encoder().encode
    yield b'"displayTimeUnit":"ms","otherData":' + encode(facts) + b',"traceEvents":[\n'
    between, each = b"", map(encode, events)
    while batch := list(islice(each, _AT_ONCE)):
        yield between + b",\n".join(batch)
        between = b",\n"
    yield b"\n]}\n"


def write(content: ProcessTrace, folder: Path, events: Iterable[Event] = ()) -> Path:
    """Write a file into `folder`, which is made if it is missing, and return its path.

    The file has the events of `content` and `events`, which are encoded one after the other: they can be more
    than there is memory for.

    Raises
    ------
    OSError
        The system refuses it. An older file of the process is unchanged.
    """
    os.makedirs(folder, exist_ok=True)
    path = folder / content.name
    facts, checksum = msgspec.structs.replace(content, events=[]), 0
    rows = (_as_object(event, content) for event in chain(content.events, events))
    with atomic_replacement(path) as beside, beside.open("wb") as file:
        file.write(_CHECKSUM % 0)
        for piece in encoded(facts, rows):
            checksum = zlib.crc32(piece, checksum)
            file.write(piece)
        file.seek(0)
        file.write(_CHECKSUM % checksum)
    return path


def _as_object(event: Event, content: ProcessTrace) -> dict[str, Any]:
    return {
        "ph": "X", "pid": content.pid, "tid": event.thread, "name": KINDS[event.kind],
        "ts": (event.begin - content.origin) / 1000, "dur": event.ns / 1000,
        "args": {
            "slice": event.slice, "round": event.round, "bytes": event.nbytes, "whom": event.whom,
            "store": event.store,
        },
    }  # fmt: skip


def read(path: Path) -> ProcessTrace:
    """Read a file.

    Raises
    ------
    OSError, ValueError, StateFileError
        It cannot be read; it has another format, another version, or a wrong checksum.
    """
    data = path.read_bytes()
    body = data[len(_CHECKSUM % 0) :]
    if data != _CHECKSUM % zlib.crc32(body) + body:
        raise StateFileError(
            "its checksum is wrong: it is damaged, or another version of kvstore has written it"
        )
    try:
        trace = msgspec.json.decode(b"{" + body, type=_Trace)
    except msgspec.ValidationError:
        raise ValueError(_DAMAGED) from None
    content = trace.other_data
    if content.version != VERSION:
        raise ValueError(f"it has version {content.version} of the format, and this kvstore reads {VERSION}")
    if not _is_possible(content):
        raise ValueError(_DAMAGED)
    numbers = {name: kind for kind, name in enumerate(KINDS)}
    events = [_event(one, numbers.get(one.name, -1), content.origin) for one in trace.trace_events]
    return msgspec.structs.replace(content, events=[one for one in events if one.kind >= 0])


def _event(one: _TraceEvent, kind: int, origin: int) -> Event:
    begin, about = origin + round(one.ts * 1000), one.args
    end = begin + round(one.dur * 1000)
    return Event(begin, end, about.slice, about.round, about.bytes, one.tid, about.whom, kind, about.store)


def _is_possible(content: ProcessTrace) -> bool:
    """Whether all times can be aligned."""
    times = (content.monotonic, content.origin, *chain.from_iterable(content.scheduler))
    return (
        all(abs(time) <= _LONGEST for time in times)
        and abs(content.realtime) <= _TIME_OF_DAY
        and max(content.size, content.workers, content.servers) <= _MOST
    )
