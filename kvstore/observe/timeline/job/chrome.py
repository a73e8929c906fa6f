"""The trace of a job in Chrome's format, which Perfetto and chrome://tracing open.

Each process of the job is a process of the trace, with a track for each of its threads, for its steps and its
buckets, and for the parts that arrive from each worker. Times are microseconds since the first event of the
job.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ....files import replacing
from ...counters import PHASES
from ...events import ARRIVED, BUCKET, CALL, KINDS, LOST, STEP, Event
from ...processes import name_of
from ..process_trace import TAIL, head
from ..threads import ENGINE
from .model import INSTANTS, JobProcess, JobTimeline, name_of_call
from .nesting import Span, by_thread, lanes


def write(job: JobTimeline, path: Path) -> int:
    """Write the trace of a job, and return the number of its events.

    Raises
    ------
    StateFileError
        The system refuses it. An older file is unchanged.
    """
    facts = {"job": job.processes[0].file.job, "notes": job.notes}
    count = 0
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        file.write(head(facts))
        for count, text in enumerate(map(msgspec.json.encode, events(job)), 1):
            file.write(b",\n" + text if count > 1 else text)
        file.write(TAIL)
    return count


def events(job: JobTimeline) -> Iterator[dict[str, Any]]:
    """Yield the events of the trace: those that name processes and tracks, then the rest by their time."""
    tracks = [_Tracks(number, process) for number, process in enumerate(job.processes, 1)]
    for one in tracks:
        yield from one.names()
    yield from heapq.merge(*(one.events() for one in tracks), key=lambda event: event["ts"])


class _Tracks:
    """One process, and its tracks."""

    def __init__(self, number: int, process: JobProcess) -> None:
        self._process, self._pid = process, number
        self._names: list[str] = []
        self._lanes: list[list[Span]] = []
        self._instants: list[tuple[int, Event]] = []
        for name, found in self._by_track():
            for nth, lane in enumerate(lanes(found), 1):
                self._names.append(name if nth == 1 else f"{name} ({nth})")
                self._lanes.append(lane)
        self._add_instants()

    def _by_track(self) -> Iterator[tuple[str, list[Event]]]:
        file = self._process.file
        engine = {thread for thread, name in file.threads.items() if name == ENGINE}
        operations: list[Event] = []  # they last longer than the engine's thread works on them
        others: list[Event] = []
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
        """Yield the events that name the process and its tracks."""
        file = self._process.file
        yield self._named("process_name", 0, name=self._process.name)
        yield self._named("process_labels", 0, labels=f"{file.host}, process {file.pid}")
        yield self._named("process_sort_index", 0, sort_index=self._pid)
        for tid, name in enumerate(self._names, 1):
            yield self._named("thread_name", tid, name=name)
            yield self._named("thread_sort_index", tid, sort_index=tid)

    def _named(self, kind: str, tid: int, **what: object) -> dict[str, Any]:
        return {"ph": "M", "pid": self._pid, "tid": tid, "name": kind, "args": what}

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the other events by their time; of spans that begin together, the outer ones first."""
        found = [self._spans(tid, lane) for tid, lane in enumerate(self._lanes, 1)]
        instants = (self._instant(tid, event) for tid, event in self._instants)
        return heapq.merge(*found, instants, self._queue(), key=lambda event: event["ts"])

    def _queue(self) -> Iterator[dict[str, Any]]:
        """Yield the number of parts at a server that wait for the last part of their round."""
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
            yield {"ph": "X", **self._common(tid, span.event), "dur": span.event.ns / 1000}

    def _instant(self, tid: int, event: Event) -> dict[str, Any]:
        return {"ph": "i", **self._common(tid, event), "s": "t" if event.kind == ARRIVED else "g"}

    def _common(self, tid: int, event: Event) -> dict[str, Any]:
        about = {
            "key": self._process.key_of(event),
            "bytes": event.nbytes,
            "round": 0 if event.kind == CALL else event.round,
            "whom": name_of(event.whom),
        }
        return {
            "pid": self._pid, "tid": tid, "name": _name(event), "cat": KINDS[event.kind],
            "ts": event.begin / 1000, "args": {name: value for name, value in about.items() if value},
        }  # fmt: skip


def _name(event: Event) -> str:
    """Name a span or an instant: with few names, so that a viewer can add them up."""
    whom = name_of(event.whom)
    if event.kind == CALL:
        return name_of_call(event)
    if event.kind < len(PHASES):
        return f"{PHASES[event.kind]} for {whom}" if whom else PHASES[event.kind]
    if event.kind in (INSTANTS - {ARRIVED}):
        return f"{whom} is {'lost' if event.kind == LOST else 'back'}"
    return KINDS[event.kind]
