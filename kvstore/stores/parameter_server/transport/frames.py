"""The bytes of messages on the wire, and the checks of a received message.

A message is one or more frames. The first begins with a head of fixed size::

    magic "KVST" | version | kind | flags | job | store | rank | incarnation | epoch | received | records

and continues with MessagePack (a control message), or with the records of a batch, each of fixed size, and,
where a flag is set, with the first payload. Each further frame is a payload. All numbers are little-endian.
`job` is a hash of the job's name, so that messages of an old job's processes, which may still know the port,
are rejected before anything else of them is read.

Only `HelloRequest` and `RefusalNotice` are accepted with any job and version, because the first asks and the
second says which are right; their format never changes.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import zmq

from kvstore.errors import ProtocolError

from ..protocol import messages as m
from ..protocol.messages import PROTOCOL, Batch, Control, PayloadLocation, Record, RecordKind
from .fan_out import FanOut
from .native._streams import GatheredRows

#: Anything with the buffer protocol; NumPy's arrays of any dtype.
Buffer = Any

_MAGIC = b"KVST"
_CONTROL, _DATA = 1, 2
_HEAD = struct.Struct("<4sHBBQiiQQQI")
_RECORD = struct.Struct("<BIQQIQBdqBIQQQ")
_KINDS = [
    RecordKind(kind) if kind in RecordKind._value2member_map_ and kind != RecordKind.BAD else None
    for kind in range(256)
]
_PLACES = [
    None if place not in PayloadLocation._value2member_map_ else PayloadLocation(place)
    for place in range(256)
]
_ALIGNED = 64
_PADDING = bytes(_ALIGNED)

# A first payload up to this size is put behind the records: one frame less to send and to receive.
_INLINE, _INLINE_BYTES = 1, 32 * 1024

#: Payloads up to this size share one frame: a frame costs microseconds, a copy of such a payload less.
SMALL = m.COPIED


@dataclass(frozen=True)
class MessageLimits:
    """The largest sizes of a message. Larger messages are not sent, and are refused when they arrive."""

    #: Bytes of one frame.
    frame: int = 256 << 20
    #: Bytes of a control message.
    control: int = 16 << 20
    #: Records of a batch; a message has at most one payload frame more than twice as many.
    records: int = 65535


class MessageCodec:
    """Writes and reads the messages of one job; only messages with the job's name are read.

    `marks`: a record that is not in the protocol is read as a record of kind BAD, so that its sender can be
    informed; otherwise the whole message is refused.
    """

    def __init__(self, job: str, limits: MessageLimits | None = None, marks: bool = False) -> None:
        self.limits = limits or MessageLimits()
        self._marks = marks
        #: Hash of the job's name, which is in the head of each message.
        self.job = int.from_bytes(hashlib.blake2b(job.encode(), digest_size=8).digest(), "little")
        self._fan_out = FanOut()
        self._decoder = msgspec.msgpack.Decoder(Control)

    def encode(self, message: Control | Batch) -> list[Buffer]:
        """Write a message as frames. Payloads are not copied: they are the buffers of `message.frames`.

        Raises ProtocolError for a message that exceeds the limits, or has numbers that do not fit: the peer
        would refuse it.
        """
        if isinstance(message, Batch):
            return self._encode_batch(message)
        head = _HEAD.pack(_MAGIC, PROTOCOL, _CONTROL, 0, self.job, 0, 0, 0, 0, 0, 0)
        body, is_new = self._fan_out.encode(message)
        if len(body) > self.limits.control:
            raise ProtocolError(
                f"{type(message).__name__} of {len(body)} bytes: a control message has at most "
                f"{self.limits.control}; give fewer keys at once"
            )
        if is_new:
            self._read_back(body)
            self._fan_out.remember_body(message)
        return [head + body]

    def decode(self, frames: Sequence[zmq.Frame | bytes | memoryview]) -> Control | Batch:
        """Read the frames of one message, without the identity of its sender.

        The payloads of a batch are memoryviews of the frames, and hold references to them. They need not be
        aligned: a caller that needs typed elements has to check. Raises ProtocolError, and nothing else, for
        frames that are no message of this job and this version.
        """
        if not frames or len(frames[0]) < _HEAD.size:
            raise ProtocolError("a message is too short for its head")
        first = _view_frame(frames[0])
        magic, version, kind, flags, job, *numbers, count = _HEAD.unpack_from(first)
        if magic != _MAGIC:
            raise ProtocolError("a message begins with an invalid header")
        if kind == _CONTROL:
            return self._decode_control(first, len(frames), version, job)
        if kind != _DATA:
            raise ProtocolError(f"a message is of kind {kind}, which there is not")
        self._check_origin(version, job)
        end = _HEAD.size + count * _RECORD.size
        inline = flags == _INLINE and end < len(first) <= end + _INLINE_BYTES
        if count > self.limits.records or not (inline or (flags == 0 and len(first) == end)):
            raise ProtocolError(f"a batch of {count} records has a frame of {len(first)} bytes for them")
        if len(frames) - 1 > self._most_frames(count):
            raise ProtocolError(f"a batch of {count} records has {len(frames)} frames")
        payloads = [first[end:]] if inline else []
        payloads += [_view_frame(frame) for frame in frames[1:]]
        return self._decode_batch(first[:end], payloads, numbers)

    # ------------------------------------------------------------------------------------------- inside

    def _check_origin(self, version: int, job: int) -> None:
        if version != PROTOCOL:
            raise ProtocolError(
                f"a message is of version {version} of the protocol, this process has {PROTOCOL}: "
                "install the same release of kvstore for all processes of the job"
            )
        if job != self.job:
            raise ProtocolError("a message belongs to another job")

    def _read_back(self, body: bytes) -> None:
        try:
            self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a message that cannot be sent: {error}") from None

    def _decode_control(self, frame: memoryview, frames: int, version: int, job: int) -> Control:
        size = len(frame) - _HEAD.size
        if frames != 1 or size > self.limits.control:
            raise ProtocolError(f"a control message has {frames} frames and {size} bytes")
        try:
            message: Control = self._decoder.decode(frame[_HEAD.size :])
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            self._check_origin(version, job)
            raise ProtocolError(f"a control message cannot be read: {error}") from None
        if not _is_introduction(message):
            self._check_origin(version, job)
        return message

    def _encode_batch(self, batch: Batch) -> list[Buffer]:
        store, rank, incarnation, epoch, records, frames, received = batch
        if len(records) > self.limits.records or len(frames) > self._most_frames(len(records)):
            raise ProtocolError(f"a batch of {len(records)} records and {len(frames)} frames is too large")
        payloads = [_flat_bytes(frame) for frame in frames]
        for payload in payloads:
            if len(payload) > self.limits.frame:
                raise ProtocolError(
                    f"a payload of {len(payload)} bytes: at most {self.limits.frame} are sent"
                )
        pack = _RECORD.pack
        inline = [payloads.pop(0)] if payloads and 0 < len(payloads[0]) <= _INLINE_BYTES else []
        flags = _INLINE if inline else 0
        numbers = store, rank, incarnation, epoch, received, len(records)
        try:
            head = _HEAD.pack(_MAGIC, PROTOCOL, _DATA, flags, self.job, *numbers)
            return [b"".join([head, *[pack(*record) for record in records], *inline]), *payloads]
        except struct.error as error:
            raise ProtocolError(f"a batch with a number that cannot be sent: {error}") from None

    def _decode_batch(self, first: memoryview, payloads: list[memoryview], numbers: list[int]) -> Batch:
        sizes = [len(payload) for payload in payloads]
        if max(sizes, default=0) > self.limits.frame:
            raise ProtocolError(f"a payload of {max(sizes)} bytes: at most {self.limits.frame} are read")
        store, rank, incarnation, epoch, received = numbers
        records = _read_records(first[_HEAD.size :], sizes, self._marks)
        return Batch(store, rank, incarnation, epoch, records, tuple(payloads), received)

    @staticmethod
    def _most_frames(records: int) -> int:
        return 2 * records + 1


def _read_records(body: memoryview, sizes: list[int], marks: bool) -> list[Record]:
    """Read records; `sizes` are those of the payload frames."""
    kinds, places, new, records = _KINDS, _PLACES, tuple.__new__, []
    for number in _RECORD.iter_unpack(body):
        kind, _, _, _, _, _, _, threshold, rows, place, frame, offset, nbytes, _ = number
        try:
            if place == 1:
                if frame >= len(sizes) or offset + nbytes > sizes[frame]:
                    _check_two_frames(sizes, frame, offset, nbytes)
            elif place > 2:
                raise ProtocolError(f"a record's payload is in place {place}, which there is not")
            if kinds[kind] is None:
                raise ProtocolError(f"a record is of kind {kind}, which there is not")
            if not (rows == -1 or 0 <= 8 * rows <= nbytes) or not -math.inf < threshold < math.inf:
                raise ProtocolError(f"a record has {rows} rows in {nbytes} bytes, and threshold {threshold}")
        except ProtocolError:
            if not marks:
                raise
            records.append(Record(RecordKind.BAD, number[1], number[2], number[3], flags=number[13]))
            continue
        records.append(new(Record, (kinds[kind], *number[1:9], places[place], *number[10:])))
    return records


def _check_two_frames(sizes: list[int], frame: int, offset: int, nbytes: int) -> None:
    """Allow a payload to continue in the frame after its first, as ids and rows do; no further."""
    there = sum(sizes[frame : frame + 2])
    if frame >= len(sizes) or offset > sizes[frame] or offset + nbytes > there:
        raise ProtocolError(
            f"a record's payload is {nbytes} bytes from {offset} of frame {frame}, and {len(sizes)} frames "
            f"have {there} there"
        )


def _is_introduction(message: Control) -> bool:
    body = message.body if isinstance(message, m.ReliableMessage) else message
    return isinstance(body, m.HelloRequest | m.RefusalNotice)


def _view_frame(frame: zmq.Frame | bytes | memoryview) -> memoryview:
    return frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)


def _flat_bytes(buffer: Buffer) -> memoryview | GatheredRows:
    """View a buffer's bytes. NumPy has dtypes that the buffer protocol does not know."""
    if isinstance(buffer, GatheredRows):
        return buffer
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise ProtocolError("a payload must be contiguous")
        return buffer.reshape(-1).view(np.uint8).data
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def pack_payloads(
    payloads: Sequence[Buffer | tuple[Buffer, ...]], small: int = SMALL
) -> tuple[list[Buffer], list[tuple[int, int, int]]]:
    """Join payloads of at most `small` bytes in one frame, each at a multiple of 64 bytes.

    A payload is a buffer, or a tuple of buffers that follow each other (ids and rows). Returns the frames for
    `Batch.frames`, where a large tuple has one frame for each of its buffers, and the location of each
    payload: (frame, offset, nbytes).
    """
    frames: list[Buffer] = [b""]
    places = []
    pieces: list[Buffer] = []
    end = 0
    for payload in payloads:
        parts = payload if isinstance(payload, tuple) else (payload,)
        size = sum([_byte_size(part) for part in parts])
        if size > small:
            places.append((len(frames), 0, size))
            frames += parts
        else:
            places.append((0, end, size))
            pieces += parts
            if size % _ALIGNED:
                pieces.append(_PADDING[size % _ALIGNED :])
            end += size + -size % _ALIGNED
    if len(places) > sum([frame > 0 for frame, _, _ in places]):
        frames[0] = _join_buffers(pieces)
        return frames, places
    return frames[1:], [(frame - 1, offset, size) for frame, offset, size in places]


def _byte_size(buffer: Buffer) -> int:
    known = isinstance(buffer, np.ndarray | memoryview | GatheredRows)
    return buffer.nbytes if known else memoryview(buffer).nbytes


def _join_buffers(pieces: list[Buffer]) -> bytes:
    try:
        return b"".join(pieces)
    except (BufferError, TypeError, ValueError):  # not contiguous, or of a dtype that only NumPy knows
        return b"".join([_flat_bytes(piece) for piece in pieces])
