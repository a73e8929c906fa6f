"""Bytes of messages are those that the codec writes."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bench.scale.wire import ControlCodec, batch_bytes
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.protocol.messages import Batch, PayloadLocation, Record, RecordKind
from kvstore.stores.parameter_server.transport.frames import MessageCodec, pack_payloads

JOB = MessageCodec("a job")


def record(nbytes: int) -> Record:
    place = PayloadLocation.FRAME if nbytes else PayloadLocation.NONE
    return Record(RecordKind.PUSHPULL, 3, 7, 1, place=place, nbytes=nbytes)


@given(
    sizes=st.lists(st.integers(0, 40_000) | st.sampled_from([16 * 1024, 16 * 1024 + 1, 1 << 20]), max_size=9)
)
def test_requests_have_the_bytes_that_a_stream_gives_them(sizes: list[int]) -> None:
    batch = Batch(0, 1, 2, 3, [record(size) for size in sizes])
    payloads = [bytes(size) for size in sizes if size]
    frames, _ = pack_payloads(payloads) if payloads else ([], [])
    written: list[Any] = JOB.encode(batch._replace(frames=tuple(frames)))
    begins = 8 + 8 * len(written)  # as transport/native writes them before a message
    assert batch_bytes(batch) in (begins + sum(map(len, written)), begins + 8 + sum(map(len, written)))


def test_what_goes_to_many_is_made_once() -> None:
    codec, view = ControlCodec(), m.ViewNotice(0, 1, tuple(m.Member(n, n) for n in range(100)), (), (), ())
    letters = [m.ReliableMessage(n, 0, view) for n in range(3)]
    found = [codec.measure(letter) for letter in letters]
    assert [is_new for _, is_new in found] == [True, False, False]
    own = [len(b"".join(MessageCodec("a job").encode(letter))) for letter in letters]
    assert [nbytes - one for (nbytes, _), one in zip(found, own, strict=True)] == [9, 9, 9]
    assert ControlCodec(fans_out=False).measure(letters[0]) == found[0]
