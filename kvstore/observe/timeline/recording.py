"""KVSTORE_TIMELINE: this process records its events, and writes them to a file in that folder.

It writes when its last store is closed, when it ends, also by SIGTERM or SIGHUP, and on SIGUSR1. A process
that is killed leaves the file that it has written before.
"""

from __future__ import annotations

import _thread
import atexit
import functools
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from ...errors import ConfigError, KVStoreError
from ...settings.environment import text_of
from ...settings.launchers import WorkerPlacement, detect_placement
from ..native._observe import packed_events, record_events, recorded, take_times
from ..signals import call_on_signal
from . import labels, threads
from .clocks import SchedulerClock, both_clocks, name_of_clock
from .sources import StoreRecord

_EVENTS = 1 << 18  # of 56 bytes each; pages of the ring that no event has reached are not touched
_PATIENCE = 30.0  # seconds until another thread must have written its file
_LAST_WORDS = 10.0  # seconds that a signal which ends the process waits for the file
_ENDING = (signal.SIGTERM, signal.SIGHUP)  # Ctrl-C raises an exception, and the end is orderly

_T = TypeVar("_T")

log = logging.getLogger("kvstore")


class TimelineRecorder:
    """The open stores of a process, the records of its closed stores, and the file to which it writes."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder).absolute()  # the program may change its directory
        self.clock = SchedulerClock()
        self.writer = 0  # the thread that writes
        #: Each with the function that describes it.
        self.open_stores: weakref.WeakKeyDictionary[Any, Callable[[Any], StoreRecord]] = (
            weakref.WeakKeyDictionary()
        )
        self._records: dict[int, StoreRecord] = {}
        self._writing = threading.RLock()
        self._written = -1

    def keep_record(self, source: Any, describe: Callable[[Any], StoreRecord]) -> None:
        """Keep the record of a store as it is now."""
        for _ in range(3):
            with suppress(Exception):  # another thread may add a key at the same time
                record = describe(source)
                self._records[record.number] = record
                return

    def write(self, again: bool = True) -> None:
        """Write the file; without `again`, only if there are new events."""
        if not self._writing.acquire(timeout=_PATIENCE):
            return
        try:
            if self.writer:  # a signal that ends the process has interrupted this thread
                return
            self.writer = threading.get_ident()
            try:
                self._write_file(again)
            finally:
                self.writer = 0
        finally:
            self._writing.release()
        if _ended_by and threading.current_thread() is threading.main_thread():
            _end_by_signal(_ended_by[0])

    def _write_file(self, again: bool) -> None:
        for source, describe in list(self.open_stores.items()):
            self.keep_record(source, describe)
        events = recorded()
        if not self._records or (events == self._written and not again):
            return
        from . import process_trace

        self._written, began = events, time.monotonic()
        try:
            packed = packed_events()
            path = process_trace.write(self._trace_head(events, packed), self.folder, packed)
        except (OSError, KVStoreError, MemoryError) as error:
            log.warning("the timeline of this process is not written to %s: %s", self.folder, error)
            return
        log.info("timeline: %d events written to %s in %.2f s", events, path, time.monotonic() - began)

    def _trace_head(self, events: int, packed: bytes) -> Any:
        """Return the trace without events; `events` is the number of those that were recorded."""
        import socket

        import numpy as np

        from ..events import PACKED
        from .process_trace import VERSION, ProcessTrace

        records = [self._records[number] for number in sorted(self._records)]
        store, place = max(records, key=lambda record: record.size), _job_place()
        rank, size = store.rank, store.size
        if store.role == "worker" and place is not None and place.size > size:
            rank, size = place.rank, place.size  # `local` stores side by side
        monotonic, realtime = both_clocks()
        begins = np.frombuffer(packed, np.uint64)[:: PACKED.size // 8]
        return ProcessTrace(
            version=VERSION, role=store.role, rank=rank, size=size,
            job=next((one.job for one in records if one.job), place.job if place else ""),
            host=socket.gethostname(), pid=os.getpid(),
            clock=name_of_clock(), monotonic=monotonic, realtime=realtime, scheduler=self.clock.samples,
            stores=records, labels=labels.texts(), threads=threads.names(),
            workers=_process_count("num_workers"), servers=_process_count("num_servers"),
            overwritten=max(0, events - len(begins)), origin=int(begins.min(initial=monotonic)),
        )  # fmt: skip


_recorder: TimelineRecorder | None = None
_begun = False
_ended_by: list[int] = []  # the signal that ends this process; a second one does not wait


def start() -> TimelineRecorder | None:
    """Record from now on if the variable is set, and return the recorder.

    A process calls this before it makes a store, or serves. A later call changes nothing.
    """
    global _recorder, _begun
    folder = "" if _begun else os.path.expanduser(text_of("timeline").strip())
    _begun = True
    if folder:
        try:
            record_events(_EVENTS)
        except MemoryError as error:
            log.warning("no timeline is recorded: %s", error)
            return None
        take_times()
        _recorder = TimelineRecorder(folder)
        threads.keep_names()
        atexit.register(write)
        os.register_at_fork(after_in_child=_after_fork)
    return _recorder


def follow(source: _T, describe: Callable[[_T], StoreRecord]) -> None:
    """Add a store, or a server, to the timeline of this process, if it has one.

    Call it when a store is made, or a process begins to serve; again when its rank is known.

    Parameters
    ----------
    source : object
        It is held weakly.
    describe : callable
        Describes `source`. It acquires no lock and does not wait: a signal may interrupt any line.
    """
    recorder = start()
    if recorder is not None:
        recorder.open_stores[source] = describe
        recorder.keep_record(source, describe)
        call_on_signal(signal.SIGUSR1, _write_in_thread)
        if threading.current_thread() is threading.main_thread():  # only this thread can restore the handler
            for number in _ENDING:
                call_on_signal(number, functools.partial(_write_and_end, number))


def finish(source: Any) -> None:
    """Keep the record of a store that is about to be closed."""
    if _recorder is not None and (describe := _recorder.open_stores.pop(source, None)):
        _recorder.keep_record(source, describe)


def write_if_last() -> None:
    """Write if no store is open."""
    if _recorder is not None and not _recorder.open_stores:
        _recorder.write()


def write() -> None:
    """Write if there are new events: this process ends."""
    if _recorder is not None:
        _recorder.write(again=False)


def clock() -> SchedulerClock | None:
    """Return the comparison with the scheduler's clock; None if no timeline is recorded."""
    recorder = start()
    return None if recorder is None else recorder.clock


def _after_fork() -> None:
    """Make a new recorder in a child: stores, and a lock that may stay locked, are the parent's."""
    global _recorder
    if _recorder is not None:
        _recorder = TimelineRecorder(str(_recorder.folder))
        _ended_by.clear()


def _write_in_thread(again: bool = True) -> threading.Event:
    """Write in another thread: the signal may have interrupted this one while it holds a lock of a logger."""
    written = threading.Event()

    def run() -> None:
        if _recorder is not None:
            _recorder.write(again)
        written.set()

    _thread.start_new_thread(run, ())
    return written


def _write_and_end(number: int) -> None:
    """Write, and end the process by the signal."""
    if not _ended_by and _recorder is not None:
        _ended_by.append(number)
        if _recorder.writer == threading.get_ident():
            return  # `write`, which the signal has interrupted, ends the process
        _write_in_thread(again=False).wait(_LAST_WORDS)
    _end_by_signal(number)


def _end_by_signal(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _process_count(name: str) -> int:
    """Return the number of processes of a role by its variable; 0 if it is not set."""
    text = text_of(name)
    return int(text) if text.isdecimal() and len(text) < 7 else 0


def _job_place() -> WorkerPlacement | None:
    try:
        return detect_placement()
    except ConfigError:  # the code that needs the job reports it
        return None
