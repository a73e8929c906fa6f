"""The 1-bit codec: +1 or -1 for each element, as MXNet's.

``r = residual + gradient``; ``r > threshold``: code 1, ``r - 1`` is left; else code 0, and ``r + 1`` is left.
Codes mean +1 and -1; the threshold only decides between them.
"""

from __future__ import annotations

from typing import Any

from .codecs import CodecOperations
from .intrinsics import dual, one_like, select
from .lanes import EIGHT_FLOATS

Group = Any
Value = Any


@dual
def round_trip_one(r: Value, t: Value) -> tuple[Value, Value]:
    """Return the decoded value for r, and the residual."""
    sent = select(r > t, one_like(r), -one_like(r))
    return sent, r - sent


@dual
def encode_one(r: Value, t: Value) -> tuple[int, Value]:
    """Return the code for r, and the residual."""
    _, left = round_trip_one(r, t)
    return select(r > t, 1, 0), left


@dual
def decode_one(code: int, t: Value) -> Value:
    """Return the decoded value of a code."""
    return select(code & 1 != 0, one_like(t), -one_like(t))


@dual
def encode(r: Group, t: Value) -> tuple[int, Group]:
    """Return the byte of eight elements, and their residuals."""
    c0, l0 = encode_one(r[0], t)
    c1, l1 = encode_one(r[1], t)
    c2, l2 = encode_one(r[2], t)
    c3, l3 = encode_one(r[3], t)
    c4, l4 = encode_one(r[4], t)
    c5, l5 = encode_one(r[5], t)
    c6, l6 = encode_one(r[6], t)
    c7, l7 = encode_one(r[7], t)
    byte = c0 << 7 | c1 << 6 | c2 << 5 | c3 << 4 | c4 << 3 | c5 << 2 | c6 << 1 | c7
    return byte, (l0, l1, l2, l3, l4, l5, l6, l7)


@dual
def round_trip(r: Group, t: Value) -> tuple[Group, Group]:
    """Return the decoded values for eight elements, and their residuals."""
    s0, l0 = round_trip_one(r[0], t)
    s1, l1 = round_trip_one(r[1], t)
    s2, l2 = round_trip_one(r[2], t)
    s3, l3 = round_trip_one(r[3], t)
    s4, l4 = round_trip_one(r[4], t)
    s5, l5 = round_trip_one(r[5], t)
    s6, l6 = round_trip_one(r[6], t)
    s7, l7 = round_trip_one(r[7], t)
    return (s0, s1, s2, s3, s4, s5, s6, s7), (l0, l1, l2, l3, l4, l5, l6, l7)


@dual
def decode(byte: int, t: Value) -> Group:
    """Return the decoded values of the eight codes of a byte."""
    return (
        decode_one(byte >> 7, t),
        decode_one(byte >> 6, t),
        decode_one(byte >> 5, t),
        decode_one(byte >> 4, t),
        decode_one(byte >> 3, t),
        decode_one(byte >> 2, t),
        decode_one(byte >> 1, t),
        decode_one(byte, t),
    )


CODEC = CodecOperations(
    EIGHT_FLOATS, 1, 8, 32, encode, encode_one, round_trip, round_trip_one, decode, decode_one
)
