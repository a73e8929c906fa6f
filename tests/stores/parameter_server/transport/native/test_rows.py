"""Rows over real sockets: gathered while they are sent, and received where they belong."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pace
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.stores.parameter_server.protocol.messages import Batch, PayloadLocation, Record, RecordKind
from kvstore.stores.parameter_server.transport.frames import MessageCodec, pack_payloads
from kvstore.stores.parameter_server.transport.native._streams import (
    ExpectedRows,
    GatheredRows,
    Sender,
    Stream,
)

Array = npt.NDArray[Any]
LIMIT = 1 << 25
WIDTH = 100  # float32 elements of a row
CODEC = MessageCodec("job")
GUARD = 64


@pytest.fixture(scope="module")
def sender() -> Iterator[Sender]:
    made = Sender()
    yield made
    made.close()


@pytest.fixture
def ends(sender: Sender) -> Iterator[tuple[Stream, Stream]]:
    both = socket.socketpair()
    for one in both:
        one.setblocking(False)
    ours, theirs = (Stream(sender, one.detach(), LIMIT) for one in both)
    yield ours, theirs
    ours.close()
    theirs.close()


def next_message(stream: Stream) -> list[Any]:
    end = pace.deadline(20)
    while time.monotonic() < end:
        select.select([stream], [], [], 0.1)
        for frames in stream.receive():
            return frames
    raise AssertionError("no message")


def table_of(rows: int) -> Array:
    return np.random.default_rng(rows).random((rows, WIDTH), np.float32)


def gathered(table: Array, rows: Array) -> GatheredRows:
    return GatheredRows(memoryview(table.reshape(-1).view(np.uint8)), 4 * WIDTH, rows)


# ----------------------------------------------------------------------------------------------- sent data


@given(st.lists(st.integers(-1, 49), max_size=60))
@settings(deadline=None)
def test_gathered_rows_are_a_buffer_of_them(rows: list[int]) -> None:
    table, where = table_of(50), np.array(rows, np.int64)
    found = gathered(table, where)
    wanted = np.where((where >= 0)[:, None], table[where], np.float32(0))
    assert found.nbytes == len(found) == wanted.nbytes
    assert bytes(memoryview(found)) == wanted.tobytes()
    assert memoryview(found).readonly


@pytest.mark.parametrize("count", [0, 1, 100, 5000, 20_000])
def test_gathered_rows_come_as_they_were_when_they_were_sent(ends: tuple[Stream, Stream], count: int) -> None:
    ours, theirs = ends
    table = table_of(1000)
    where = np.random.default_rng(count).integers(-1, 1000, count)
    wanted = np.where((where >= 0)[:, None], table[where], np.float32(0)).tobytes()
    for frames in ([b"head", gathered(table, where)], [b"head", gathered(table, where), b"more"]):
        assert ours.send(frames)
        if len(frames) == 2:
            table[:] = 7  # nothing is read any more, though the socket has not taken all
        came = [bytes(memoryview(frame)) for frame in next_message(theirs)]
        assert came == [b"head", wanted, *frames[2:]]
        table[:] = table_of(1000)
    assert ours.send([b"after"])
    assert bytes(memoryview(next_message(theirs)[0])) == b"after"


def test_rows_to_a_peer_that_is_gone_are_not_sent(ends: tuple[Stream, Stream]) -> None:
    ours, theirs = ends
    theirs.close()
    table, where = table_of(1000), np.arange(1000).repeat(10)
    end = pace.deadline(20)
    while ours.send([b"head", gathered(table, where)]):
        assert time.monotonic() < end
    assert not ours.send([b"head"])


@pytest.mark.parametrize("rows", [[50], [-2], [0, 2**62], [-(2**63)]])
def test_no_row_is_read_outside_of_its_table(rows: list[int]) -> None:
    with pytest.raises(IndexError):
        gathered(table_of(50), np.array(rows, np.int64))


def test_a_table_has_whole_rows() -> None:
    for nbytes, row_bytes in ((10, 3), (10, 0)):
        with pytest.raises(ValueError, match="no rows of"):
            GatheredRows(bytearray(nbytes), row_bytes, np.zeros(1, np.int64))


# --------------------------------------------------------------------------------------------------- received


def reply(slice_: int, ids: Array, data: Array, **changes: Any) -> list[Any]:
    """One answer to a pull of rows, as a server writes it."""
    both = memoryview(ids.view(np.uint8)), memoryview(data.reshape(-1).view(np.uint8))
    frames, ((frame, offset, nbytes),) = pack_payloads([both])
    record = Record(
        RecordKind.VALUE, slice_, 1, rows=len(ids), place=PayloadLocation.FRAME, frame=frame, offset=offset,
        nbytes=nbytes,
    )._replace(**changes)  # fmt: skip
    return CODEC.encode(Batch(0, 0, 0, 0, [record], tuple(frames), 0))


class Place:
    """Memory for rows, between guards."""

    def __init__(self, count: int) -> None:
        self.memory = np.full(4 * WIDTH * count + 2 * GUARD, 99, np.uint8)
        self.into = self.memory[GUARD:-GUARD]

    def holds(self, rows: Array) -> bool:
        assert (self.memory[:GUARD] == 99).all()
        assert (self.memory[-GUARD:] == 99).all()
        return self.into.tobytes() == rows.tobytes()

    @property
    def untouched(self) -> bool:
        return bool((self.memory == 99).all())


@pytest.mark.parametrize("count", [60, 1000, 5000, 20_000])
def test_expected_rows_are_received_where_they_belong(ends: tuple[Stream, Stream], count: int) -> None:
    """Ids lie behind the head, or in a frame of their own."""
    ours, theirs = ends
    ids, rows, place = np.arange(3, 3 + 5 * count, 5), table_of(count), Place(count)
    expected = ExpectedRows(4, ids, place.into)
    theirs.expect(expected)
    assert ours.send(reply(4, ids, rows))
    frames = next_message(theirs)
    assert place.holds(rows)
    assert bytes(memoryview(frames[-1])) == rows.tobytes()
    assert ours.send(reply(4, ids, rows + 1))  # it has arrived: another answer is not theirs
    assert bytes(memoryview(next_message(theirs)[-1])) == (rows + 1).tobytes()
    assert place.holds(rows)
    theirs.expect_no_more(expected)
    theirs.expect_no_more(expected)


@pytest.mark.parametrize(
    "change",
    [
        {"slice_": 5},
        {"kind": RecordKind.DONE},
        {"place": PayloadLocation.NONE},
        {"place": PayloadLocation.SHARED},
        {"frame": 1},
        {"frame": 2**32 - 1},
        {"rows": 999},
        {"rows": -1},
        {"nbytes": 1000 * 8},
        {"nbytes": 2**64 - 1},
        {"offset": 8},
        {"ids": 1},
        {"more": 1},
    ],
)
def test_what_is_not_expected_is_written_nowhere(ends: tuple[Stream, Stream], change: dict[str, Any]) -> None:
    ours, theirs = ends
    ids, place = np.arange(1000), Place(1000)
    theirs.expect(ExpectedRows(4, ids, place.into))
    changes = dict(change)
    slice_, other = changes.pop("slice_", 4), changes.pop("ids", 0)
    count = 1000 + changes.pop("more", 0)
    frames = reply(slice_, np.arange(other, other + count), table_of(count), **changes)
    assert ours.send(frames)
    came = [bytes(memoryview(frame)) for frame in next_message(theirs)]
    assert came == [bytes(memoryview(frame)) for frame in frames]
    assert place.untouched


def test_what_is_no_batch_is_written_nowhere(ends: tuple[Stream, Stream]) -> None:
    ours, theirs = ends
    ids, rows, place = np.arange(1000), table_of(1000), Place(1000)
    theirs.expect(ExpectedRows(4, ids, place.into))
    head, *others = reply(4, ids, rows)
    for first in (b"", b"KVST", bytes(len(head)), head[:-1], head[:48] + b"\xff" * 4 + head[52:]):
        assert ours.send([first, *others])
        assert bytes(memoryview(next_message(theirs)[-1])) == bytes(memoryview(others[-1]))
    assert place.untouched


def test_of_equal_rows_only_the_first_are_expected(ends: tuple[Stream, Stream]) -> None:
    """All answers arrive before one is read: none may be placed where those of another request belong."""
    ours, theirs = ends
    ids, rows, places = np.arange(60), table_of(60), [Place(60) for _ in range(4)]
    asked = [(4, ids), (4, ids), (4, ids + 1), (5, ids)]
    expected = [ExpectedRows(*one, place.into) for one, place in zip(asked, places, strict=True)]
    taken = [theirs.expect(one) for one in expected]
    for more, one in enumerate(asked):
        assert ours.send(reply(*one, rows + more))
    came: list[list[Any]] = []
    end = pace.deadline(20)
    while len(came) < len(asked):
        assert time.monotonic() < end
        came += theirs.receive()
    for more, frames in enumerate(came):
        assert bytes(memoryview(frames[-1])) == (rows + more).tobytes()
    assert [place.holds(rows + more) for more, place in enumerate(places)] == [True, False, True, True]
    assert places[1].untouched
    assert taken == [True, False, True, True]
    theirs.expect_no_more(expected[0])
    assert theirs.expect(expected[1])


def test_nothing_is_written_once_it_is_expected_no_more() -> None:
    """The received part of a frame moves to memory of its own, and the message arrives whole."""
    sender, (left, right) = Sender(), socket.socketpair()
    right.setblocking(False)
    theirs = Stream(sender, right.detach(), LIMIT)
    ids, rows, place, other = np.arange(1000), table_of(1000), Place(1000), Place(1000)
    expected = ExpectedRows(4, ids, place.into)
    theirs.expect(expected)
    theirs.expect(ExpectedRows(5, ids, other.into))
    frames = [bytes(memoryview(frame)) for frame in reply(4, ids, rows)]
    sizes = np.array([len(frame) for frame in frames], np.uint64).tobytes()
    text = b"KVST" + np.uint32(len(frames)).tobytes() + sizes + b"".join(frames)
    left.sendall(text[: -rows.nbytes // 2])
    end = pace.deadline(20)
    while place.untouched:
        assert time.monotonic() < end
        assert theirs.receive() == []
    theirs.expect_no_more(expected)
    before = place.memory.copy()
    left.sendall(text[-rows.nbytes // 2 :])
    assert bytes(memoryview(next_message(theirs)[-1])) == rows.tobytes()
    assert (place.memory == before).all()
    assert other.untouched
    theirs.close()
    left.close()
    sender.close()
