"""Exchanges over real sockets: bytes as the codec writes them, and replies write nothing but the value."""

from __future__ import annotations

import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pace
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores.parameter_server.transport.native.messages import CODEC, raw, read, written

from kvstore.kernels import cpu
from kvstore.stores.parameter_server.protocol.messages import (
    IN_PLACE,
    PACKED,
    PROTOCOL,
    SPAN,
    Batch,
    PayloadLocation,
    Record,
    RecordKind,
)
from kvstore.stores.parameter_server.transport.frames import MessageCodec, MessageLimits
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

LIMIT = 1 << 22
FRAME = PayloadLocation.FRAME
STORE, RANK, INCARNATION, EPOCH, VERSION, CLOCK = 3, 7, 1 << 60, 5, 2, 11
GUARD = 256
SIZES = st.sampled_from([1, 2, 63, 64, 65, 4096, 16384, 16385, 32768, 32769, 70_000])
SHAPES = st.lists(SIZES, min_size=1, max_size=6)
KINDS = (RecordKind.PUSHPULL, RecordKind.PUSH, RecordKind.PULL)
Bytes = npt.NDArray[np.uint8]


class Pair:
    """A worker's stream with an exchange of one array, and the server's socket."""

    def __init__(
        self,
        sender: Sender,
        sizes: Sequence[int],
        batch_bytes: int = 1 << 20,
        same: bool = False,
        credit: int = 1 << 30,
        kind: RecordKind = RecordKind.PUSHPULL,
    ):
        ours, self.server = socket.socketpair()
        ours.setblocking(False)
        self.server.settimeout(20)
        self.stream = Stream(sender, ours.detach(), LIMIT)
        starts = [0, *accumulate(sizes[:-1])]
        self.parts = [(100 + at, starts[at], size) for at, size in enumerate(sizes)]
        head = (PROTOCOL, CODEC.job, STORE, RANK, INCARNATION)
        parts = [(slice_, 0, start, size) for slice_, start, size in self.parts]
        self.kind = kind
        self.exchange = Exchange(
            head,
            parts,
            [sum(sizes)],
            batch_bytes,
            MessageLimits().frame,
            credit,
            min(1 << 20, credit // 2),
            kind,
        )
        self.value: Bytes = np.frombuffer(os.urandom(sum(sizes)), np.uint8).copy()
        self.memory = np.full(sum(sizes) + 2 * GUARD, 0xEE, np.uint8)
        self.out = self.memory[GUARD:-GUARD]
        if same:
            self.out[:] = self.value
            self.value = self.out
        self.first = 1

    def begin(self, first: int = 1) -> None:
        self.first = first
        assert self.set(self.value, self.out)
        rounds = [at + 4 for at in range(len(self.parts))]
        numbers = (
            ([CLOCK], first, 0, EPOCH, VERSION) if self.kind != RecordKind.PULL else ([0], first, 0, EPOCH, 0)
        )
        assert self.stream.begin(self.exchange, rounds, *numbers)

    def set(self, value: Bytes, out: Bytes) -> bool:
        values = None if self.kind == RecordKind.PULL else address(value)
        outs = None if self.kind == RecordKind.PUSH else address(out)
        return self.exchange.set(values, outs, (value, out))

    def wait(self, seconds: float = 20.0, descriptors: bytes = b"") -> list[list[Any]]:
        found = await_replies([(self.exchange, self.stream)], descriptors, time.monotonic() + seconds)
        assert all(number == 0 for number, _ in found)
        return [frames for _, frames in found]

    def all_came(self) -> None:
        end = pace.deadline(20)
        while self.exchange.left:
            assert time.monotonic() < end
            assert self.wait() == []

    def answer_all(self, wanted: Sequence[bytes]) -> None:
        """Answer in one message, once all parts have arrived; the values must be there."""
        reader = threading.Thread(target=read, args=(self.server, sum(map(len, wanted))))
        writer = threading.Thread(target=self.server.sendall, args=(self.reply(range(len(wanted)), wanted),))
        for thread in (reader, writer):
            thread.start()
        self.all_came()
        for thread in (reader, writer):
            thread.join()
        assert self.out.tobytes() == b"".join(wanted)

    def answer_what_was_sent(self, wanted: Sequence[bytes]) -> None:
        """Answer the first part, then again and again all that were sent; more go for no other reason."""
        reader = threading.Thread(target=read, args=(self.server, sum(map(len, wanted))))
        reader.start()
        answered, end = 0, pace.deadline(20)
        while answered < len(wanted):
            to = self.exchange.sent if answered else 1
            answers = self.reply(range(answered, to), wanted[answered:to])
            writer = threading.Thread(target=self.server.sendall, args=(answers,))
            writer.start()
            while self.exchange.left > len(wanted) - to:
                assert self.wait(0.005) == [] and time.monotonic() < end
            writer.join()
            answered = to
        reader.join()
        assert self.out.tobytes() == b"".join(wanted)
        while select.select([self.server], [], [], 0)[0]:
            self.server.recv(1 << 20)  # heads, which would fill the socket in the end

    def reply(self, answers: Sequence[int], payloads: Sequence[bytes]) -> bytes:
        """Write a reply as a server does."""
        return written(Batch(*HEAD, self.records(answers, payloads), tuple(payloads), 77))

    def records(self, answers: Sequence[int], payloads: Sequence[bytes]) -> list[Record]:
        return [
            Record(
                RecordKind.VALUE, 100 + at, self.first + at, 40 + at,
                place=FRAME, frame=index, nbytes=len(payload),
            )
            for index, (at, payload) in enumerate(zip(answers, payloads, strict=True))
        ]  # fmt: skip

    def guarded(self) -> bool:
        return bool((self.memory[:GUARD] == 0xEE).all() and (self.memory[-GUARD:] == 0xEE).all())

    def close(self) -> None:
        self.exchange.clear()
        self.stream.close()
        self.server.close()


HEAD = (STORE, RANK, INCARNATION, EPOCH)


def address(*arrays: npt.NDArray[Any]) -> bytes:
    return struct.pack(f"{len(arrays)}Q", *[array.ctypes.data for array in arrays])


@pytest.fixture
def pair(sender: Sender) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(*arguments: Any, **options: Any) -> Pair:
        made.append(Pair(sender, *arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def usual(pair: Pair, batch_bytes: int) -> bytes:
    """Write the requests as the state machine, the sockets and the codec do."""
    table = RequestTable(WorkerOptions(1 << 30, batch_bytes, 1.0))
    operation = OperationProgress("op", len(pair.parts))
    for at, (slice_, start, size) in enumerate(pair.parts):
        record = Record(
            pair.kind, slice_, 0, at + 4, VERSION, CLOCK, 0, 0.0, -1, FRAME, 0, 0, size, 0
        )  # fmt: skip
        payload: tuple[Any, ...] = (memoryview(pair.value)[start : start + size],)
        if pair.kind == RecordKind.PULL:
            record, payload = Record(RecordKind.PULL, slice_, 0, at + 4, flags=PACKED), ()
        table.add(RequestInFlight(operation, at, record, payload), 0)
    return b"".join(written(Batch(*HEAD, records, tuple(frames))) for records, frames in table.pump(0.0))


@given(SHAPES, st.sampled_from([1, 5000, 40_000, 1 << 20]), st.sampled_from(KINDS))
@settings(max_examples=120, deadline=None)
def test_requests_are_those_of_the_usual_way(
    sender: Sender, sizes: list[int], batch_bytes: int, kind: RecordKind
) -> None:
    batch_bytes = 1 << 20 if kind == RecordKind.PULL else batch_bytes
    pair = Pair(sender, sizes, batch_bytes, kind=kind)
    wanted = usual(pair, batch_bytes)
    pair.begin()
    assert read(pair.server, len(wanted)) == wanted
    pair.server.setblocking(False)
    with pytest.raises(BlockingIOError):
        pair.server.recv(1)
    pair.close()


@given(SHAPES, st.sampled_from([2.0, 3.0]), st.sampled_from([RecordKind.PUSH, RecordKind.PUSHPULL]))
@settings(max_examples=40, deadline=None)
def test_values_that_count_divided(
    sender: Sender, sizes: list[int], divisor: float, kind: RecordKind
) -> None:
    """They are sent as they are, and answered by plain ones."""
    pair = Pair(sender, sizes, kind=kind)
    assert pair.set(pair.value, pair.out)
    pair.exchange.divide(divisor)
    rounds = [at + 4 for at in range(len(sizes))]
    assert pair.stream.begin(pair.exchange, rounds, [CLOCK], 1, 0, EPOCH, VERSION)
    found: list[bytes] = []
    while len(found) < len(sizes):
        batch = batch_of(CODEC.decode(receive(pair.server)))
        for record in batch.records:
            assert (record.coding, record.threshold, record.flags) == (cpu.DIVIDED, divisor, 0)
            found.append(bytes(memoryview(batch.frames[record.frame])[record.offset :][: record.nbytes]))
    assert b"".join(found) == pair.value.tobytes()
    assert pair.set(pair.value, pair.out)  # of the next call nothing is divided
    pair.exchange.divide(divisor)
    pair.close()


def test_what_cannot_count_divided(sender: Sender) -> None:
    pull, push = Pair(sender, [8], kind=RecordKind.PULL), Pair(sender, [8])
    for pair, divisor in ((pull, 2.0), (push, 0.0), (push, float("nan"))):
        assert pair.set(pair.value, pair.out)
        with pytest.raises(ValueError, match="no plain values"):
            pair.exchange.divide(divisor)
    words = np.zeros(cpu.encoded_bytes(1, 2), np.uint8)
    push.exchange.pack(1, 0.5, address(words), words)
    with pytest.raises(ValueError, match="no plain values"):
        push.exchange.divide(2.0)
    for pair in (pull, push):
        pair.close()


@given(st.sampled_from(cpu.codings()), st.lists(st.integers(1, 9), max_size=3), st.integers(1, 40_000))
@settings(max_examples=60, deadline=None)
def test_packed_values_are_pushed_as_in_the_usual_way(
    sender: Sender, coding: str, cuts: list[int], last: int
) -> None:
    code = cpu.coding(coding)
    sizes = [128 * 300 * cut for cut in cuts] + [4 * last]
    one = Pair(sender, sizes)
    words = np.frombuffer(os.urandom(cpu.encoded_bytes(code, sum(sizes) // 4)), np.uint8)
    assert one.set(one.value, one.out)
    one.exchange.pack(code, 0.5, address(words), words)
    rounds = [at + 4 for at in range(len(sizes))]
    assert one.stream.begin(one.exchange, rounds, [CLOCK], 1, 0, EPOCH, VERSION)
    bits, found, at = cpu.coding_bits(code), [], 0
    while at < len(sizes):
        batch = batch_of(CODEC.decode(receive(one.server)))
        for record in batch.records:
            _, start, size = one.parts[at]
            stop = len(words) if at == len(sizes) - 1 else (start + size) // 4 * bits // 8
            wanted = Record(
                RecordKind.PUSHPULL, 100 + at, at + 1, at + 4, VERSION, CLOCK, code, 0.5, -1, FRAME,
                record.frame, record.offset, stop - start // 4 * bits // 8, PACKED,
            )  # fmt: skip
            assert record == wanted
            payload = memoryview(batch.frames[record.frame])[record.offset :][: record.nbytes]
            found.append(bytes(payload))
            at += 1
        records = [
            Record(
                RecordKind.VALUE, one.slice, one.sequence, 9, place=FRAME, frame=index, nbytes=sizes[number]
            )
            for index, one in enumerate(batch.records)
            for number in [one.slice - 100]
        ]
        values = [bytes([record.slice]) * record.nbytes for record in records]
        rest = written(Batch(*HEAD, records, tuple(values), 77))
        while rest:
            rest = rest[one.server.send(rest[:40_000]) :]
            assert one.wait(0.0) == []
    assert b"".join(found) == words.tobytes()
    one.all_came()
    assert one.out.tobytes() == b"".join(bytes([100 + at]) * size for at, size in enumerate(sizes))
    assert one.exchange.answered_bytes == len(words) and one.guarded()
    one.close()


def begin_packed(one: Pair, code: int) -> None:
    """Push packed values, or pull; the answers may be packed."""
    assert one.set(one.value, one.out)
    if one.kind == RecordKind.PUSHPULL:
        words = np.zeros(cpu.encoded_bytes(code, one.value.size // 4), np.uint8)
        one.exchange.pack(code, 0.5, address(words), words)
    rounds = [at + 4 for at in range(len(one.parts))]
    assert one.stream.begin(one.exchange, rounds, [CLOCK], 1, 0, EPOCH, VERSION)


def packed_answers(
    one: Pair, code: int, threshold: float, counts: Sequence[int]
) -> tuple[list[Record], list[bytes], list[bytes]]:
    """Make answers of so many parts each: records, payloads, and the sums."""
    records, payloads, sums = [], [], []
    for at, (slice_, _, size) in enumerate(one.parts):
        each = cpu.encoded_bytes(code, size // 4)
        parts = [np.frombuffer(os.urandom(each), np.uint8) for _ in range(counts[at])]
        total = np.empty(size // 4, np.float32)
        cpu.decode(code, threshold, parts, total)
        payloads.append(b"".join(part.tobytes() for part in parts))
        sums.append(total.tobytes())
        record = Record(
            RecordKind.VALUE, slice_, 1 + at, 40 + at, 0, 0, code, threshold, place=FRAME, frame=at
        )
        records.append(record._replace(nbytes=len(payloads[-1])))
    return records, payloads, sums


@given(
    st.sampled_from([RecordKind.PUSHPULL, RecordKind.PULL]),
    st.sampled_from(["two_bit", "one_bit"]),
    st.lists(st.integers(1, 8), max_size=3),
    st.integers(1, 40_000),
    st.lists(st.integers(1, 16), min_size=4, max_size=4),
    st.sampled_from([0.5, 0.1, 3e38, 1e-45]),
    st.integers(-1, 3),
)
@settings(max_examples=60, deadline=None)
def test_sums_that_come_packed(
    sender: Sender,
    kind: RecordKind,
    coding: str,
    cuts: list[int],
    last: int,
    counts: list[int],
    threshold: float,
    plain: int,
) -> None:
    """All of them, or all but one: it is the server that chooses."""
    code = cpu.coding(coding)
    one = Pair(sender, [128 * 300 * cut for cut in cuts] + [4 * last], kind=kind)
    begin_packed(one, code)
    records, payloads, sums = packed_answers(one, code, threshold, counts)
    if 0 <= plain < len(sums):
        records[plain] = records[plain]._replace(coding=0, threshold=0.0, nbytes=len(sums[plain]))
        payloads[plain] = sums[plain]
    text = written(Batch(*HEAD, records, tuple(payloads), 77))
    for at in range(0, len(text), 60_000):
        one.server.sendall(text[at : at + 60_000])
        assert one.wait(0.0) == []
    one.all_came()
    assert one.out.tobytes() == b"".join(sums) and one.guarded()
    assert one.exchange.rounds() == [40 + at for at in range(len(sums))]
    one.close()


_PACKED: dict[str, dict[str, Any]] = {
    "no code": {"coding": 0},
    "16 bits": {"coding": cpu.coding("half")},
    "no such code": {"coding": 200},
    "infinite": {"threshold": float("inf")},
    "half a part": {"nbytes": 20_000 - 4},
    "no part": {"nbytes": 0},
    "far": {"offset": 4},
    "shared": {"place": PayloadLocation.SHARED},
    "nowhere": {"place": PayloadLocation.NONE},
    "of rows": {"rows": 2},
}


@pytest.mark.parametrize("kind", [RecordKind.PUSHPULL, RecordKind.PULL])
@pytest.mark.parametrize("name", [*_PACKED, "too many", "not asked"])
def test_a_packed_reply_that_is_not_as_expected(
    pair: Callable[..., Pair], name: str, kind: RecordKind
) -> None:
    code = cpu.coding("two_bit")
    one = pair([4 * 40_000, 4 * 36_000], kind=RecordKind.PUSHPULL if name == "not asked" else kind)
    if name == "not asked":
        one.begin()
    else:
        begin_packed(one, code)
    records, payloads, _ = packed_answers(one, code, 0.5, [17 if name == "too many" else 2, 2])
    records[0] = records[0]._replace(**_PACKED.get(name, {}))
    text = raw(CODEC.encode(Batch(*HEAD, records, tuple(payloads), 77)))
    writer = threading.Thread(target=one.server.sendall, args=(text,))
    writer.start()
    found: list[list[Any]] = []
    end = pace.deadline(20)
    while not found:
        assert time.monotonic() < end
        found = one.wait() or one.stream.receive()
    writer.join()
    assert raw(found[0]) == text
    assert (one.out == 0xEE).all() and one.guarded() and one.exchange.left == 2


def test_a_sum_in_place_that_is_said_to_be_packed(pair: Callable[..., Pair]) -> None:
    """It has no bytes, so it is the sum of no parts: a division by zero."""
    one = pair([4 * 40_000])
    assert one.set(one.value, one.out)
    words = np.zeros(cpu.encoded_bytes(cpu.coding("two_bit"), 40_000), np.uint8)
    one.exchange.pack(cpu.coding("two_bit"), 0.5, address(words), words)
    one.exchange.share({0: (0, 0, True)})
    assert one.stream.begin(one.exchange, [4], [CLOCK], 1, 0, EPOCH, VERSION)
    record = Record(RecordKind.VALUE, 100, 1, 40, coding=cpu.coding("two_bit"), threshold=0.5)
    text = written(Batch(*HEAD, [record._replace(flags=IN_PLACE, place=PayloadLocation.NONE)], (), 77))
    one.server.sendall(text)
    assert [raw(frames) for frames in one.wait()] == [text]
    assert one.exchange.left == 1 and one.guarded()


def receive(server: socket.socket) -> list[bytes]:
    """Receive the frames of one message."""
    _, count = struct.unpack("<II", read(server, 8))
    return [read(server, size) for size in struct.unpack(f"<{count}Q", read(server, 8 * count))]


def batch_of(message: Any) -> Batch:
    assert isinstance(message, Batch)
    return message


def test_a_push_is_answered_by_a_word(pair: Callable[..., Pair]) -> None:
    one = pair([3000, 70_000, 5], kind=RecordKind.PUSH)
    one.begin()
    done = [Record(RecordKind.DONE, 100 + at, 1 + at, 40 + at) for at in (2, 0)]
    one.server.sendall(written(Batch(*HEAD, done, (), 77)))
    assert one.wait(0.05) == [] and one.exchange.left == 1
    assert one.exchange.answered_bytes == 3005
    wrong = written(Batch(*HEAD, [Record(RecordKind.VALUE, 101, 2, 41)], (), 77))
    one.server.sendall(wrong)
    assert [raw(frames) for frames in one.wait()] == [wrong]
    assert one.exchange.rounds() == [40, None, 42]


@pytest.mark.parametrize("name", ["done", "failed", "unknown", "no payload", "late", "other slice"])
def test_a_value_that_is_pulled(pair: Callable[..., Pair], name: str) -> None:
    one = pair([70_000, 3000], kind=RecordKind.PULL)
    one.begin()
    values = [os.urandom(70_000), os.urandom(3000)]
    text = changed(name)(one, values)
    one.server.sendall(one.reply([1], values[1:]) + text)
    found: list[list[Any]] = []
    end = pace.deadline(20)
    while not found:
        assert time.monotonic() < end
        found = one.wait()
    assert raw(found[0]) == text and one.exchange.rounds() == [None, 41]
    assert one.out[70_000:].tobytes() == values[1] and (one.out[:70_000] == 0xEE).all() and one.guarded()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 2, 0], [2, 3, 0, 1]])
def test_answers_to_the_exchange_before(pair: Callable[..., Pair], order: list[int], together: bool) -> None:
    """A pull is sent behind a push without a reply; replies may answer both."""
    push, pull = pair([300, 20], kind=RecordKind.PUSH), pair([70_000, 10], kind=RecordKind.PULL)
    pull.stream.close()
    pull.server.close()
    pull.stream, pull.server = push.stream, push.server
    push.begin()
    assert pull.set(pull.value, pull.out)
    pull.exchange.follow(push.exchange)
    with pytest.raises(ValueError, match="follow itself"):
        push.exchange.follow(pull.exchange)
    assert push.stream.begin(pull.exchange, [1, 1], [0], 3, 0, EPOCH, 0)
    values = {2: os.urandom(70_000), 3: os.urandom(10)}
    for some in [order] if together else [[at] for at in order]:
        payloads = tuple(values[at] for at in some if at > 1)
        frames = iter(range(4))
        records = [
            Record(
                RecordKind.VALUE, 98 + at, 1 + at, 9, place=FRAME, frame=next(frames), nbytes=len(values[at])
            )
            if at > 1
            else Record(RecordKind.DONE, 100 + at, 1 + at, 8)
            for at in some
        ]
        push.server.sendall(written(Batch(*HEAD, records, payloads, 320)))
        assert pull.wait(0.0) == []
    end = pace.deadline(20)
    while push.exchange.left or pull.exchange.left:
        assert time.monotonic() < end and pull.wait() == []
    assert push.exchange.rounds() == [8, 8] and pull.exchange.rounds() == [9, 9]
    assert pull.out.tobytes() == values[2] + values[3] and pull.guarded()
    again = written(Batch(*HEAD, [Record(RecordKind.DONE, 100, 1, 8)], (), 320))
    push.server.sendall(again)
    end = pace.deadline(20)
    found: list[Any] = []
    while not found:
        assert time.monotonic() < end
        found = push.stream.receive()
    assert [raw(frames) for frames in found] == [again], "nothing is answered twice"


def test_what_an_exchange_does_not_take(pair: Callable[..., Pair]) -> None:
    push, pull = pair([100], kind=RecordKind.PUSH), pair([100], kind=RecordKind.PULL)
    for one, values, outs in ((push, b"", b""), (push, None, None), (pull, b"", b""), (pull, None, None)):
        with pytest.raises(ValueError, match="no values, and a push no outs"):
            one.exchange.set(values, outs, None)
    with pytest.raises(ValueError, match="an exchange pushes"):
        Exchange((PROTOCOL, CODEC.job, 0, 0, 0), [], [], 1, 1, 1, 1, RecordKind.INIT)
    assert pull.set(pull.value, pull.out) and push.set(push.value, push.out)
    for exchange, code in ((pull.exchange, 1), (push.exchange, 0), (push.exchange, 99)):
        with pytest.raises(ValueError, match="no codec"):
            exchange.pack(code, 0.5, address(push.value), None)


@given(SHAPES, st.integers(0, 1 << 32), st.booleans())
@settings(max_examples=80, deadline=None)
def test_values_come_in_any_order_and_however_they_are_cut(
    sender: Sender, sizes: list[int], seed: int, same: bool
) -> None:
    draw = random.Random(seed)
    pair = Pair(sender, sizes, same=same)
    pair.begin(first=1 << 40)
    wanted = [os.urandom(size) for size in sizes]
    order = draw.sample(range(len(sizes)), len(sizes))
    replies = [written(Batch(*HEAD, [], (), 5))]
    while order:
        now, order = (order[: (cut := draw.randint(1, len(order)))], order[cut:])
        replies.append(pair.reply(now, [wanted[at] for at in now]))
    rest = b"".join(replies)
    while rest:
        rest = rest[pair.server.send(rest[: draw.randint(1, 40_000)]) :]
        assert pair.wait(0.0) == []
    pair.all_came()
    assert pair.out.tobytes() == b"".join(wanted)
    assert pair.guarded()
    assert pair.exchange.rounds() == [40 + at for at in range(len(sizes))]
    assert pair.exchange.received == 77
    assert pair.stream.receive() == []
    pair.close()


def changed(name: str) -> Callable[[Pair, list[bytes]], bytes]:
    """Make a reply that is wrong in one way."""

    def make(pair: Pair, values: list[bytes]) -> bytes:
        records = pair.records([0, 1], values)
        head, first, received = list(HEAD), records[0], 0
        frames = list(values)
        codec = CODEC
        if name in _FIELDS:
            records[0] = first._replace(**_FIELDS[name])
        elif name == "short payload":
            frames[0] = frames[0][:-1]
        elif name == "twice":
            records[1] = first
        elif name == "one more":
            records.append(first._replace(sequence=pair.first + 2))
        elif name == "other job":
            codec = MessageCodec("other")
        elif name in _HEADS:
            head[_HEADS.index(name)] += 1
        batch = Batch(*head, records, tuple(frames), received)  # type: ignore[arg-type]
        text = bytearray(raw(codec.encode(batch)))
        if name == "version":
            text[text.index(b"KVST", 4) + 4] += 1
        return bytes(text)

    return make


_FIELDS: dict[str, dict[str, Any]] = {
    "done": {"kind": RecordKind.DONE},
    "failed": {"kind": RecordKind.FAILED},
    "unknown": {"kind": RecordKind.UNKNOWN, "place": PayloadLocation.NONE},
    "no payload": {"place": PayloadLocation.NONE},
    "shared": {"place": PayloadLocation.SHARED},
    "late": {"sequence": 0},
    "never asked": {"sequence": 9},
    "huge sequence": {"sequence": (1 << 64) - 1},
    "other slice": {"slice": 101},
    "long": {"nbytes": 70_001},
    "short": {"nbytes": 69_999},
    "huge": {"nbytes": (1 << 64) - 1},
    "far": {"offset": 1},
    "far away": {"offset": (1 << 64) - 1},
    "no frame": {"frame": 9},
    "last frame": {"frame": (1 << 32) - 1},
    "rows": {"rows": 0},
    "coded": {"coding": 1},
    "infinite": {"threshold": float("inf")},
}
_HEADS = ["store", "rank", "incarnation"]
_OTHERS = ["short payload", "twice", "one more", "other job", "version"]


@pytest.mark.parametrize("small", [False, True], ids=["large", "small"])
@pytest.mark.parametrize("name", [*_FIELDS, *_HEADS, *_OTHERS])
def test_a_reply_that_is_not_as_expected_is_left_to_the_usual_way(
    pair: Callable[..., Pair], name: str, small: bool
) -> None:
    sizes = [70_000, 3000] if not small else [200, 3000]
    one = pair(sizes)
    one.begin()
    before = one.out.copy()
    text = changed(name)(one, [os.urandom(size) for size in sizes])
    one.server.sendall(text)
    found: list[list[Any]] = []
    end = pace.deadline(20)
    while not found:
        assert time.monotonic() < end
        found = one.wait()
    assert raw(found[0]) == text
    assert (one.out == before).all() and one.guarded()
    assert one.exchange.left == 2 and one.exchange.rounds() == [None, None]


def test_what_was_answered_is_not_answered_again(pair: Callable[..., Pair]) -> None:
    one = pair([70_000, 70_000])
    one.begin()
    good, other = os.urandom(70_000), os.urandom(70_000)
    text = one.reply([0], [other])
    one.server.sendall(one.reply([0], [good]) + text + one.reply([1], [other]))
    found: list[list[Any]] = []
    end = pace.deadline(20)
    while len(found) < 2:
        assert time.monotonic() < end
        found += one.wait() if not found else one.stream.receive()
    assert raw(found[0]) == text, "and all after it is left to the usual way"
    assert one.exchange.rounds() == [40, None]
    assert one.out[:70_000].tobytes() == good and (one.out[70_000:] == 0xEE).all() and one.guarded()


@pytest.mark.parametrize("nbytes", [5, 60, 200, 30_000, 70_200])
def test_a_wait_that_ends_early_writes_no_more(pair: Callable[..., Pair], nbytes: int) -> None:
    one = pair([70_000, 10])
    one.begin()
    values = [os.urandom(70_000), os.urandom(10)]
    text = one.reply([0, 1], values)
    one.server.sendall(text[:nbytes])
    assert one.wait(0.05) == []
    one.exchange.clear()
    one.out[:] = 0x11
    one.server.sendall(text[nbytes:])
    found: list[list[Any]] = []
    end = pace.deadline(20)
    while not found:
        assert time.monotonic() < end
        select.select([one.stream], [], [], 0.1)
        found = one.stream.receive()
    assert raw(found[0]) == text
    assert (one.out == 0x11).all() and one.guarded()


def test_a_stream_that_breaks_in_a_reply(pair: Callable[..., Pair]) -> None:
    one = pair([70_000])
    one.begin()
    one.server.sendall(one.reply([0], [bytes(70_000)])[:50_000])
    one.server.close()
    assert one.wait() == []
    assert one.exchange.left == 1
    with pytest.raises(ConnectionError, match="closed"):
        one.stream.receive()
    assert not one.stream.begin(one.exchange, [5], [0], 2, 0, 0, 0)


def test_another_descriptor_ends_a_wait(pair: Callable[..., Pair]) -> None:
    one = pair([70_000])
    one.begin()
    wake = os.eventfd(1)
    started = time.monotonic()
    assert one.wait(100, struct.pack("ii", wake, one.stream.fileno())) == []
    assert time.monotonic() - started < pace.seconds(20) and one.exchange.left == 1
    os.close(wake)


def test_the_array_that_is_sent_is_not_written_to_before_a_value_is_whole(pair: Callable[..., Pair]) -> None:
    one = pair([70_000], same=True)
    before = one.value.copy()
    one.begin()
    text = one.reply([0], [os.urandom(70_000)])
    one.server.sendall(text[:60_000])
    assert one.wait(0.05) == []
    assert (one.value == before).all(), "it may have to be sent again"


def test_arrays_of_which_parts_overlap_are_not_taken(pair: Callable[..., Pair]) -> None:
    one = pair([100])
    both = np.zeros(150, np.uint8)
    assert not one.set(both[:100], both[50:])
    assert not one.set(both[50:], both[:100])
    assert one.set(both[50:], both[50:])
    one.exchange.clear()
    with pytest.raises(ValueError, match="an address for each"):
        one.exchange.set(address(both, both), address(both), both)
    with pytest.raises(ValueError, match="no arrays"):
        one.stream.begin(one.exchange, [5], [0], 2, 0, 0, 0)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_many_arrays_are_apart_or_not(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    memory = np.zeros(40, np.uint8)
    places = st.integers(0, 35)
    starts = [data.draw(st.tuples(places, places)) for _ in sizes]
    if data.draw(st.booleans()):  # more often apart
        starts = [(8 * at, 8 * at) if draw % 2 else (8 * at, 35) for at, (draw, _) in enumerate(starts)]
    values = [memory[a : a + n] for (a, _), n in zip(starts, sizes, strict=True)]
    outs = [memory[b : b + n] for (_, b), n in zip(starts, sizes, strict=True)]
    exchange = Exchange((PROTOCOL, CODEC.job, 0, 0, 0), [], sizes, 1, 1, 1, 1)

    def meet(one: Bytes, other: Bytes) -> bool:
        return bool(np.shares_memory(one, other))

    apart = not any(
        (at != to and meet(out, outs[to]))
        or (meet(out, values[to]) and (at != to or starts[at][0] != starts[at][1]))
        for at, out in enumerate(outs)
        for to in range(len(sizes))
    )
    for _ in range(2):  # the second time it is known
        assert exchange.set(address(*values), address(*outs), memory) == apart


def test_no_more_is_sent_than_the_credit_until_answers_come(pair: Callable[..., Pair]) -> None:
    one = pair([50_000] * 10, batch_bytes=50_000, credit=120_000)
    one.begin()
    wanted = [os.urandom(50_000) for _ in range(10)]
    assert one.exchange.sent == 2
    for at in range(10):
        one.server.sendall(one.reply([at], [wanted[at]]))
        assert one.wait(0.2 if at < 9 else 20.0) == []
        assert one.exchange.sent == min(at + 3, 10) and one.exchange.left == 9 - at
    assert one.out.tobytes() == b"".join(wanted)
    read(one.server, sum([50_000] * 10))


def test_what_the_server_has_does_not_count_against_the_credit(pair: Callable[..., Pair]) -> None:
    """It answers nothing before it has all parts, and only reports the received parts."""
    one = pair([50_000] * 10, batch_bytes=50_000, credit=120_000)
    one.begin()
    came = 100_000
    while one.exchange.sent < 10:
        told = one.exchange.sent
        one.server.sendall(written(Batch(*HEAD, [], (), came)))
        assert one.wait(0.2) == []
        assert one.exchange.sent == min(told + 2, 10)
        came += 100_000
    wanted = [os.urandom(50_000) for _ in range(10)]
    one.answer_all(wanted)


@pytest.mark.parametrize(
    ("near", "turns", "usual"),
    [(False, True, 4), (True, False, 2), (True, True, 1)],
    ids=["another host", "this host", "this host, by turns"],
)
def test_more_goes_where_nothing_comes(
    pair: Callable[..., Pair], near: bool, turns: bool, usual: int
) -> None:
    """Within the credit all parts are sent to a server that is silent until it has them; then at once."""
    sizes = [1 << 20] * 12
    one = pair(sizes, batch_bytes=1 << 20)
    one.stream.is_near, one.stream.limits_in_flight = near, turns
    for first, at_once in ((1, usual), (13, 12)):
        one.begin(first)
        assert one.exchange.sent == at_once
        assert one.wait(0.5) == [] and one.exchange.sent == 12
        wanted = [os.urandom(size) for size in sizes]
        one.answer_all(wanted)


def test_the_usual_window_is_tried_again(pair: Callable[..., Pair]) -> None:
    """After 8 calls that sent all at once, then after 16; where replies arrive in time it stays."""
    sizes = [1 << 16] * 96
    usual, every = 32, len(sizes)
    one = pair(sizes, batch_bytes=1 << 16)
    one.stream.is_near = True
    first, wanted = 1, [os.urandom(size) for size in sizes]

    def call(late: bool = False) -> int:
        """Return how much was sent at once."""
        nonlocal first
        one.begin(first)
        first += every
        sent, end = one.exchange.sent, pace.deadline(20)
        while late and one.exchange.sent < every:
            assert one.wait(0.05) == [] and time.monotonic() < end
        one.answer_what_was_sent(wanted)
        return sent

    assert call(late=True) == usual
    assert [call() for _ in range(8)] == [every] * 8
    assert call(late=True) == usual
    assert [call() for _ in range(16)] == [every] * 16
    assert [call() for _ in range(3)] == [usual] * 3
    assert call(late=True) == usual
    assert [call() for _ in range(9)] == [every] * 8 + [usual]


@pytest.mark.parametrize(("mapped", "sent"), [(False, 4), (True, 12)])
def test_pulls_of_values_that_are_read_where_they_lie_go_at_once(
    pair: Callable[..., Pair], mapped: bool, sent: int
) -> None:
    """In one message: the stream brings no amount of them that could be too much at a time."""
    one = pair([1 << 20] * 12, kind=RecordKind.PULL)
    if mapped:
        one.exchange.map([(3, Segment(20_000).memory)])
    one.begin()
    assert one.exchange.sent == sent
    asked = batch_of(CODEC.decode(receive(one.server)))
    assert len(asked.records) == (12 if mapped else 1)


@pytest.mark.parametrize(
    ("slices", "kind", "sent"), [(12, RecordKind.PULL, 2), (4, RecordKind.PULL, 1), (12, RecordKind.PUSH, 1)]
)
def test_a_long_pull_of_workers_that_take_turns(
    pair: Callable[..., Pair], slices: int, kind: RecordKind, sent: int
) -> None:
    """Two parts are asked for at once; in a short one, and in pushes, one."""
    one = pair([1 << 20] * slices, kind=kind)
    one.stream.is_near, one.stream.limits_in_flight = True, True
    one.begin()
    assert one.exchange.sent == sent


def test_arrays_over_two_streams(sender: Sender) -> None:
    """Parts of the same two arrays are sent to two servers; each replies at any time."""
    one, two = Pair(sender, [1]), Pair(sender, [1])
    values = [np.arange(40_000, dtype=np.uint8), np.arange(10, dtype=np.uint8)]
    outs = [np.zeros(40_000, np.uint8), np.zeros(10, np.uint8)]
    head, sizes = (PROTOCOL, CODEC.job, STORE, RANK, INCARNATION), [40_000, 10]
    cut = ([(1, 0, 0, 30_000)], [(2, 0, 30_000, 10_000), (3, 1, 0, 10)])
    made = [Exchange(head, parts, sizes, 1 << 20, MessageLimits().frame, 1 << 30, 1 << 20) for parts in cut]
    ways = [(made[0], one.stream), (made[1], two.stream)]
    for exchange, stream in ways:
        assert exchange.set(address(*values), address(*outs), (values, outs))
        rounds = [1] * exchange_parts(exchange)
        assert stream.begin(exchange, rounds, [1, 2], 1, 0, EPOCH, VERSION)
    new = [os.urandom(40_000), os.urandom(10)]
    records = [
        Record(RecordKind.VALUE, 2, 1, 9, place=FRAME, nbytes=10_000),
        Record(RecordKind.VALUE, 3, 2, 9, place=FRAME, frame=1, nbytes=10),
    ]
    two.server.sendall(written(Batch(*HEAD, records, (new[0][30_000:], new[1]), 0)))
    end = pace.deadline(20)
    while made[1].left:
        assert time.monotonic() < end and await_replies(ways, b"", time.monotonic() + 0.05) == []
    assert made[0].left == 1 and outs[1].tobytes() == new[1]
    record = Record(RecordKind.VALUE, 1, 1, 9, place=FRAME, nbytes=30_000)
    one.server.sendall(written(Batch(*HEAD, [record], (new[0][:30_000],), 0)))
    while made[0].left:
        assert time.monotonic() < end and await_replies(ways, b"", time.monotonic() + 0.05) == []
    assert outs[0].tobytes() == new[0]
    one.close()
    two.close()


def exchange_parts(exchange: Exchange) -> int:
    return len(exchange.rounds())


PAGE, VALUE_AT = 4096, 8192


class Segment:
    """A segment of a server's memory with one value, and its seqlock."""

    def __init__(self, nbytes: int) -> None:
        self.memory = np.zeros(VALUE_AT + nbytes, np.uint8)
        self.words = self.memory[:PAGE].view(np.uint64)
        self.value = self.memory[VALUE_AT:]
        self.value[:] = np.frombuffer(os.urandom(nbytes), np.uint8)
        self.words[VALUE_AT // PAGE] = 6

    def answer(self, pair: Pair, **more: Any) -> bytes:
        nbytes = self.value.nbytes
        record = Record(
            RecordKind.VALUE, 100, pair.first, 40, place=PayloadLocation.SHARED, frame=3, offset=VALUE_AT,
            nbytes=nbytes, flags=6,
        )._replace(**more)  # fmt: skip
        return written(Batch(*HEAD, [record], (), 77))


def test_a_value_in_the_servers_memory(pair: Callable[..., Pair]) -> None:
    one, segment = pair([20_000]), Segment(20_000)
    one.exchange.map([(3, segment.memory)])
    one.begin()
    one.server.sendall(segment.answer(one))
    one.all_came()
    assert (one.out == segment.value).all() and one.guarded()


@pytest.mark.parametrize(
    "wrong",
    [
        {"frame": 2},
        {"frame": 4},
        {"offset": VALUE_AT + 1},
        {"offset": 2**64 - 1},
        {"flags": 4},
        {"flags": 7},
        {"nbytes": 19999},
        {"nbytes": 2**64 - 1},
        {"place": PayloadLocation.NONE, "flags": 3},
    ],
)
def test_a_value_that_is_not_there_is_left_to_the_usual_way(
    pair: Callable[..., Pair], wrong: dict[str, Any]
) -> None:
    one, segment = pair([20_000]), Segment(20_000)
    if wrong.get("flags") == 7:
        segment.words[VALUE_AT // PAGE] = 7
    one.exchange.map([(3, segment.memory)])
    one.begin()
    one.server.sendall(segment.answer(one, **wrong))
    assert len(one.wait()) == 1
    assert one.exchange.left == 1 and one.guarded()


def test_values_that_are_pushed_in_shared_memory(pair: Callable[..., Pair]) -> None:
    one = pair([20_000], same=True)
    assert one.set(one.value, one.out)
    one.exchange.share({0: (5, 640, True)})
    assert one.stream.begin(one.exchange, [4], [CLOCK], 1, 0, EPOCH, VERSION)
    record = Record(
        RecordKind.PUSHPULL, 100, 1, 4, VERSION, CLOCK, place=PayloadLocation.SHARED, frame=5, offset=640,
        nbytes=20_000, flags=3,
    )  # fmt: skip
    wanted = written(Batch(*HEAD, [record], ()))
    assert read(one.server, len(wanted)) == wanted
    before = one.value.copy()
    answer = Record(RecordKind.VALUE, 100, 1, 4, flags=3)
    one.server.sendall(written(Batch(*HEAD, [answer], ())))
    one.all_came()
    assert (one.value == before).all(), "the server has written it"


def test_no_more_requests_go_than_a_server_can_number(pair: Callable[..., Pair]) -> None:
    count, some = SPAN + 10, 4096
    one = pair([1] * count)
    drained = threading.Event()

    def drain() -> None:
        while not drained.is_set():
            if select.select([one.server], [], [], 0.05)[0] and not one.server.recv(1 << 20):
                return

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        one.begin()
        assert one.exchange.sent == SPAN
        values = [bytes([at % 256]) for at in range(count)]

        def answer(begin: int, end: int) -> None:
            reply = one.reply(range(begin, end), values[begin:end])
            writer = threading.Thread(target=one.server.sendall, args=(reply,))
            writer.start()
            left, until = one.exchange.left - (end - begin), pace.deadline(20)
            while one.exchange.left > left:
                assert one.wait(0.05) == [] and time.monotonic() < until
            writer.join()

        answer(1, some)
        assert one.exchange.sent == SPAN  # the first has no answer yet
        answer(0, 1)
        assert one.exchange.sent == count
        for begin in range(some, count, some):
            answer(begin, min(begin + some, count))
        assert one.out.tobytes() == b"".join(values)
    finally:
        drained.set()
        reader.join()
