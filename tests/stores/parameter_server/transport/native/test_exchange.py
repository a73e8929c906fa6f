"""Exchanges over real sockets: bytes as the codec writes them, and replies write nothing but the value."""

from __future__ import annotations

import os
import random
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pace
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.stores.parameter_server.protocol.messages import PROTOCOL, Batch, Kind, PayloadLocation, Record
from kvstore.stores.parameter_server.transport import sockets
from kvstore.stores.parameter_server.transport.frames import Codec, Limits
from kvstore.stores.parameter_server.transport.native._streams import Exchange, Sender, Stream
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
CODEC = Codec("job")
Bytes = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def sender() -> Iterator[Sender]:
    made = Sender()
    yield made
    made.close()


class Pair:
    """A worker's stream with an exchange, and the server's socket."""

    def __init__(self, sender: Sender, sizes: Sequence[int], batch_bytes: int = 1 << 20, same: bool = False):
        ours, self.server = socket.socketpair()
        ours.setblocking(False)
        self.server.settimeout(20)
        self.stream = Stream(sender, ours.detach(), LIMIT)
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        self.parts = [(100 + at, starts[at], size) for at, size in enumerate(sizes)]
        head = (PROTOCOL, CODEC.job, STORE, RANK, INCARNATION)
        self.exchange = Exchange(head, self.parts, batch_bytes, Limits().frame)
        self.value: Bytes = np.frombuffer(os.urandom(sum(sizes)), np.uint8).copy()
        self.memory = np.full(sum(sizes) + 2 * GUARD, 0xEE, np.uint8)
        self.out = self.memory[GUARD:-GUARD]
        if same:
            self.out[:] = self.value
            self.value = self.out
        self.first = 1

    def begin(self, first: int = 1) -> None:
        self.first = first
        assert self.exchange.set(self.value, self.out)
        rounds = [at + 4 for at in range(len(self.parts))]
        assert self.stream.begin(self.exchange, rounds, first, EPOCH, VERSION, CLOCK)

    def wait(self, seconds: float = 20.0, descriptors: bytes = b"") -> list[list[Any]]:
        return self.stream.wait(self.exchange, descriptors, time.monotonic() + seconds)

    def all_came(self) -> None:
        end = pace.deadline(20)
        while self.exchange.left:
            assert time.monotonic() < end
            assert self.wait() == []

    def reply(self, answers: Sequence[int], payloads: Sequence[bytes]) -> bytes:
        """Write a reply as a server does."""
        return written(Batch(*HEAD, self.records(answers, payloads), tuple(payloads), 77))

    def records(self, answers: Sequence[int], payloads: Sequence[bytes]) -> list[Record]:
        return [
            Record(
                Kind.VALUE, 100 + at, self.first + at, 40 + at,
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


@pytest.fixture
def pair(sender: Sender) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(*arguments: Any, **options: Any) -> Pair:
        made.append(Pair(sender, *arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def raw(frames: Sequence[Any]) -> bytes:
    flat = [bytes(memoryview(frame)) for frame in frames]
    sizes = b"".join(struct.pack("<Q", len(frame)) for frame in flat)
    return b"KVST" + struct.pack("<I", len(flat)) + sizes + b"".join(flat)


def written(batch: Batch) -> bytes:
    return raw(CODEC.encode(sockets._packed(batch)))


def usual(pair: Pair, batch_bytes: int) -> bytes:
    """Write the requests as the state machine, the sockets and the codec do."""
    table = RequestTable(1 << 30, batch_bytes, 1.0)
    operation = OperationProgress("op", len(pair.parts))
    for at, (slice_, start, size) in enumerate(pair.parts):
        record = Record(
            Kind.PUSHPULL, slice_, 0, at + 4, VERSION, CLOCK, 0, 0.0, -1, FRAME, 0, 0, size, 0
        )  # fmt: skip
        payload = (memoryview(pair.value)[start : start + size],)
        table.add(RequestInFlight(operation, at, record, payload), 0)
    return b"".join(written(Batch(*HEAD, records, tuple(frames))) for records, frames in table.pump(0.0))


def read(server: socket.socket, nbytes: int) -> bytes:
    found = bytearray()
    while len(found) < nbytes:
        found += server.recv(nbytes - len(found))
    return bytes(found)


@given(SHAPES, st.sampled_from([1, 5000, 40_000, 1 << 20]))
@settings(max_examples=80, deadline=None)
def test_requests_are_those_of_the_usual_way(sender: Sender, sizes: list[int], batch_bytes: int) -> None:
    pair = Pair(sender, sizes, batch_bytes)
    wanted = usual(pair, batch_bytes)
    pair.begin()
    assert read(pair.server, len(wanted)) == wanted
    pair.server.setblocking(False)
    with pytest.raises(BlockingIOError):
        pair.server.recv(1)
    pair.close()


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
            codec = Codec("other")
        elif name in _HEADS:
            head[_HEADS.index(name)] += 1
        batch = Batch(*head, records, tuple(frames), received)  # type: ignore[arg-type]
        text = bytearray(raw(codec.encode(batch)))
        if name == "version":
            text[text.index(b"KVST", 4) + 4] += 1
        return bytes(text)

    return make


_FIELDS: dict[str, dict[str, Any]] = {
    "done": {"kind": Kind.DONE},
    "failed": {"kind": Kind.FAILED},
    "unknown": {"kind": Kind.UNKNOWN, "place": PayloadLocation.NONE},
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
    assert not one.stream.begin(one.exchange, [5], 2, 0, 0, 0)


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
    assert not one.exchange.set(both[:100], both[50:])
    assert not one.exchange.set(both[50:], both[:100])
    assert one.exchange.set(both[50:], both[50:])
    with pytest.raises(ValueError, match="not of the size"):
        one.exchange.set(both[:99], both[:99])
    with pytest.raises((BufferError, ValueError)):
        one.exchange.set(both[:100], bytes(100))
    with pytest.raises(ValueError, match="no arrays"):
        one.stream.begin(one.exchange, [5], 2, 0, 0, 0)
