"""Inputs that a fuzzer begins with: messages as the codec writes them, cut into the events of input.h."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import product

import wire_examples

from kvstore.stores.parameter_server.protocol.messages import Batch, PayloadLocation, Record, RecordKind
from kvstore.stores.parameter_server.transport.frames import MessageCodec

BYTES, FILLED, CHANGED = 0, 1, 2
#: As links.c and exchange.c have them: of the job, of each slice, and of each part.
VERSION, JOB, INCARNATION = 3, 77, 100
SLICES = (32, 20_000, 24, 132, 0, 4)
PARTS = (32, 20_000, 4, 16_400)
FRAME, SHARED = PayloadLocation.FRAME, PayloadLocation.SHARED
_CODEC = MessageCodec("job")
_CODES = range(5)


def event(what: int, to: int, number: int, data: bytes = b"") -> bytes:
    return struct.pack("<BBH", what, to, number) + data


def message(batch: Batch, to: int = 0, step: int = 1 << 15) -> bytes:
    """Write the bytes of a batch on a stream; large payloads are filled with one byte."""
    first, *payloads = (bytes(frame) for frame in _CODEC.encode(batch))
    first = first[:4] + struct.pack("<H", VERSION) + first[6:8] + struct.pack("<Q", JOB) + first[16:]
    sizes = [len(first), *map(len, payloads)]
    raw = struct.pack(f"<4sI{len(sizes)}Q", b"KVST", len(sizes), *sizes) + first
    pieces = [raw[at : at + step] for at in range(0, len(raw), step)]
    return b"".join(
        [event(BYTES, to, len(piece), piece) for piece in pieces]
        + [event(FILLED, to, len(payload)) for payload in payloads if payload]
    )


def batch(records: Sequence[Record], payloads: Sequence[bytes] = (), rank: int = 0) -> Batch:
    return Batch(0, rank, INCARNATION, 0, list(records), tuple(payloads), 0)


def encoded(nbytes: int, code: int) -> int:
    """Return the bytes of float32 elements as a code packs them."""
    n, bits = nbytes // 4, {0: 32, 1: 2, 2: 1}.get(code, 16)
    return n * bits // 8 if bits >= 8 else -(-n * bits // 32) * 4


def carrying(record: Record, nbytes: int, frame: int, place: PayloadLocation = FRAME) -> Record:
    return record._replace(place=place, frame=frame, offset=0, nbytes=nbytes)


def links() -> Iterator[bytes]:
    """Requests of three workers, for one slice or all, in frames and in shared memory."""
    for kind, code, ways in product((RecordKind.PUSH, RecordKind.PUSHPULL, RecordKind.PULL), _CODES, (1, 3)):
        for start in (0, 1 if ways == 1 else 3):
            yield event(start % 2, start, 9) + b"".join(
                message(requests(kind, code, rank, ways), rank) for rank in range(3)
            )
    for change in range(10):
        said = [message(requests(RecordKind.PUSHPULL, change % 2, rank, 1), rank) for rank in range(3)]
        yield event(0, 0, change) + event(CHANGED, 1, change).join(said)


def requests(kind: RecordKind, code: int, rank: int, step: int) -> Batch:
    records, payloads = [], []
    for number, slice_ in enumerate(range(0, len(SLICES), step)):
        record = Record(kind, slice_, number + 1, int(kind != RecordKind.PULL), threshold=0.5)
        nbytes = SLICES[slice_]
        if kind != RecordKind.PULL:
            coding = code if slice_ != 2 else 0
            place = SHARED if code == 0 and slice_ % 3 == 1 else FRAME
            nbytes = encoded(nbytes, coding) if coding else nbytes
            frame = 1 if place == SHARED else len(payloads)
            record = carrying(record._replace(coding=coding), nbytes, frame, place)
            if place == FRAME:
                payloads.append(bytes(nbytes))
        records.append(record)
    return batch(records, payloads, rank)


def exchange() -> Iterator[bytes]:
    """Replies to every kind of exchange: alone and together, packed, in frames, in shared memory, of rows."""
    ways = (0, 1 | 2 | 8, 4, 16, 8 | 32, 64)  # flags of exchange.c
    for kind, code, flags, alone in product(range(4), _CODES, ways, (False, True)):
        own = struct.pack("<BBBB", kind, code, flags, 0b1010)
        firsts = (1, 5) if flags & 16 else (1,)
        yield own + b"".join(replies(kind, code, flags, first, alone) for first in firsts)


def replies(kind: int, code: int, flags: int, first: int, alone: bool) -> bytes:
    every = [reply(kind, code, flags, first, at) for at in range(len(PARTS))]
    if alone:
        return b"".join(message(batch([record], payload)) for record, payload in every)
    payloads = [payload for _, several in every for payload in several]
    records, frames = [], 0
    for record, several in every:
        records.append(record._replace(frame=frames) if several else record)
        frames += len(several)
    return message(batch(records, payloads), step=4096)


def reply(kind: int, code: int, flags: int, first: int, at: int) -> tuple[Record, list[bytes]]:
    record = Record(RecordKind.DONE if kind == 1 else RecordKind.VALUE, at, first + at, 7)
    if kind == 1:
        return record, []
    if kind == 3:
        ids, rows = bytes(32), bytes(PARTS[at])
        payloads = [ids, rows] if len(rows) > 1000 else [ids + rows]
        return carrying(record._replace(rows=4), 32 + len(rows), 0), payloads
    if flags & 8:
        return record._replace(place=SHARED, frame=1, offset=4096, nbytes=PARTS[at], flags=0), []
    narrow = code in (1, 2) and PARTS[at] % 4 == 0 and kind == 0
    nbytes = 2 * encoded(PARTS[at], code) if narrow else PARTS[at]
    coding = code if narrow else 0
    return carrying(record._replace(coding=coding, threshold=0.5), nbytes, 0), [bytes(nbytes)]


def rows() -> Iterator[bytes]:
    """Rows of three tables, as a server sends them: ids in one frame, rows in the next."""
    for slice_, count, size in ((0, 2, 8192), (1, 4096, 4), (2, 3, 7000)):
        ids = struct.pack(f"<{count}q", *range(count)) if count < 9 else b"\1" * 8 * count
        record = Record(RecordKind.VALUE, slice_, 1, rows=count)
        said = batch([carrying(record, len(ids) + count * size, 0)], (ids, bytes(count * size)))
        raw = message(said)
        yield raw.replace(event(FILLED, 0, len(ids)), event(FILLED, 1, len(ids)))
    yield event(CHANGED, 0, 0) + struct.pack("<4q", 0, -1, 4, 5)


def streams() -> Iterator[bytes]:
    """Some messages of every kind, plain and in chunks that are encrypted."""
    for made in wire_examples.batches():
        raw = message(made)
        yield b"\0" + raw
        for keys in (1, 249):
            yield bytes([keys]) + chunks(raw)


def chunks(raw: bytes) -> bytes:
    """Put the bytes of the events into chunks, as cipher.h has them."""
    found, at = b"", 0
    while at < len(raw):
        what, _, number = struct.unpack_from("<BBH", raw, at)
        at += 4
        text = raw[at : at + number] if what == BYTES else bytes(number)
        at += number if what == BYTES else 0
        chunk = struct.pack("<I", len(text)) + text + bytes(16)
        found += event(BYTES, 0, len(chunk), chunk)
    return found


def codecs() -> Iterator[bytes]:
    for code, n in product(range(5), (0, 1, 31, 33, 255, 1400)):
        nbytes = encoded(4 * n, code)
        yield struct.pack("<BBHfQ", code, 2, n, 0.5, 3 * nbytes) + bytes(range(256)) * (3 * nbytes // 256 + 1)


SEEDS = {"links": links, "exchange": exchange, "rows": rows, "streams": streams, "codecs": codecs}
