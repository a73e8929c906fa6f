"""Faults for bytes that are read: bits, numbers, lengths, pieces that are missing or too many."""

from __future__ import annotations

import random
import struct

_NUMBERS = [
    0,
    1,
    2,
    127,
    128,
    255,
    256,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
]


def changed(frames: list[bytes], chance: random.Random) -> list[bytes]:
    """Put one to four faults into a message."""
    found = [bytearray(frame) for frame in frames]
    for _ in range(chance.randint(1, 4)):
        chance.choice(FAULTS)(found, chance)
    return [bytes(frame) for frame in found]


def _some(frames: list[bytearray], chance: random.Random) -> bytearray:
    """Most often the first frame: the other frames are payloads, whose bytes are not read."""
    return (frames[0] if chance.random() < 0.8 else chance.choice(frames)) if frames else bytearray()


def flip(frames: list[bytearray], chance: random.Random) -> None:
    frame = _some(frames, chance)
    if frame:
        frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)


def overwrite(frames: list[bytearray], chance: random.Random) -> None:
    frame = _some(frames, chance)
    at = chance.randrange(len(frame) + 1)
    frame[at : at + chance.randint(1, 8)] = chance.randbytes(chance.randint(1, 8))


def number(frames: list[bytearray], chance: random.Random) -> None:
    frame = _some(frames, chance)
    form = chance.choice(["<H", "<I", "<Q", ">H", ">I", ">Q"])
    value = chance.choice(_NUMBERS) % (1 << 8 * struct.calcsize(form))
    at = chance.randrange(max(1, len(frame) - struct.calcsize(form)))
    frame[at : at + struct.calcsize(form)] = struct.pack(form, value)


def cut(frames: list[bytearray], chance: random.Random) -> None:
    frame = _some(frames, chance)
    del frame[chance.randrange(len(frame) + 1) :]


def double(frames: list[bytearray], chance: random.Random) -> None:
    frame = _some(frames, chance)
    at = chance.randrange(len(frame) + 1)
    piece = frame[at : at + chance.randint(1, 100)]
    frame[at:at] = piece * chance.choice([1, 2, 100])


def drop_frame(frames: list[bytearray], chance: random.Random) -> None:
    if frames:
        del frames[chance.randrange(len(frames))]


def more_frames(frames: list[bytearray], chance: random.Random) -> None:
    extra = bytearray(chance.randbytes(chance.choice([0, 1, 60, 1000])))
    frames[chance.randrange(len(frames) + 1) :] = [extra] * chance.choice([1, 2, 1000])


def nested(frames: list[bytearray], chance: random.Random) -> None:
    """MessagePack in MessagePack, and lengths of absent data."""
    frame = _some(frames, chance)
    at = chance.randrange(len(frame) + 1)
    piece = chance.choice(
        [b"\x91", b"\x81\xa1a", b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
    )
    frame[at:at] = piece * chance.choice([1, 10, 1000])


FAULTS = [flip, flip, flip, overwrite, number, number, cut, double, drop_frame, more_frames, nested]
