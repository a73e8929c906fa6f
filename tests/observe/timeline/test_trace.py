"""Files of processes become a trace, which keeps the rules of its format."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observation.made import MS, file, in_ring, row, sample, store
from observation.trace_rules import broken, loaded

from kvstore.errors import StateFileError
from kvstore.observe.counters import CALLS, CONVERTING, MOVING, SUMMING, WAITING
from kvstore.observe.events import ARRIVED, BACK, BUCKET, CALL, KINDS, LOST, NO_SLICE, NOBODY, STEP, Event
from kvstore.observe.timeline import process_trace
from kvstore.observe.timeline.clocks import ClockSample
from kvstore.observe.timeline.job import chrome
from kvstore.observe.timeline.job.model import job_of, read_job
from kvstore.observe.timeline.process_trace import ProcessTrace
from kvstore.observe.timeline.threads import ENGINE

PUSHPULL = CALLS.index("pushpull")

WORKER = [
    row(CALL, 1, 5, slice=PUSHPULL, round=1, nbytes=12),
    row(CALL, 0.75, 6.5, slice=PUSHPULL, round=2, thread=102),
    row(CALL, 0.8, 7, slice=PUSHPULL, round=3, thread=102),
    row(MOVING, 1.5, 2, slice=0, round=1, nbytes=12),
    row(WAITING, 2, 4.5, slice=0, round=1, whom=1),
    row(WAITING, 4.5, 4.75, slice=1, round=1, whom=-1),
    row(SUMMING, 7, 8, slice=0, round=2, thread=101),
    row(STEP, 1, 5),
    row(BUCKET, 0.5, 2, nbytes=100),
    row(BUCKET, 1, 3, nbytes=200),
]
THREADS = {100: "MainThread", 102: ENGINE}
SERVER = [
    row(ARRIVED, 2, 2, slice=0, round=1, whom=0, nbytes=12),
    row(ARRIVED, 3, 3, slice=0, round=1, whom=1, nbytes=12),
    row(LOST, 8, 8, slice=NO_SLICE, whom=1),
    row(BACK, 9, 9, slice=NO_SLICE, whom=-1),
]


def written(folder: Path, *files: ProcessTrace) -> Path:
    path = folder / "job.json"
    chrome.write_trace(job_of(files), path)
    return path


def test_a_trace_has_calls_with_key_and_bytes_phases_and_whom_they_are_for(tmp_path: Path) -> None:
    base = loaded(written(tmp_path, file(WORKER, threads=THREADS), file(SERVER, role="server")))
    assert broken(base) == {}
    found = base.execute(
        "SELECT p.name, t.name, e.name, cat, ts / 1000, dur / 1000, key, bytes, round, whom FROM event e "
        "JOIN process p USING (pid) JOIN track t USING (pid, tid) ORDER BY at"
    ).fetchall()
    assert found == [
        ("worker 0", "buckets", "bucket", "bucket", 0, 1500, None, 100, None, None),
        ("worker 0", "operations", "pushpull", "call", 250, 5750, "b", None, None, None),
        ("worker 0", "operations (2)", "pushpull", "call", 300, 6200, None, None, None, None),
        ("worker 0", "MainThread", "pushpull", "call", 500, 4000, "w", 12, None, None),
        ("worker 0", "steps", "step", "step", 500, 4000, None, None, None, None),
        ("worker 0", "buckets (2)", "bucket", "bucket", 500, 2000, None, 200, None, None),
        ("worker 0", "MainThread", "moving", "moving", 1000, 500, "w", 12, 1, None),
        ("worker 0", "MainThread", "waiting for worker 1", "waiting", 1500, 2500, "w", None, 1, "worker 1"),
        ("server 0", "arrived from worker 0", "arrived", "arrived", 1500, None, "w", 12, 1, "worker 0"),
        ("server 0", "arrived from worker 1", "arrived", "arrived", 2500, None, "w", 12, 1, "worker 1"),
        ("worker 0", "MainThread", "waiting for server 0", "waiting", 4000, 250, "b", None, 1, "server 0"),
        ("worker 0", "thread 101", "summing", "summing", 6500, 1000, "w", None, 2, None),
        ("server 0", "losses", "worker 1 is lost", "lost", 7500, None, None, None, None, "worker 1"),
        ("server 0", "losses", "server 0 is back", "back", 8500, None, None, None, None, "server 0"),
    ]


def test_parts_wait_at_a_server_until_the_last_of_their_round_is_there(tmp_path: Path) -> None:
    rows = [
        row(ARRIVED, at, at, slice=key, round=round, whom=rank)
        for at, (key, round, rank) in enumerate(
            [(0, 1, 0), (1, 1, 0), (0, 1, 1), (0, 2, 1), (1, 1, 1), (0, 2, 0)]
        )
    ]
    trace = json.loads(written(tmp_path, file(rows, role="server"), file(rows)).read_text())
    curve = [(one["ts"], one["args"]["parts"]) for one in trace["traceEvents"] if one["ph"] == "C"]
    assert curve == [(0, 1), (1000, 2), (2000, 1), (3000, 2), (4000, 1), (5000, 0)]


def test_the_order_of_processes_is_workers_servers_scheduler(tmp_path: Path) -> None:
    files = [
        file([], role="scheduler"), file([], role="server"), file([], rank=1),
        file([], rank=1, pid=7, monotonic=5), file([], rank=0),
    ]  # fmt: skip
    for one in files:
        process_trace.write(one, tmp_path)
    out = tmp_path / "job.json"
    chrome.write_trace(read_job(tmp_path), out)
    names = [name for (name,) in loaded(out).execute("SELECT name FROM process ORDER BY sort_index")]
    assert names == ["worker 0", "worker 1", "worker 1", "server 0", "scheduler"]
    assert read_job(tmp_path).notes == [
        "worker 1 has 2 files: it was started again",
        "no file of server 1: killed, or not written yet, or left on another host",
    ]


def test_a_trace_of_nothing(tmp_path: Path) -> None:
    assert broken(loaded(written(tmp_path, file([])))) == {}


_EVENT = st.tuples(
    st.integers(0, len(KINDS) - 1), st.integers(0, 3000), st.integers(0, 3000), st.integers(100, 102),
    st.integers(-3, 3), st.integers(0, 2),
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(_EVENT, max_size=15), min_size=1, max_size=3), st.integers(-(10**12), 10**12))
def test_any_events_make_a_trace_that_keeps_the_rules(
    tmp_path_factory: pytest.TempPathFactory, processes: list[list[tuple[int, ...]]], offset: int
) -> None:
    files = [
        file(
            [
                row(kind, min(a, b) / 7, max(a, b) / 7, thread=thread, whom=whom, slice=slice)
                for kind, a, b, thread, whom, slice in events
            ],
            rank=rank,
            clock=f"clock {rank}",
            scheduler=[sample(0, offset * rank / MS, 0.1)],
        )
        for rank, events in enumerate(processes)
    ]
    base = loaded(written(tmp_path_factory.mktemp("trace"), *files))
    assert broken(base) == {}
    assert base.execute("SELECT count(*) FROM event").fetchone() == (sum(map(len, processes)),)


def test_other_files_of_the_folder_are_no_processes(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{}")
    with pytest.raises(
        StateFileError, match="has no timeline of any process: run the job with KVSTORE_TIMELINE="
    ):
        read_job(tmp_path)
    process_trace.write(file([], size=1), tmp_path)
    written(tmp_path, file(WORKER))
    process_trace.write(file([], size=1, job="older", realtime=-5, pid=3), tmp_path)
    (tmp_path / "worker-1-a-2.json").write_text('{"format":"kvstore-timeline","version":1')
    process_trace.write(file([], version=99, pid=4), tmp_path)
    job = read_job(tmp_path)
    assert [process.name for process in job.processes] == ["worker 0"]
    assert job.notes == [
        "worker-0-a-4.json is left out: it has version 99 of the format, and this kvstore reads 3",
        "worker-1-a-2.json is left out: it is damaged, or another version of kvstore has written it",
        "1 files of other jobs are left out: only the newest is shown",
    ]


NO_TRACE = "it is damaged, or another version of kvstore has written it"


@pytest.mark.parametrize(
    ("damage", "before", "after"),
    [
        ({"events": [in_ring(WORKER)[0]._replace(end=1 << 62)]}, "", ""),
        ({"events": [in_ring(WORKER)[0]._replace(end=0)]}, "", ""),
        ({}, '"ts":', '"ts":-'),
        ({}, '"name":"moving"', '"name":"nothing"'),
        ({}, '"ph":"X"', '"ph":"X'),
        ({"monotonic": 1 << 62}, "", ""),
        ({"realtime": 1 << 63}, "", ""),
        ({"scheduler": [ClockSample(1, -(1 << 63), 1)]}, "", ""),
        ({"size": 1 << 40}, "", ""),
    ],
)
def test_a_damaged_file_is_left_out_with_a_note(
    tmp_path: Path, damage: dict[str, Any], before: str, after: str
) -> None:
    process_trace.write(file(WORKER), tmp_path)
    path = process_trace.write(file(WORKER, rank=1, pid=7, **damage), tmp_path)
    text, checksum, _ = (
        path.read_bytes().replace(before.encode(), after.encode()).rpartition(b'\n],"checksum":')
    )
    path.write_bytes(b"%b%b%d}\n" % (text, checksum, zlib.crc32(text)))  # damaged before it was written
    job = read_job(tmp_path)
    assert [process.name for process in job.processes] == ["worker 0"]
    assert job.notes == [
        f"worker-1-a-7.json is left out: {NO_TRACE}",
        "no file of worker 1: killed, or not written yet, or left on another host, or left out",
    ]


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    path = process_trace.write(file(WORKER), tmp_path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=NO_TRACE):
            process_trace.read_trace(path)


@pytest.mark.parametrize("most", [True, False])
def test_a_file_has_all_that_an_event_can_have(tmp_path: Path, most: bool) -> None:
    """Of a process with as many events as are written in several pieces."""
    all_of = (1 << 50, 1 << 51, NO_SLICE - 1, NO_SLICE, NO_SLICE, (1 << 32) - 1, -(1 << 31), BUCKET, 65535)
    event = Event(*all_of) if most else Event(0, 0, NO_SLICE, 0, 0, 0, NOBODY, WAITING, 0)
    path = process_trace.write(file([], events=[event] * 5000, origin=1000 * most), tmp_path)
    assert process_trace.read_trace(path).events == [event] * 5000
    assert len(json.loads(path.read_text())["traceEvents"]) == 5000


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    process_trace.write(file(WORKER, size=1), tmp_path)
    os.mkfifo(tmp_path / "fifo.json")
    assert read_job(tmp_path).notes == []


def test_a_copy_of_a_file_is_the_same_process(tmp_path: Path) -> None:
    process_trace.write(file(WORKER, size=1, monotonic=1), tmp_path)
    (tmp_path / "worker-0-a-100.json").rename(tmp_path / "backup.json")
    process_trace.write(file(WORKER, size=1, monotonic=2), tmp_path)
    job = read_job(tmp_path)
    assert [process.file.monotonic for process in job.processes] == [2]
    assert job.notes == ["worker-0-a-100.json and another file are of the same process: the newer one counts"]


def test_ranks_without_a_file_and_lost_events_are_said(tmp_path: Path) -> None:
    process_trace.write(file([], size=4, overwritten=17), tmp_path)
    process_trace.write(file([], rank=2, size=4), tmp_path)
    assert read_job(tmp_path).notes == [
        "no file of worker 1, 3: killed, or not written yet, or left on another host",
        "worker 0 has only its last events: 17 older ones were overwritten",
    ]


def test_of_a_worker_that_was_lost_and_is_back_a_file_is_missing() -> None:
    """Each of the other processes has an event of it."""
    rows = [row(LOST, 1, 1, slice=NO_SLICE, whom=1), row(BACK, 2, 2, slice=NO_SLICE, whom=1)]
    files = [file(rows), file(rows, role="server"), file([], rank=1)]
    told = "worker 1 was lost and is back; there is no file of what it did before"
    assert job_of(files).notes == [told]
    assert job_of([*files, file([], rank=1, pid=7)]).notes == []


def test_a_key_without_a_name_is_a_slice() -> None:
    process = job_of([file([row(CONVERTING, 0, 1, slice=9), row(MOVING, 2, 3, slice=NO_SLICE)])]).processes[0]
    assert [process.key_of(event) for event in process.events] == ["slice 9", ""]
    assert store().slices == {0: "w", 1: "b"}
