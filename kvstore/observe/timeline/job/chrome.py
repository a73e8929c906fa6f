"""The trace of a job in Chrome's format, which Perfetto and chrome://tracing open.

Each process of the job is a process of the trace, with a track for each of its threads, for its steps and its
buckets, and for the parts that arrive from each worker. Times are microseconds since the first event of the
job.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ....atomic_files import atomic_replacement
from ...counters import PHASES
from ...events import ARRIVED, BUCKET, CALL, KINDS, LOST, STEP, Event
from ...processes import name_of
from ..process_trace import TAIL, trace_head
from ..threads import ENGINE
from .model import INSTANTS, JobProcess, JobTimeline, name_of_call
from .spans import by_thread, nested_lanes

_Object = dict[str, Any]


def write_trace(job: JobTimeline, path: Path) -> int:
    """Write the trace of a job, and return the number of its events.

    Raises
    ------
    StateFileError
        The system refuses it. An older file is unchanged.
    """
    facts = {"job": job.processes[0].file.job, "notes": job.notes}
    count = 0
    with atomic_replacement(path) as unfinished, unfinished.open("wb") as file:
        file.write(trace_head(facts))
        for count, text in enumerate(map(msgspec.json.encode, _trace_objects(job)), 1):
            file.write(b",\n" + text if count > 1 else text)
        file.write(TAIL)
    return count


def _trace_objects(job: JobTimeline) -> Iterator[_Object]:
    """Yield the objects that name processes and tracks, then events by their time, outer spans first."""
    found: list[Iterator[_Object]] = []
    for pid, process in enumerate(job.processes, 1):
        tracks = _process_tracks(process)
        yield from _name_objects(pid, process, [name for name, _ in tracks])
        found += (_event_objects(pid, tid, process, events) for tid, (_, events) in enumerate(tracks, 1))
        found.append(_queue_objects(pid, process))
    yield from heapq.merge(*found, key=lambda one: one["ts"])


def _process_tracks(process: JobProcess) -> list[tuple[str, list[Event]]]:
    """Return the name and the events of each track; spans that are not nested need several tracks."""
    file, found = process.file, list[tuple[str, list[Event]]]()
    engine = {thread for thread, name in file.threads.items() if name == ENGINE}
    operations: list[Event] = []  # they last longer than the engine's thread works on them
    others: list[Event] = []
    for event in process.spans():
        (operations if event.kind == CALL and event.thread in engine else others).append(event)
    threads = sorted(
        by_thread(others).items(), key=lambda one: (one[0] != file.pid, one[0])
    )  # first the main thread
    tracks = [
        (file.threads.get(one, "main" if one == file.pid else f"thread {one}"), of) for one, of in threads
    ]
    tracks += [("operations", operations)]
    tracks += [(f"{KINDS[kind]}s", process.spans(frozenset((kind,)))) for kind in (STEP, BUCKET)]
    for name, events in tracks:
        for nth, lane in enumerate(nested_lanes(events), 1):
            found.append((name if nth == 1 else f"{name} ({nth})", [span.event for span in lane]))
    instants: dict[str, list[Event]] = defaultdict(list)
    for event in process.spans(INSTANTS):
        instants[f"arrived from {name_of(event.whom)}" if event.kind == ARRIVED else "losses"].append(event)
    return [*found, *instants.items()]


def _name_objects(pid: int, process: JobProcess, tracks: Sequence[str]) -> Iterator[_Object]:
    """Yield the objects that name a process and its tracks."""
    about = f"{process.file.host}, process {process.file.pid}"
    rows: list[tuple[str, int, _Object]] = [
        ("process_name", 0, {"name": process.name}),
        ("process_labels", 0, {"labels": about}),
        ("process_sort_index", 0, {"sort_index": pid}),
    ]
    for tid, name in enumerate(tracks, 1):
        rows += [("thread_name", tid, {"name": name}), ("thread_sort_index", tid, {"sort_index": tid})]
    for kind, tid, args in rows:
        yield {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}


def _event_objects(pid: int, tid: int, process: JobProcess, events: Sequence[Event]) -> Iterator[_Object]:
    """Yield the objects of the events of a track."""
    for event in events:
        about = {
            "key": process.key_of(event),
            "bytes": event.nbytes,
            "round": 0 if event.kind == CALL else event.round,
            "whom": name_of(event.whom),
        }
        own: _Object = {"ph": "X", "dur": event.ns / 1000}
        if event.kind in INSTANTS:
            own = {"ph": "i", "s": "t" if event.kind == ARRIVED else "g"}
        yield {
            **own, "pid": pid, "tid": tid, "name": _event_name(event), "cat": KINDS[event.kind],
            "ts": event.begin / 1000, "args": {name: value for name, value in about.items() if value},
        }  # fmt: skip


def _queue_objects(pid: int, process: JobProcess) -> Iterator[_Object]:
    """Yield the number of parts at a server that wait for the last part of their round."""
    arrived = process.spans(frozenset((ARRIVED,))) if process.file.role == "server" else []
    last = {(event.store, event.slice, event.round): event for event in arrived}
    waiting: Counter[tuple[int, int, int]] = Counter()
    parts = 0
    for event in arrived:
        round_ = event.store, event.slice, event.round
        waiting[round_] += 1
        parts += 1 if last[round_] is not event else 1 - waiting.pop(round_)
        yield {
            "ph": "C", "pid": pid, "tid": 0, "name": "parts that wait", "cat": "queue",
            "ts": event.begin / 1000, "args": {"parts": parts},
        }  # fmt: skip


def _event_name(event: Event) -> str:
    """Name a span or an instant: with few names, so that a viewer can add them up."""
    whom = name_of(event.whom)
    if event.kind == CALL:
        return name_of_call(event)
    if event.kind < len(PHASES):
        return f"{PHASES[event.kind]} for {whom}" if whom else PHASES[event.kind]
    if event.kind in (INSTANTS - {ARRIVED}):
        return f"{whom} is {'lost' if event.kind == LOST else 'back'}"
    return KINDS[event.kind]
