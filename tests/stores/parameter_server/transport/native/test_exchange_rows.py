"""Exchanges of rows: bytes as the codec writes them; replies write only the requested rows."""

from __future__ import annotations

import itertools
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pace
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores.parameter_server.transport.native.messages import CODEC, raw, read, written

from kvstore.stores.parameter_server.protocol.messages import (
    PACKED,
    PROTOCOL,
    Batch,
    PayloadLocation,
    Record,
    RecordKind,
)
from kvstore.stores.parameter_server.transport import sockets
from kvstore.stores.parameter_server.transport.frames import MessageLimits
from kvstore.stores.parameter_server.transport.native._streams import (
    Exchange,
    Sender,
    Stream,
    await_replies,
)
from kvstore.stores.parameter_server.worker.state_machine.options import WorkerOptions
from kvstore.stores.parameter_server.worker.state_machine.request_table import (
    OperationProgress,
    RequestInFlight,
    RequestTable,
)

FRAME = PayloadLocation.FRAME
HEAD = (3, 7, 1 << 60, 5)  # store, rank, incarnation, epoch
VERSION, CLOCK, GUARD = 2, 11, 256
#: Around the sizes at which ids, or ids and rows, are packed, inlined, copied, or received where they belong.
COUNTS = st.lists(st.sampled_from([1, 2, 60, 80, 2048, 2049, 4096, 4097, 5000]), min_size=1, max_size=3)
WIDTHS = st.sampled_from([1, 8, 200])
Bytes = npt.NDArray[np.uint8]


class Pair:
    """A worker's stream with an exchange of rows, a number of them in each slice, and the server's socket."""

    def __init__(self, sender: Sender, counts: Sequence[int], width: int, kind: RecordKind) -> None:
        ours, self.server = socket.socketpair()
        ours.setblocking(False)
        self.server.settimeout(20)
        self.stream = Stream(sender, ours.detach(), 1 << 22)
        self.counts, self.width, self.kind = counts, width, kind
        ends = np.cumsum([0, *counts]).tolist()
        self.places = list(itertools.pairwise(ends))
        self.ids = np.cumsum(np.random.default_rng(3).integers(1, 9, ends[-1]))
        self.memory = np.full(ends[-1] * width + 2 * GUARD, 0xEE, np.uint8)
        self.rows = self.memory[GUARD:-GUARD]
        self.value: Bytes = np.frombuffer(os.urandom(self.rows.nbytes), np.uint8)
        parts = [(100 + at, 0, 0, 0) for at in range(len(counts))]
        head = (PROTOCOL, CODEC.job, *HEAD[:3])
        limits = 1 << 20, MessageLimits().frame, 1 << 30, 1 << 20
        self.exchange = Exchange(head, parts, [0], *limits, kind)

    def begin(self) -> None:
        self.exchange.set_rows(
            self.places, self.ids, self.value if self.kind == RecordKind.PUSH else self.rows
        )
        version = VERSION if self.kind == RecordKind.PUSH else 0
        clocks = [CLOCK] if self.kind == RecordKind.PUSH else [0]
        rounds = [at + 4 for at in range(len(self.counts))]
        assert self.stream.begin(self.exchange, rounds, clocks, 1, 0, HEAD[3], version)

    def of(self, array: npt.NDArray[Any], at: int) -> memoryview:
        """Bytes of a part's ids or rows."""
        low, high = self.places[at]
        each = array.nbytes // len(self.ids)
        return memoryview(array).cast("B")[low * each : high * each]

    def usual(self) -> bytes:
        """Write the requests as the state machine, the sockets and the codec do."""
        table = RequestTable(
            WorkerOptions(1 << 30, 1 << 20 if self.kind == RecordKind.PUSH else 1 << 40, 1.0)
        )
        operation = OperationProgress("op", len(self.counts))
        for at, count in enumerate(self.counts):
            payload: tuple[Any, ...] = (self.of(self.ids, at),)
            record = Record(RecordKind.PULL_ROWS, 100 + at, 0, at + 4)
            if self.kind == RecordKind.PUSH:
                payload = *payload, self.of(self.value, at)
                record = Record(RecordKind.PUSH, 100 + at, 0, at + 4, VERSION, CLOCK)
            nbytes = sum(map(len, payload))
            record = record._replace(rows=count, place=FRAME, nbytes=nbytes)
            table.add(RequestInFlight(operation, at, record, payload), 0)
        return b"".join(written(Batch(*HEAD, records, tuple(some))) for records, some in table.pump(0.0))

    def reply(self, answers: Sequence[int], **changes: Any) -> bytes:
        """Write a reply as a server does, with changes to the first record."""
        records = []
        for frame, at in enumerate(answers):
            record = Record(RecordKind.VALUE, 100 + at, 1 + at, 40 + at, rows=self.counts[at], place=FRAME)
            records.append(record._replace(frame=frame, nbytes=self.counts[at] * (8 + self.width)))
        payloads = tuple((bytes(self.of(self.ids, at)), self.of(self.value, at)) for at in answers)
        batch = sockets._with_packed_payloads(Batch(*HEAD, records, payloads, 77))
        assert isinstance(batch, Batch)
        batch.records[0] = batch.records[0]._replace(**changes)
        return raw(CODEC.encode(batch))

    def take(self, text: bytes, cuts: Sequence[int] = ()) -> None:
        """Have the worker receive a message, whole or in pieces; it is a reply."""
        for low, high in zip((0, *cuts), (*cuts, len(text)), strict=True):
            rest = text[low:high]
            while rest:
                rest = rest[self.server.send(rest[:40_000]) :]
                assert self.wait(0.0) == []

    def wait(self, seconds: float = 20.0) -> list[bytes]:
        found = await_replies([(self.exchange, self.stream)], b"", time.monotonic() + seconds)
        return [raw(frames) for _, frames in found]

    def guarded(self) -> bool:
        return bool((self.memory[:GUARD] == 0xEE).all() and (self.memory[-GUARD:] == 0xEE).all())

    def close(self) -> None:
        self.exchange.clear()
        self.stream.close()
        self.server.close()


@given(COUNTS, WIDTHS, st.sampled_from([RecordKind.PUSH, RecordKind.PULL_ROWS]))
@settings(max_examples=120, deadline=None)
def test_requests_are_those_of_the_usual_way(
    sender: Sender, counts: list[int], width: int, kind: RecordKind
) -> None:
    if kind == RecordKind.PULL_ROWS:
        width = 8  # the size of the reply limits the rows of one request
    pair = Pair(sender, counts, width, kind)
    wanted = pair.usual()
    pair.begin()
    assert read(pair.server, len(wanted)) == wanted
    pair.server.setblocking(False)
    with pytest.raises(BlockingIOError):
        pair.server.recv(1)
    pair.close()


@given(COUNTS, WIDTHS, st.integers(0, 1 << 32), st.booleans())
@settings(max_examples=80, deadline=None)
def test_rows_come_in_any_order_and_however_they_are_cut(
    sender: Sender, counts: list[int], width: int, seed: int, together: bool
) -> None:
    draw = random.Random(seed)
    pair = Pair(sender, counts, width, RecordKind.PULL_ROWS)
    pair.begin()
    order = draw.sample(range(len(counts)), len(counts))
    for answers in [order] if together else [[at] for at in order]:
        text = pair.reply(answers)
        pair.take(text, sorted(draw.sample(range(1, len(text)), 5)))
    assert not pair.exchange.left and pair.exchange.received == 77
    assert (pair.rows == pair.value).all() and pair.guarded()
    assert pair.exchange.rounds() == [40 + at for at in range(len(counts))]
    assert pair.exchange.answered_bytes == pair.ids.nbytes
    pair.close()


def test_a_push_is_answered_by_a_word(sender: Sender) -> None:
    pair = Pair(sender, [3, 700], 8, RecordKind.PUSH)
    pair.begin()
    wrong = written(Batch(*HEAD, [Record(RecordKind.DONE, 100, 1, 41, rows=3)], (), 77))
    pair.take(written(Batch(*HEAD, [Record(RecordKind.DONE, 101, 2, 41)], (), 77)))
    assert pair.exchange.rounds() == [None, 41] and pair.exchange.answered_bytes == 700 * 16
    pair.server.sendall(wrong)
    assert pair.wait() == [wrong] and pair.exchange.left == 1
    pair.close()


CHANGES: dict[str, dict[str, Any]] = {
    "another kind": {"kind": RecordKind.DONE},
    "another slice": {"slice": 101},
    "another sequence": {"sequence": 7},
    "elements": {"rows": -1},
    "a row less": {"rows": 4999},
    "too few bytes": {"nbytes": 5000 * 207},
    "from inside": {"offset": 8, "nbytes": 5000 * 208 - 8},
    "far": {"offset": 8},
    "packed": {"coding": 1, "flags": PACKED},
    "shared": {"place": PayloadLocation.SHARED},
    "nowhere": {"place": PayloadLocation.NONE},
    "another frame": {"frame": 2},
    "no such frame": {"frame": (1 << 32) - 1},
}


@pytest.mark.parametrize("counts", [[5000], [5000, 60], [60, 5000]])
@pytest.mark.parametrize("name", [*CHANGES, "an id", "the last id", "one byte less"])
def test_a_reply_that_is_not_as_expected(sender: Sender, name: str, counts: list[int]) -> None:
    """It stays unchanged; rows that are valid may be written, and nothing else."""
    pair = Pair(sender, counts, 200, RecordKind.PULL_ROWS)
    pair.begin()
    if name in CHANGES:
        text = pair.reply(range(len(counts)), **CHANGES[name])
    elif name == "one byte less":
        at = counts.index(5000)
        record = Record(RecordKind.VALUE, 100 + at, 1 + at, 40, rows=5000, place=FRAME, nbytes=5000 * 208)
        frames = (bytes(pair.of(pair.ids, at)), bytes(pair.of(pair.value, at))[:-1])
        text = raw(CODEC.encode(Batch(*HEAD, [record], frames, 77)))
    else:
        asked, at = pair.ids.copy(), 0 if name == "an id" else counts[0] - 1
        pair.ids = asked.copy()
        pair.ids[at] += 1
        text = pair.reply(range(len(counts)))
    writer = threading.Thread(target=pair.server.sendall, args=(text,))
    writer.start()
    found: list[bytes] = []
    end = pace.deadline(20)
    while not found:
        assert time.monotonic() < end
        found = pair.wait() or [raw(frames) for frames in pair.stream.receive()]
    writer.join()
    assert found == [text] and pair.exchange.left == len(counts) and pair.guarded()
    first = 200 * counts[0]
    assert (pair.rows[:first] == 0xEE).all()
    assert pair.rows[first:].tobytes() in (b"\xee" * (len(pair.rows) - first), pair.value[first:].tobytes())
    pair.close()


def test_a_call_that_ends_before_its_rows_are_there(sender: Sender) -> None:
    """The received part of the reply stays as it is, and is written nowhere."""
    pair = Pair(sender, [5000], 200, RecordKind.PULL_ROWS)
    pair.begin()
    text = pair.reply([0])
    pair.take(text[:500_000])
    had = pair.rows.copy()
    writer = threading.Thread(target=pair.server.sendall, args=(text[500_000:],))
    writer.start()
    found: list[bytes] = []
    end = pace.deadline(20)
    while not found:
        assert time.monotonic() < end
        found = [raw(frames) for frames in pair.stream.receive()]
    writer.join()
    assert found == [text] and (pair.rows == had).all() and pair.exchange.left == 1
    pair.close()


def test_what_an_exchange_of_rows_does_not_take(sender: Sender) -> None:
    pair = Pair(sender, [3, 4], 8, RecordKind.PULL_ROWS)
    ids, rows = pair.ids, pair.rows
    for places in ([(0, 3)], [(0, 3), (3, 8)], [(0, 0), (0, 7)], [(-1, 3), (3, 7)]):
        with pytest.raises(ValueError, match=r"no place|are not some of 7"):
            pair.exchange.set_rows(places, ids, rows)
    for wrong, data in ((ids[:0], rows), (ids, rows[:-1]), (ids, rows[:0])):
        with pytest.raises((ValueError, IndexError)):
            pair.exchange.set_rows(pair.places, wrong, data)
    with pytest.raises(ValueError, match="read-only"):
        pair.exchange.set_rows(pair.places, ids, pair.value)
    with pytest.raises(ValueError, match="no arrays"):
        pair.exchange.set(None, struct.pack("Q", rows.ctypes.data), rows)
    pair.begin()
    for call in (
        lambda: pair.exchange.set(None, struct.pack("Q", rows.ctypes.data), rows),
        lambda: pair.exchange.pack(1, 0.5, struct.pack("Q", rows.ctypes.data), rows),
        lambda: pair.exchange.share({0: (0, 0, True)}),
    ):
        with pytest.raises(ValueError, match="no arrays"):
            call()
    pull = Exchange((PROTOCOL, CODEC.job, *HEAD[:3]), [(1, 0, 0, 8)], [8], 1, 1, 1, 1, RecordKind.PULL)
    with pytest.raises(ValueError, match="no exchange of rows"):
        pull.set_rows([(0, 7)], ids, rows)
    pair.close()
