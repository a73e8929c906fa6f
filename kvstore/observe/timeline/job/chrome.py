"""The trace of a job in Chrome's format, which Perfetto and chrome://tracing open.

Each process is one of the trace, with a track for each of its threads, for its steps and its buckets, and
for the parts that arrive from each worker. Times are microseconds since the first event of the job.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ....files import replacing
from ...counters import PHASES
from ...events import ARRIVED, BUCKET, CALL, KINDS, LOST, STEP
from ..threads import ENGINE
from .model import INSTANTS, JobEvent, JobProcess, JobTimeline, name_of, name_of_call
from .nesting import Span, by_thread, lanes

_FIRST_SERVER, _FIRST_SCHEDULER = 10_000, 20_000  # in the order of processes
_AT_ONCE = 4096  # events that are written together


def write(job: JobTimeline, path: Path) -> int:
    """Write the trace of a job, and return the number of its events.

    Raises
    ------
    StateFileError
        The system refuses it. An older file is unchanged.
    """
    encode = msgspec.json.Encoder().encode
    count, between = 0, b""
    with replacing(path) as beside, beside.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":' + encode(_facts(job)) + b',"traceEvents":[\n')
        encoded = map(encode, events(job))
        while batch := list(itertools.islice(encoded, _AT_ONCE)):
            file.write(between + b",\n".join(batch))
            count, between = count + len(batch), b",\n"
        file.write(b"\n]}\n")
    return count


def events(job: JobTimeline) -> Iterator[dict[str, Any]]:
    """Yield the events of the trace: those that name processes and tracks first, the others by their time."""
    tracks = [_Tracks(number, process) for number, process in enumerate(job.processes, 1)]
    for one in tracks:
        yield from one.names()
    yield from heapq.merge(*(one.events() for one in tracks), key=lambda event: event["ts"])


def _facts(job: JobTimeline) -> dict[str, Any]:
    first = job.processes[0].file
    return {"job": first.job, "notes": job.notes}


class _Tracks:
    """One process, and its tracks."""

    def __init__(self, number: int, process: JobProcess) -> None:
        self._process, self._pid = process, number
        self._names: list[str] = []
        self._lanes: list[list[Span]] = []
        self._instants: list[tuple[int, JobEvent]] = []
        for name, found in self._by_track():
            for nth, lane in enumerate(lanes(found), 1):
                self._names.append(name if nth == 1 else f"{name} ({nth})")
                self._lanes.append(lane)
        self._add_instants()

    def _by_track(self) -> Iterator[tuple[str, list[JobEvent]]]:
        file = self._process.file
        engine = {thread for thread, name in file.threads.items() if name == ENGINE}
        operations: list[
            JobEvent
        ] = []  # they are under way for longer than the engine's thread works on them
        others: list[JobEvent] = []
        for event in self._process.spans():
            (operations if event.kind == CALL and event.thread in engine else others).append(event)
        threads = by_thread(others)
        for thread in sorted(threads, key=lambda one: (one != file.pid, one)):  # the main thread first
            name = "main" if thread == file.pid else f"thread {thread}"
            yield file.threads.get(thread, name), threads[thread]
        yield "operations", operations
        for name, kind in (("steps", STEP), ("buckets", BUCKET)):
            yield name, self._process.spans(frozenset((kind,)))

    def _add_instants(self) -> None:
        tracks: dict[str, int] = {}
        for event in self._process.spans(INSTANTS):
            name = f"arrived from {name_of(event.whom)}" if event.kind == ARRIVED else "losses"
            if name not in tracks:
                tracks[name] = len(self._names) + 1
                self._names.append(name)
            self._instants.append((tracks[name], event))

    def names(self) -> Iterator[dict[str, Any]]:
        """Yield what names process and tracks."""
        file = self._process.file
        first = {"server": _FIRST_SERVER, "scheduler": _FIRST_SCHEDULER}.get(file.role, 0)
        yield self._named("process_name", 0, {"name": self._process.name})
        yield self._named("process_labels", 0, {"labels": f"{file.host}, process {file.pid}"})
        yield self._named("process_sort_index", 0, {"sort_index": first + self._pid})
        for tid, name in enumerate(self._names, 1):
            yield self._named("thread_name", tid, {"name": name})
            yield self._named("thread_sort_index", tid, {"sort_index": tid})

    def _named(self, name: str, tid: int, what: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "pid": self._pid, "tid": tid, "name": name, "args": what}

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield all others, by their time; the outer ones of spans that begin together first."""
        found = [self._spans(tid, lane) for tid, lane in enumerate(self._lanes, 1)]
        instants = map(self._instant, self._instants)
        return heapq.merge(*found, instants, self._queue(), key=lambda event: event["ts"])

    def _queue(self) -> Iterator[dict[str, Any]]:
        """Yield how many parts wait at a server for the others of their round."""
        arrived = self._process.spans(frozenset((ARRIVED,))) if self._process.file.role == "server" else []
        last = {(event.store, event.slice, event.round): event for event in arrived}
        waiting: Counter[tuple[int, int, int]] = Counter()
        parts = 0
        for event in arrived:
            round_ = event.store, event.slice, event.round
            waiting[round_] += 1
            parts += 1 if last[round_] is not event else 1 - waiting.pop(round_)
            yield {
                "ph": "C", "pid": self._pid, "tid": 0, "name": "parts that wait", "cat": "queue",
                "ts": event.begin / 1000, "args": {"parts": parts},
            }  # fmt: skip

    def _spans(self, tid: int, lane: list[Span]) -> Iterator[dict[str, Any]]:
        for span in lane:
            event = span.event
            yield {
                "ph": "X", "pid": self._pid, "tid": tid, "name": _name(event), "cat": KINDS[event.kind],
                "ts": event.begin / 1000, "dur": event.ns / 1000,
                "args": self._about(event),
            }  # fmt: skip

    def _instant(self, one: tuple[int, JobEvent]) -> dict[str, Any]:
        tid, event = one
        return {
            "ph": "i", "pid": self._pid, "tid": tid, "name": _name(event), "cat": KINDS[event.kind],
            "ts": event.begin / 1000, "s": "t" if event.kind == ARRIVED else "g",
            "args": self._about(event),
        }  # fmt: skip

    def _about(self, event: JobEvent) -> dict[str, Any]:
        facts = {
            "key": self._process.key_of(event),
            "bytes": event.nbytes,
            "round": 0 if event.kind == CALL else event.round,
            "whom": name_of(event.whom),
        }
        return {name: value for name, value in facts.items() if value}


def _name(event: JobEvent) -> str:
    """Name a span or an instant: with few names, so that a viewer can add them up."""
    whom = name_of(event.whom)
    if event.kind == CALL:
        return name_of_call(event)
    if event.kind < len(PHASES):
        return f"{PHASES[event.kind]} for {whom}" if whom else PHASES[event.kind]
    if event.kind == ARRIVED:
        return "arrived"
    if event.kind in INSTANTS:
        return f"{whom} is {'lost' if event.kind == LOST else 'back'}"
    return KINDS[event.kind]
