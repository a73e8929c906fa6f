"""Memory that one process fills and others read: arrival of data, access, and the remaining files."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pace
import pytest
from jobs import Job, Worker
from procs_outbox import MIB, seqlock_of

import kvstore as kv
from kvstore.stores.parameter_server.transport import shared_buffers as module
from kvstore.stores.parameter_server.transport.shared_buffers import (
    PeerBuffers,
    SharedBufferPool,
    SharedValues,
)

BODIES = "procs_outbox"
SIZES = [1, 63, 64, 4095, 4096, 4097, MIB, 5 * MIB + 1]

MakeJob = Callable[..., Job]


def opened(handle: str) -> PeerBuffers:
    inbox = PeerBuffers.open(handle)
    assert inbox is not None
    return inbox


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# ----------------------------------------------------------------------------------------- one process


def test_blocks_do_not_overlap_and_come_back() -> None:
    outbox = SharedBufferPool()
    blocks = [outbox.allocate(size) for size in SIZES * 3]
    for number, block in enumerate(blocks):
        assert block is not None
        assert block.array.ctypes.data % 64 == 0
        block.array[:] = number
    inbox = opened(outbox.handle())
    for number, block in enumerate(blocks):
        assert block is not None
        assert (inbox.view_block(block.segment, block.offset, block.array.nbytes) == number).all()
    places = {(block.segment, block.offset) for block in blocks if block is not None}
    used = outbox.nbytes
    for block in blocks:
        assert block is not None
        outbox.free(block)
    again = [outbox.allocate(size) for size in SIZES * 3]
    assert {(block.segment, block.offset) for block in again if block is not None} == places
    assert outbox.nbytes == used


def test_sizes_that_differ_a_little_use_the_same_places() -> None:
    outbox = SharedBufferPool()
    for size in range(9 * MIB, 10 * MIB, 4321):
        block = outbox.allocate(size)
        assert block is not None
        outbox.free(block)
    assert outbox.nbytes < 30 * MIB


@pytest.mark.parametrize("make", [SharedBufferPool, SharedValues])
@pytest.mark.parametrize("size", [1, 4096, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 70 * MIB])
def test_any_size_fits_its_segment(make: type[SharedBufferPool], size: int) -> None:
    memory = make()
    for _ in range(2):
        block = memory.allocate(size)
        assert block is not None
        block.array[:] = 1
        assert block.array.nbytes == size


def test_nothing_is_lent_for_nothing() -> None:
    outbox = SharedBufferPool()
    assert outbox.allocate(0) is None
    assert outbox.allocate(-1) is None
    assert outbox.nbytes == 0


def test_a_limit() -> None:
    outbox = SharedBufferPool(limit=10 * MIB)
    blocks = [outbox.allocate(MIB) for _ in range(20)]
    assert 5 <= sum(block is not None for block in blocks) <= 10
    assert outbox.nbytes <= 10 * MIB
    assert outbox.allocate(11 * MIB) is None
    assert outbox.allocate(100) is not None


def test_more_than_the_machine_has_is_not_taken() -> None:
    outbox = SharedBufferPool()
    assert outbox.allocate(2**45) is None
    assert outbox.allocate(100) is not None


def test_what_is_closed() -> None:
    before = descriptors()
    outbox = SharedBufferPool()
    block = outbox.allocate(MIB)
    assert block is not None
    block.array[:] = 3
    inbox = opened(outbox.handle())
    view = inbox.view_block(block.segment, block.offset, MIB)
    outbox.close()
    assert outbox.allocate(1) is None
    assert outbox.handle() == ""
    outbox.free(block)
    assert (view == 3).all()  # what is in use stays
    inbox.close()
    with pytest.raises(kv.ProtocolError, match="closed"):
        inbox.view_block(0, 0, 1)
    del view, block, inbox
    assert descriptors() == before


def test_the_child_of_a_fork_has_none() -> None:
    outbox = SharedBufferPool()
    block = outbox.allocate(100)
    assert block is not None
    block.array[:] = 1
    pid = os.fork()
    if pid == 0:
        outbox.free(block)
        ok = outbox.allocate(100) is None and outbox.handle() == ""
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert outbox.allocate(100) is not None


@pytest.mark.parametrize(
    ("segment", "offset", "nbytes"),
    [
        (0, 0, 5 * MIB),
        (0, 4 * MIB, 1),
        (0, -1, 2),
        (0, 8, -1),
        (1, 0, 1),
        (-1, 0, 1),
        (10**9, 0, 1),
        (0, 2**62, 2**62),
    ],
)
def test_places_that_are_not_there(segment: int, offset: int, nbytes: int) -> None:
    outbox = SharedBufferPool()
    assert outbox.allocate(100) is not None
    inbox = opened(outbox.handle())
    with pytest.raises(kv.ProtocolError):
        inbox.view_block(segment, offset, nbytes)


def test_a_reader_cannot_write() -> None:
    outbox = SharedBufferPool()
    assert outbox.allocate(100) is not None
    view = opened(outbox.handle()).view_block(0, 0, 100)
    with pytest.raises(ValueError, match="read-only"):
        view[:] = 1


# ----------------------------------------------------------------------------------------------- seqlocks


def test_a_copy_counts_only_while_its_stamp_stands() -> None:
    values = SharedValues()
    first, second = values.allocate(MIB), values.allocate(3000)
    assert first is not None
    assert second is not None
    first.array[:], second.array[:] = 5, 6
    inbox = opened(values.handle())
    place = first.segment, first.offset
    seqlock, out = values.read_seqlock(*place), np.empty(MIB // 4, np.float32)
    assert inbox.copy_block(*place, MIB, seqlock, out)
    assert (out.view(np.uint8) == 5).all()
    with values.mark_writing([place]):
        assert values.read_seqlock(*place) % 2
        assert not inbox.copy_block(*place, MIB, seqlock, out)
        assert not inbox.copy_block(*place, MIB, values.read_seqlock(*place), out)
    assert not inbox.copy_block(*place, MIB, seqlock, out)
    assert inbox.copy_block(*place, MIB, values.read_seqlock(*place), out)
    assert values.read_seqlock(second.segment, second.offset) == 0


def test_values_that_share_a_page_are_marked_once() -> None:
    values = SharedValues()
    blocks = [values.allocate(64) for _ in range(4)]
    places = [(block.segment, block.offset) for block in blocks if block is not None]
    with pytest.raises(RuntimeError), values.mark_writing(places):
        assert values.read_seqlock(*places[3]) == 1
        raise RuntimeError
    assert values.read_seqlock(*places[0]) == 2


def test_a_slice_within_a_block_has_a_seqlock_of_its_own() -> None:
    values = SharedValues()
    block = values.allocate(4 * MIB)
    assert block is not None
    places = [(block.segment, block.offset + at) for at in range(0, 4 * MIB, MIB)]
    with values.mark_writing(places[1:2]):
        assert [values.read_seqlock(*place) for place in places] == [0, 1, 0, 0]


def test_an_outbox_has_no_stamps() -> None:
    outbox = SharedBufferPool()
    assert outbox.allocate(100) is not None
    with pytest.raises(kv.ProtocolError, match="no stamps"):
        opened(outbox.handle()).copy_block(0, 0, 100, 0, np.empty(100, np.uint8))


def test_values_are_not_offered_where_seqlocks_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ORDERED", False)
    values = SharedValues()
    assert values.allocate(100) is not None
    assert values.handle() == ""
    assert SharedBufferPool().handle() != ""


# --------------------------------------------------------------------------------------------- handles


@pytest.fixture
def handle() -> Any:
    outbox = SharedBufferPool()
    assert outbox.allocate(100) is not None
    yield json.loads(outbox.handle())
    outbox.close()


@pytest.mark.parametrize(
    "change",
    [
        {"token": "00" * 16},
        {"token": ""},
        {"token": "zz"},
        {"token": None},
        {"boot": "another machine"},
        {"processes": "pid:[1]"},
        {"pid": 2**31 - 1},
        {"pid": -1},
        {"pid": "1"},
        {"pid": True},
        {"pid": 1},
        {"pid": 2**70},
        {"fd": 10**6},
        {"fd": None},
        {"fd": "../../../../etc/passwd"},
    ],
)
def test_a_forged_handle(handle: dict[str, Any], change: dict[str, Any]) -> None:
    assert PeerBuffers.open(json.dumps(handle)) is not None
    before = descriptors()
    assert PeerBuffers.open(json.dumps({**handle, **change})) is None
    assert descriptors() == before


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "1", '"x"', "[" * 100_000, "{}", '{"boot": 1}', "x" * 10**6]
)
def test_a_handle_that_is_none(text: str) -> None:
    assert PeerBuffers.open(text) is None


def test_a_handle_of_something_else(handle: dict[str, Any], tmp_path: Path) -> None:
    """A file, memory that can be cut, a folder, a pipe whose other end is silent, a device, a socket."""
    (tmp_path / "file").write_bytes(bytes(8192))
    os.mkfifo(tmp_path / "fifo")
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 8192)
    read, write = os.pipe()
    paths = [os.open(tmp_path / "file", os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)]
    paths += [os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK), os.open("/dev/zero", os.O_RDONLY)]
    with socket.socket() as sock:
        for fd in (*paths, unsealed, read, write, sock.fileno()):
            start = time.monotonic()
            assert PeerBuffers.open(json.dumps({**handle, "fd": fd})) is None
            assert time.monotonic() - start < pace.seconds(5)
    for fd in (*paths, unsealed, read, write):
        os.close(fd)


@pytest.mark.parametrize("known", [True, False])
def test_a_system_without_memfd(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    def refuse(*_: Any) -> int:
        raise OSError("no")

    if known:
        monkeypatch.setattr(os, "memfd_create", refuse)
    else:
        monkeypatch.delattr(os, "memfd_create")
    outbox = SharedBufferPool()
    assert outbox.allocate(100) is None
    assert outbox.handle() == ""


# ------------------------------------------------------------------------------------- several processes


def heard(worker: Worker, start: str = "[") -> Any:
    return json.loads(worker.expect_some(start))


def test_a_reader_outlives_the_process_that_is_read(job: MakeJob) -> None:
    made = job(2)
    filling = made.start(BODIES, "fills", SIZES, rank=0)
    handle, places = filling.expect_some("{"), heard(filling)
    reading = made.start(BODIES, "reads", handle, places, rank=1)
    reading.expect("reading")
    filling.signal(signal.SIGKILL)
    filling.finish(pace.deadline(10))
    reading.say("go on")
    reading.finish(pace.deadline(10))
    assert reading.result() == list(range(1, len(SIZES) + 1))
    assert PeerBuffers.open(handle) is None


def test_a_reader_that_is_killed_harms_no_other(job: MakeJob) -> None:
    made = job(2)
    filling = made.start(BODIES, "fills", SIZES, rank=0)
    handle, places = filling.expect_some("{"), heard(filling)
    for _ in range(3):
        reading = made.start(BODIES, "reads", handle, places, rank=1)
        reading.expect("reading")
        reading.signal(signal.SIGKILL)
        assert reading.finish(pace.deadline(10)) == -signal.SIGKILL
    filling.say("end")
    assert filling.finish(pace.deadline(10)) == 0


def test_memory_that_grows_is_found_and_gone_memory_is_an_error(job: MakeJob) -> None:
    before = descriptors()
    made = job(1)
    growing = made.start(BODIES, "grows_on", rank=0)
    inbox = opened(growing.expect_some("{"))
    segments = set()
    for number in range(1, 11):
        growing.say("more")
        segment, offset = map(int, growing.expect_some(f"{number} ").split()[1:])
        segments.add(segment)
        if number < 10:
            assert (inbox.view_block(segment, offset, 3 * MIB) == number).all()
    assert len(segments) > 2
    growing.signal(signal.SIGKILL)
    growing.finish(pace.deadline(10))
    assert inbox.view_block(0, 0, 10).nbytes == 10
    inbox = PeerBuffers(inbox._file)  # type: ignore[arg-type]
    with pytest.raises(kv.ProtocolError, match="cannot be read"):
        inbox.view_block(0, 0, 10)
    inbox.close()
    made.close()
    del inbox
    assert descriptors() == before


def test_memory_cannot_be_pulled_away(job: MakeJob) -> None:
    made = job(1)
    truncating = made.start(BODIES, "truncates", rank=0)
    view = opened(truncating.expect_some("{")).view_block(0, 0, MIB)
    truncating.expect("tried")
    assert view.sum() > 0
    truncating.say("end")
    truncating.finish(pace.deadline(10))
    assert truncating.result() == ["truncate", "open and truncate", "unseal"]


def test_a_copy_is_of_one_piece_or_none(job: MakeJob) -> None:
    made = job(2)
    writing = made.start(BODIES, "writes_on", 300_000, 10**8, rank=0)
    handle, place = writing.expect_some("{"), heard(writing)
    copying = made.start(BODIES, "copies_on", handle, place, 1.5, 40, rank=1)
    copying.finish(pace.deadline(60))
    counts = copying.result()
    assert counts["good"] > 0
    assert counts["torn"] > 0
    writing.signal(signal.SIGKILL)


def test_a_writer_that_dies_while_it_writes_leaves_no_value(job: MakeJob) -> None:
    made = job(1)
    writing = made.start(BODIES, "writes_on", 20 * MIB, 10**6, rank=0)
    inbox, place = opened(writing.expect_some("{")), heard(writing)
    end = pace.deadline(20)
    while seqlock_of(inbox, place) % 2 == 0 and time.monotonic() < end:
        pass
    writing.signal(signal.SIGSTOP)
    time.sleep(0.05)
    seqlock, out = seqlock_of(inbox, place), np.empty(place[2], np.uint8)
    assert inbox.copy_block(*place, seqlock, out) == (seqlock % 2 == 0)
    writing.signal(signal.SIGKILL)
    writing.finish(pace.deadline(10))
    assert seqlock_of(inbox, place) == seqlock


@pytest.mark.parametrize(
    ("limit", "most", "blocks"),
    [
        ("file", 40 * MIB, range(3, 5)),
        ("file", 5 * MIB, range(1)),
        ("addresses", 60 * MIB, range(3, 8)),
        ("descriptors", 0, range(1, 4)),
    ],
)
def test_a_process_that_runs_out(job: MakeJob, limit: str, most: int, blocks: range) -> None:
    made = job(1)
    made.start_all(BODIES, "runs_out", limit, most)
    (result,) = made.results()
    assert result["small"]
    assert result["again"]
    assert result["blocks"] in blocks
