"""Messages as frames: each written message is read, and nothing else is."""

from __future__ import annotations

import math
import struct
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import wire_examples
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ProtocolError
from kvstore.stores.parameter_server.protocol.messages import (
    PROTOCOL,
    BarrierRequest,
    Batch,
    CreateKeysRequest,
    HelloRequest,
    KeyEntry,
    KeySpec,
    MemberReply,
    PayloadLocation,
    Record,
    RecordKind,
    RefusalNotice,
    ReliableMessage,
    Slice,
)
from kvstore.stores.parameter_server.transport import frames as frames_module
from kvstore.stores.parameter_server.transport.frames import MessageCodec, MessageLimits, pack_payloads

JOB = MessageCodec("a job")
HELLO = ReliableMessage(1, 0, HelloRequest("worker", 0, 1, "process", "a job", PROTOCOL))

unsigned32, unsigned64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
records = st.builds(
    Record,
    kind=st.sampled_from([kind for kind in RecordKind if kind != RecordKind.BAD]),
    slice=unsigned32,
    sequence=unsigned64,
    round=unsigned64,
    version=unsigned32,
    clock=unsigned64,
    coding=st.integers(0, 255),
    threshold=st.floats(-1e300, 1e300),
    rows=st.just(-1),
    place=st.sampled_from([PayloadLocation.NONE, PayloadLocation.SHARED]),
    frame=unsigned32,
    offset=unsigned64,
    nbytes=unsigned64,
    flags=unsigned64,
)


def batch(*found: Record, frames: tuple[Any, ...] = (), **fields: Any) -> Batch:
    return Batch(
        **{"store": 0, "rank": 1, "incarnation": 2, "epoch": 3, **fields}, records=list(found), frames=frames
    )


def refused(message: Any, reader: MessageCodec = JOB) -> str:
    with pytest.raises(ProtocolError) as error:
        reader.decode(message)
    return str(error.value)


@given(
    st.lists(records, max_size=20),
    st.integers(-(2**31), 2**31 - 1),
    st.integers(-(2**31), 2**31 - 1),
    unsigned64,
    unsigned64,
    unsigned64,
)
def test_a_batch_is_read_as_it_was_written(
    found: list[Record], store: int, rank: int, incarnation: int, epoch: int, received: int
) -> None:
    written = Batch(store, rank, incarnation, epoch, found, (), received)
    read = JOB.decode(JOB.encode(written))
    assert read == written
    assert isinstance(read, Batch)
    assert all(type(one) is Record for one in read.records)
    assert all(type(one.kind) is RecordKind and type(one.place) is PayloadLocation for one in read.records)


def test_payloads_are_the_callers_buffers_and_the_receivers_frames() -> None:
    sent = np.arange(60_000, dtype=np.float32).reshape(2, 30_000)
    record = Record(RecordKind.PUSH, 1, 1, place=PayloadLocation.FRAME, frame=0, nbytes=sent.nbytes)
    frames = JOB.encode(batch(record, frames=(sent,)))
    sent[0, 0] = 7
    assert np.frombuffer(frames[1], np.float32)[0] == 7, "no copy was made"
    arrived = [zmq.Frame(bytes(frame)) for frame in frames]
    read = JOB.decode(arrived)
    assert isinstance(read, Batch)
    assert np.shares_memory(
        np.frombuffer(read.frames[0], np.uint8), np.frombuffer(arrived[1].buffer, np.uint8)
    )
    np.testing.assert_array_equal(np.frombuffer(read.frames[0], np.float32), sent.reshape(-1))


@pytest.mark.parametrize("size", [0, 1, 24, 32 * 1024, 32 * 1024 + 1])
def test_a_small_first_payload_travels_with_the_records(size: int) -> None:
    first, second = np.arange(size, dtype=np.uint8), np.arange(9, dtype=np.uint8)
    records = [
        Record(RecordKind.PUSH, 1, 1, place=PayloadLocation.FRAME, frame=0, nbytes=size),
        Record(RecordKind.PUSH, 2, 2, place=PayloadLocation.FRAME, frame=1, nbytes=9),
    ]
    frames = JOB.encode(batch(*records, frames=(first, second)))
    assert len(frames) == (2 if 0 < size <= 32 * 1024 else 3)
    read = JOB.decode(frames)
    assert isinstance(read, Batch)
    assert read.records == records
    assert [bytes(frame) for frame in read.frames] == [first.tobytes(), second.tobytes()]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int8, np.int64, np.bool_])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 2, 2)])
def test_any_contiguous_array_is_a_payload(dtype: Any, shape: tuple[int, ...]) -> None:
    sent = np.ones(shape, dtype)
    record = Record(RecordKind.VALUE, 1, 1, place=PayloadLocation.FRAME, nbytes=sent.nbytes)
    read = JOB.decode(JOB.encode(batch(record, frames=(sent,))))
    assert isinstance(read, Batch)
    assert bytes(read.frames[0]) == sent.tobytes()


def test_a_payload_with_gaps_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ProtocolError, match="contiguous"):
        JOB.encode(batch(frames=(np.ones((4, 4))[:, ::2],)))


KEY = KeyEntry(KeySpec("w", (2, 3), "float32"), 0, (Slice(1, 0, 0, 6),), True)
CONTROL = [
    HELLO,
    ReliableMessage(7, 6, MemberReply(3, (KEY,))),
    ReliableMessage(0, 9),
    *wire_examples.control(),
]


@pytest.mark.parametrize("message", CONTROL, ids=lambda one: type(one).__name__)
def test_control_messages_are_read_as_they_were_written(message: Any) -> None:
    assert JOB.decode(JOB.encode(message)) == message


# ----------------------------------------------------------------------------- other jobs, other versions


@pytest.mark.parametrize(
    "message", [ReliableMessage(8, 6, BarrierRequest(1, 0, 4)), batch(Record(RecordKind.PULL, 1, 1))]
)
def test_messages_of_another_job_are_refused(message: Any) -> None:
    assert "another job" in refused(MessageCodec("yesterday's job").encode(message))


@pytest.mark.parametrize(
    "message", [ReliableMessage(8, 6, BarrierRequest(1, 0, 4)), batch(Record(RecordKind.PULL, 1, 1))]
)
def test_messages_of_another_version_are_refused(message: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "PROTOCOL", PROTOCOL + 1)
    newer = JOB.encode(message)
    monkeypatch.undo()
    assert f"version {PROTOCOL + 1}" in refused(newer)
    assert "same release" in refused(newer)


@pytest.mark.parametrize(
    "message", [HELLO, HELLO.body, ReliableMessage(1, 1, RefusalNotice("ConfigError", "text"))]
)
def test_questions_and_refusals_are_read_in_any_version(
    message: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames_module, "PROTOCOL", PROTOCOL + 1)
    newer = MessageCodec("another job").encode(message)
    monkeypatch.undo()
    assert JOB.decode(newer) == message


def test_what_a_newer_version_says_is_not_called_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "PROTOCOL", PROTOCOL + 1)
    newer = JOB.encode(HELLO)
    monkeypatch.undo()
    head = newer[0][: frames_module._HEAD.size]
    unknown = msgspec.msgpack.encode({"type": "Telepathy", "thought": 1})
    assert "version" in refused([head + unknown])


# ------------------------------------------------------------------------------------------- bad messages


def written(record: Record, *frames: bytes) -> list[bytes]:
    """Write a record that `encode` would not."""
    plain = record._replace(kind=RecordKind.PUSH, place=PayloadLocation.NONE)
    message = [bytes(one) for one in JOB.encode(batch(plain, frames=frames))]
    body = bytearray(message[0])
    start = frames_module._HEAD.size
    body[start : start + frames_module._RECORD.size] = frames_module._RECORD.pack(*record)
    return [bytes(body), *message[1:]]


PUSH = Record(RecordKind.PUSH, 1, 1, place=PayloadLocation.FRAME, nbytes=8)
BAD_RECORDS = {
    "kind": (PUSH._replace(kind=99), "kind 99"),  # type: ignore[arg-type]
    "place": (PUSH._replace(place=3), "place 3"),  # type: ignore[arg-type]
    "no such frame": (PUSH._replace(frame=1), "1 frames"),
    "frame beyond all": (PUSH._replace(frame=2**32 - 1), "frames"),
    "too long": (PUSH._replace(nbytes=9), "9 bytes from 0"),
    "from behind the end": (PUSH._replace(offset=9, nbytes=0), "from 9"),
    "far too long": (PUSH._replace(offset=2**64 - 1, nbytes=2**64 - 1), "bytes from"),
    "rows": (PUSH._replace(rows=2), "2 rows in 8 bytes"),
    "rows without number": (PUSH._replace(rows=-2), "-2 rows"),
    "rows beyond all": (PUSH._replace(rows=2**63 - 1), "rows"),
    "threshold not a number": (PUSH._replace(threshold=math.nan), "threshold"),
    "endless threshold": (PUSH._replace(threshold=math.inf), "threshold"),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_a_bad_record_is_refused(name: str) -> None:
    record, text = BAD_RECORDS[name]
    assert text in refused(written(record, bytes(8)))


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_a_bad_record_among_others_is_marked_for_its_sender(name: str) -> None:
    record, good = BAD_RECORDS[name][0]._replace(sequence=7, round=3), PUSH._replace(sequence=8)
    message = JOB.encode(batch(PUSH, good, frames=(bytes(8),)))
    body, at = bytearray(message[0]), frames_module._HEAD.size
    body[at : at + frames_module._RECORD.size] = frames_module._RECORD.pack(*record)
    found = MessageCodec("a job", marks=True).decode([bytes(body), *message[1:]])
    assert isinstance(found, Batch)
    assert found.records == [Record(RecordKind.BAD, 1, 7, 3), good]


def test_a_marked_frame_cannot_be_sent() -> None:
    assert "kind 30" in refused(JOB.encode(batch(Record(RecordKind.BAD, 1, 1))))


def test_a_payload_may_go_on_in_one_more_frame_only() -> None:
    record = PUSH._replace(rows=1, nbytes=24)
    two = written(record, bytes(8), bytes(16))
    assert isinstance(JOB.decode(two), Batch)
    assert "24 bytes from 0" in refused(written(record, bytes(8), bytes(15), bytes(99)))


def test_frames_that_are_no_message() -> None:
    good = [bytes(one) for one in JOB.encode(batch(Record(RecordKind.PULL, 1, 1)))]
    assert "too short" in refused([])
    assert "too short" in refused([b""])
    assert "too short" in refused([good[0][:50]])
    assert "invalid header" in refused([b"GET / HTTP/1.1\r\n" + bytes(100)])
    assert "kind 3" in refused([good[0][:6] + b"\3" + good[0][7:]])
    assert "1 records" in refused([good[0] + b"\0"])
    assert "1 records" in refused([good[0][:-1]])
    assert "has 10 frames" in refused([*good, *[b""] * 9])


def test_a_count_beyond_the_frame_allocates_nothing() -> None:
    good = JOB.encode(batch(Record(RecordKind.PULL, 1, 1)))[0]
    start = frames_module._HEAD.size
    forged = good[: start - 4] + struct.pack("<I", 2**32 - 1) + good[start:]
    assert "4294967295 records" in refused([forged])


def control(body: bytes) -> list[bytes]:
    return [JOB.encode(HELLO)[0][: frames_module._HEAD.size] + body]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "Bye"}),
        msgspec.msgpack.encode({"type": "Bye", "process": 7}),
        msgspec.msgpack.encode({"type": "Nothing"}),
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"type": "Bye", "process": "x"}) + b"more",
        b"\x91" * 100_000,  # lists in lists
        msgspec.msgpack.encode(HELLO.body).replace(b"\xa7options\x80", b"\xa7options" + b"\x81\x01" * 5000),
        b"\xdd\xff\xff\xff\xff",  # a list of 4 billion elements
        b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        b"\x82\xa4type\xa3Bye\xa7process\xa2\xff\xfe",  # no UTF-8
    ],
)
def test_bad_control_messages_are_refused(body: bytes) -> None:
    assert "cannot be read" in refused(control(body))


def test_a_control_message_has_one_frame() -> None:
    assert "2 frames" in refused([*JOB.encode(HELLO), b""])


def test_limits_hold_for_both_sides() -> None:
    tight = MessageCodec("a job", MessageLimits(frame=100, control=100, records=2))
    three = batch(*[Record(RecordKind.PULL, 1, 1)] * 3)
    large = batch(PUSH._replace(nbytes=101), frames=(bytes(101),))
    many = batch(Record(RecordKind.PULL, 1, 1), frames=(b"",) * 4)
    long = RefusalNotice("ConfigError", "x" * 100)
    for message in (three, large, many, long):
        with pytest.raises(ProtocolError):
            tight.encode(message)
    for message in (three, large, long):
        refused(JOB.encode(message), tight)
    assert tight.decode(tight.encode(batch(PUSH._replace(nbytes=100), frames=(bytes(100),))))


@pytest.mark.parametrize(
    "field", [{"slice": -1}, {"slice": 2**32}, {"round": -1}, {"nbytes": 2**64}, {"rows": 2**63}]
)
def test_numbers_that_do_not_fit_are_not_sent(field: dict[str, int]) -> None:
    with pytest.raises(ProtocolError, match="cannot be sent"):
        JOB.encode(batch(PUSH._replace(**field)))


# ------------------------------------------------------------------------------------------------ packing


@given(st.lists(st.integers(0, 300), max_size=30), st.integers(0, 200))
def test_small_payloads_share_a_frame(sizes: list[int], small: int) -> None:
    random = np.random.default_rng(len(sizes))
    payloads = [random.integers(0, 255, size, np.uint8) for size in sizes]
    frames, places = pack_payloads(payloads, small)
    assert len(frames) == sum(size > small for size in sizes) + any(size <= small for size in sizes)
    for payload, (frame, offset, nbytes) in zip(payloads, places, strict=True):
        assert nbytes == payload.nbytes
        assert bytes(memoryview(frames[frame])[offset : offset + nbytes]) == payload.tobytes()
        assert offset % 64 == 0


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_payloads_of_any_dtype_are_packed(dtype: Any) -> None:
    payloads = [np.ones((2, 3), dtype), (), b"bytes", np.ones((), dtype), np.ones(0, dtype)]
    frames, places = pack_payloads(payloads)
    assert len(frames) == 1
    found = [bytes(frames[0])[offset : offset + nbytes] for _, offset, nbytes in places]
    assert found == [np.ones(6, dtype).tobytes(), b"", b"bytes", np.ones(1, dtype).tobytes(), b""]
    with pytest.raises(ProtocolError, match="contiguous"):
        pack_payloads([np.ones((4, 4), dtype)[:, ::2]])


@pytest.mark.parametrize("small", [0, 1000])
def test_ids_and_rows_stay_behind_each_other(small: int) -> None:
    ids, rows = np.array([3, 5]), np.arange(8, dtype=np.float32)
    frames, places = pack_payloads([np.zeros(10), (ids, rows)], small)
    frame, offset, nbytes = places[1]
    assert nbytes == ids.nbytes + rows.nbytes
    behind = b"".join(bytes(one) for one in frames[frame:])[offset : offset + nbytes]
    assert behind == ids.tobytes() + rows.tobytes()
    record = Record(RecordKind.PUSH, 1, 1, 0, 0, 0, 0, 0.0, 2, PayloadLocation.FRAME, frame, offset, nbytes)
    assert isinstance(JOB.decode(JOB.encode(batch(record, frames=tuple(frames)))), Batch)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (KeySpec("w" * 1025, (1,), "float32"), "length <= 1024"),
        (KeySpec(2**63, (1,), "float32"), "int"),
        (KeySpec("w", (1,) * 65, "float32"), "length <= 64"),
        (KeySpec("w", (-1,), "float32"), ">= 0"),
    ],
)
def test_keys_and_shapes_have_limits(spec: KeySpec, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        JOB.encode(ReliableMessage(1, 0, CreateKeysRequest(1, 0, (spec,))))
    body = msgspec.msgpack.encode(ReliableMessage(1, 0, CreateKeysRequest(1, 0, (spec,))))
    assert text in refused(control(body))
