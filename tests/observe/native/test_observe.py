"""The counters of a process, the page that other processes read, and the ring of events."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import pace
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observation.pages import page_of

from kvstore.observe.counters import (
    CALLS,
    FRAME,
    MEMORY,
    MOVING,
    PHASES,
    SHARED,
    WAITING,
    WAYS,
    end_of,
    quantile,
    seconds_of,
    waits_of,
)
from kvstore.observe.native import _observe as native


@pytest.fixture
def counters() -> native.Counters:
    return native.Counters("a store", "a job", 1, 4)


def pages(pid: int) -> list[dict[str, Any]]:
    descriptor = os.open(page_of(pid), os.O_RDONLY)
    try:
        owner, stores = native.read_page(descriptor) or (0, [])
        assert owner == pid
        return stores
    finally:
        os.close(descriptor)


def run(code: str) -> str:
    """Run in a process of its own: events, once they are recorded, are to its end."""
    text = (
        "from kvstore.observe import events\nfrom kvstore.observe.native import _observe as native\n" + code
    )
    ended = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=pace.seconds(100), check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# ------------------------------------------------------------------------------------------------ counters


def test_what_is_counted_is_read(counters: native.Counters) -> None:
    for call in (0, 1, 1, len(CALLS), 10**6):
        counters.count(call)
    counters.hold(2, 30)
    counters.hold_more(1, 5)
    counters.move(SHARED, 7, 8)
    counters.move(SHARED, 1, 0)
    counters.move(len(WAYS), 9, 9)
    counters.end_rounds(4)
    counters.lose(3)
    counters.passed(MOVING, 0, FRAME, 10, 20, 2)
    found = counters.read()
    assert (found["store"], found["rank"], found["size"]) == ("a store", 1, 4)
    assert found["job"] == native.job_id("a job")
    assert (found["keys"], found["nbytes"], found["rounds"], found["losses"]) == (3, 35, 6, 1)
    assert found["calls"] == [1, 2, 0, 0, 0, 0]
    assert found["sent"] == [0, 8, 0, 10]
    assert found["received"] == [0, 8, 0, 20]
    assert set(found["ns"]) == set(found["spans"]) == set(found["waits"]) == {0}


def test_work_on_keys_is_counted_by_their_bytes(counters: native.Counters) -> None:
    class Entry:
        slice = native.Slice(-1, 100)

    assert Entry.slice.number == native.NO_SLICE
    assert native.Slice(3, 2**70).nbytes == 2**64 - 1
    one, several = object(), [object(), object()]
    counters.end_work(MOVING, 0, MEMORY, Entry.slice, several, one)
    counters.end_works(MOVING, 0, MEMORY, [(Entry, several, ()), (Entry, (1, 2, 3), several)], 2)
    assert counters.count_small(3, Entry.slice, several, several) is False
    counters.take_times()
    assert counters.count_small(3, Entry.slice, one, one) is True
    found = counters.read()
    assert (found["sent"][MEMORY], found["received"][MEMORY], found["rounds"]) == (1000, 600, 7)
    assert found["calls"][3] == 2


def test_names_that_are_too_long_are_cut(counters: native.Counters) -> None:
    counters.describe("s" * 100, "a job", -1, 0)
    assert counters.read()["store"] == "s" * 63


def test_times_are_measured_on_request(counters: native.Counters) -> None:
    assert not counters.timed
    assert counters.begin() == 0
    counters.end(MOVING, 0)
    counters.take_times()
    begin = counters.begin()
    assert 0 < begin <= native.now()
    counters.end(MOVING, begin)
    counters.end(len(PHASES), begin)
    counters.quiet = True
    assert counters.begin() == 0
    counters.quiet = False
    begin = counters.begin()
    counters.take_times(0)
    counters.end(MOVING, begin)  # the recorded begin is used
    counters.end(MOVING, counters.begin())
    found = counters.read()
    assert found["spans"] == [0, 2, 0, 0, 0]
    assert found["ns"][MOVING] > 0
    assert sum(found["waits"]) == 0, "of waits only"


def test_times_end_when_they_were_to(counters: native.Counters) -> None:
    counters.take_times(native.now())
    begin = counters.begin()
    assert begin, "nobody looks at the clock for this"
    counters.end(MOVING, begin)
    assert not counters.timed


def test_a_wait_is_shown_while_it_lasts(counters: native.Counters) -> None:
    counters.wait_for(counters.begin(), 1, 2, 3)
    assert counters.read()["waiting_since"] == 0, "no times are taken"
    counters.take_times()
    begin = counters.begin()
    counters.wait_for(begin, 5, 6, 7)
    found = counters.read()
    assert [found[name] for name in ("waiting_since", "slice", "round", "whom")] == [begin, 5, 6, 7]
    counters.waited(begin, 5, 6, 7)
    found = counters.read()
    assert found["waiting_since"] == 0
    assert found["spans"] == [1, 0, 0, 0, 0]
    assert found["waits"][native.bucket_of(found["ns"][WAITING])] == 1
    assert waits_of(found).waits == 1
    assert seconds_of(found).waiting == pytest.approx(found["ns"][WAITING] * 1e-9)


def test_many_threads_count_in_one_place(counters: native.Counters) -> None:
    def work() -> None:
        for _ in range(5000):
            counters.count(1)
            counters.move(MEMORY, 2, 3)
            counters.end(WAITING, counters.begin())

    counters.take_times()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = counters.read()
    assert found["calls"][1] == sum(found["waits"]) == found["spans"][WAITING] == 40_000
    assert (found["sent"][MEMORY], found["received"][MEMORY]) == (80_000, 120_000)


# ------------------------------------------------------------------------------------------------- buckets


@given(st.integers(0, 2**64 - 1))
def test_a_wait_is_in_the_bucket_of_its_length(ns: int) -> None:
    bucket = native.bucket_of(ns)
    ends = [round(end_of(one) * 1e9) for one in range(native.BUCKETS)]
    assert 0 <= bucket < native.BUCKETS
    assert bucket == native.BUCKETS - 1 or ns < ends[bucket]
    assert bucket == 0 or ns >= ends[bucket - 1]


def test_buckets_grow_by_a_quarter_at_most() -> None:
    ends = [end_of(bucket) for bucket in range(native.BUCKETS)]
    assert ends == sorted(ends)
    grown = (after / before for before, after in itertools.pairwise(ends[3:]))
    assert max(grown) < 1.25 + 1e-9
    assert 1800 < ends[-2] < 2000
    with pytest.raises(ValueError, match="no bucket 128"):
        end_of(native.BUCKETS)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=50), st.floats(0, 1))
def test_a_quantile_is_of_a_wait_that_there_was(waits: list[int], part: float) -> None:
    counts = [0] * native.BUCKETS
    for ns in waits:
        counts[native.bucket_of(ns)] += 1
    found = quantile(counts, part)
    assert found in {end_of(native.bucket_of(ns)) for ns in waits}
    within = sum(1 for ns in waits if end_of(native.bucket_of(ns)) <= found)
    assert within >= part * len(waits)
    assert quantile([0] * native.BUCKETS, part) == 0


# ---------------------------------------------------------------------------------------------------- page


@pytest.fixture
def one(nursery: jobs.Nursery, tmp_path: Path) -> Iterator[jobs.Job]:
    made = jobs.Job(nursery, tmp_path, 1)
    yield made
    made.close()


def test_another_process_reads_the_page_and_asks_for_times(one: jobs.Job) -> None:
    worker = one.start("observed.page", "page", 40, rank=0)
    pid = int(worker.expect_some("pid").split()[1])
    found = pages(pid)
    assert len(found) == 32, "there are no more places; the other stores count for themselves"
    assert [store["store"] for store in found] == [f"store {number}" for number in range(32)]
    assert found[0]["calls"][CALLS.index("push")] == 1
    assert (found[0]["keys"], found[0]["nbytes"], found[0]["size"]) == (3, 1000, 40)

    descriptor = os.open(page_of(pid), os.O_RDWR)
    native.ask_for_times(descriptor, native.now())
    native.ask_for_times(descriptor, 1)  # changes nothing
    worker.say("look")
    worker.expect("timed")
    assert pages(pid)[0]["spans"][WAITING] == 1
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 10)  # a reader would be killed
    os.close(descriptor)
    worker.say("go")
    one.results()


@pytest.mark.parametrize("content", [b"", b"x", b"x" * (1 << 20)])
def test_another_file_is_no_page(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with path.open("r+b") as file:
        assert native.read_page(file.fileno()) is None
        native.ask_for_times(file.fileno(), 1)
    assert path.read_bytes() == content


@pytest.mark.parametrize("at", [0, 8, 16, 24], ids=["magic", "version", "bytes of a place", "places"])
def test_a_page_of_another_version_is_left_alone(tmp_path: Path, counters: native.Counters, at: int) -> None:
    content = bytearray(Path(page_of(os.getpid())).read_bytes())
    path = tmp_path / "page"
    path.write_bytes(content)
    with path.open("rb") as file:
        _, stores = native.read_page(file.fileno()) or (0, [])
    assert any(one["store"] == "a store" for one in stores)
    content[at] ^= 1
    path.write_bytes(content)
    with path.open("r+b") as file:
        assert native.read_page(file.fileno()) is None
        native.ask_for_times(file.fileno(), 10**18)
    assert path.read_bytes() == content


def test_the_place_of_a_store_that_is_gone_is_given_again() -> None:
    def names() -> list[str]:
        return [one["store"] for one in pages(os.getpid())]

    made = native.Counters("passing", "", 0, 1)
    made.count(1)
    assert names().count("passing") == 1
    hidden = native.Counters("hidden", "", 0, 1, shown=False)
    assert hidden.number == -1
    del made
    gc.collect()
    assert "passing" not in names()
    assert "hidden" not in names()
    again = native.Counters("passing", "", 0, 1)
    assert again.read()["calls"][1] == 0


def test_a_child_counts_from_0_and_shows_its_own_stores_only() -> None:
    out = run(
        """
import os
mine = native.Counters("mine", "job", 3, 4)
mine.count(1)
mine.take_times()
def shown():
    one, = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")
            if native.PAGE_NAME in os.path.realpath(f"/proc/self/fd/{fd}")]
    with open(one, "rb") as page:
        return [(s["store"], s["calls"][1]) for s in native.read_page(page.fileno())[1]]
if os.fork() == 0:
    assert mine.read()["calls"] == [0] * 6 and not mine.timed and shown() == []
    mine.count(1)
    other = native.Counters("other", "job", 3, 4)
    other.count(1)
    other.count(1)
    assert mine.read()["calls"][1] == 1
    print(shown(), flush=True)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
print(shown())
"""
    )
    assert out.splitlines() == ["[('other', 2)]", "[('mine', 1)]"]


# -------------------------------------------------------------------------------------------------- events


def test_nothing_is_recorded_unless_asked_for(counters: native.Counters) -> None:
    counters.take_times()
    counters.end(MOVING, counters.begin())
    counters.instant(6, 0)
    assert not native.recording()
    assert native.packed_events() == b""
    assert native.recorded() == 0


@pytest.mark.parametrize("size", [0, 3, 1000])
def test_the_number_of_events_is_a_power_of_two(size: int) -> None:
    with pytest.raises(ValueError, match=f"a power of two, got {size}"):
        native.record_events(size)
    assert not native.recording()


def test_the_ring_has_the_last_events_in_their_order() -> None:
    out = run(
        """
native.record_events(8)
native.record_events(16)  # it is recorded already
made = [native.Counters("a", "", 0, 1), native.Counters("b", "", 0, 1)]
for i in range(3):
    made[i % 2].record(events.CALL, i, i + 1, 10 + i, 20 + i, 30 + i, 40 + i)
made[0].record(len(events.KINDS), 0, 0)
found = events.recorded()
assert [one._replace(thread=0) for one in found] == [
    (i, i + 1, 10 + i, 20 + i, 30 + i, 0, 40 + i, events.CALL, i % 2) for i in range(3)
], found
assert len({one.thread for one in found}) == 1
for i in range(3, 21):
    made[0].record(events.STEP, i, i)
assert [one.begin for one in events.recorded()] == list(range(13, 21))
assert native.recorded() == 21
made[0].lose(2)
made[0].instant(events.BACK, -1)
lost, back = events.recorded()[-2:]
assert (lost.kind, lost.whom, lost.begin) == (events.LOST, 2, lost.end)
assert (back.kind, back.whom) == (events.BACK, -1)
made[0].take_times()
begin = made[0].begin()
made[0].end(1, begin, 7, 8, 9)
assert events.recorded()[-1]._replace(end=0) == (begin, 0, 7, 8, 9, back.thread, events.NOBODY, 1, 0)
print("done")
"""
    )
    assert out == "done\n"


def test_events_of_many_threads_are_whole() -> None:
    out = run(
        """
import threading
native.record_events(1 << 10)
made = native.Counters("a", "", 0, 1)
over = threading.Event()
def write(thread):
    for i in range(20_000):
        made.record(events.CALL, i, i + 1, thread, i, 2 * i, thread)
def read():
    while not over.is_set():
        check(events.recorded())
def check(found):
    for one in found:
        assert one.end == one.begin + 1 and one.nbytes == 2 * one.begin == 2 * one.round, one
        assert one.whom == one.slice < 4, one
threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
reader = threading.Thread(target=read)
for thread in (reader, *threads):
    thread.start()
for thread in threads:
    thread.join()
over.set()
reader.join()
found = events.recorded()
check(found)
assert len(found) == 1 << 10 and native.recorded() == 80_000
last = {}
for one in found:
    assert last.get(one.thread, -1) < one.begin
    last[one.thread] = one.begin
print("done")
"""
    )
    assert out == "done\n"


def test_a_child_has_no_events_of_its_parent() -> None:
    out = run(
        """
import os
native.record_events(8)
made = native.Counters("a", "", 0, 1)
made.record(events.CALL, 1, 2)
thread = events.recorded()[0].thread
if os.fork() == 0:
    assert events.recorded() == []
    made.record(events.CALL, 3, 4)
    one, = events.recorded()
    assert one.thread != thread and one.begin == 3
    print("child", flush=True)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
assert len(events.recorded()) == 1
"""
    )
    assert out == "child\n"
