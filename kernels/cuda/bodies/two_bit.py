"""The 2-bit codec: +threshold, -threshold or nothing for each element, as MXNet's, bit for bit.

``r = residual + gradient``; ``r >= t``: code 3, ``r - t`` is left; ``r <= -t``: code 2, ``r + t`` is left;
else code 0, and r is left. Code 1 is not used, and means 0. At most one threshold is sent, for any r.
"""

from __future__ import annotations

from typing import Any

from .codecs import CodecOperations
from .intrinsics import dual, real_of, select, zero_like
from .lanes import LANES

Group = Any
Value = Any


@dual
def round_trip_one(r: Value, t: Value) -> tuple[Value, Value]:
    """Return the decoded value for r, and the residual."""
    sent = select(r >= t, t, select(r <= -t, -t, zero_like(r)))
    return sent, r - sent


@dual
def encode_one(r: Value, t: Value) -> tuple[int, Value]:
    """Return the code for r, and the residual."""
    _, left = round_trip_one(r, t)
    return select(r >= t, 3, select(r <= -t, 2, 0)), left


@dual
def decode_one(code: int, t: Value) -> Value:
    """Return the decoded value of a code."""
    return select(code & 2 != 0, select(code & 1 != 0, t, -t), zero_like(t))


@dual
def encode(r: Group, t: Value) -> tuple[int, Group]:
    """Return the byte of four elements, and their residuals."""
    c0, l0 = encode_one(r[0], t)
    c1, l1 = encode_one(r[1], t)
    c2, l2 = encode_one(r[2], t)
    c3, l3 = encode_one(r[3], t)
    return c0 << 6 | c1 << 4 | c2 << 2 | c3, (l0, l1, l2, l3)


@dual
def round_trip(r: Group, t: Value) -> tuple[Group, Group]:
    """Return the decoded values for four elements, and their residuals."""
    s0, l0 = round_trip_one(r[0], t)
    s1, l1 = round_trip_one(r[1], t)
    s2, l2 = round_trip_one(r[2], t)
    s3, l3 = round_trip_one(r[3], t)
    return (s0, s1, s2, s3), (l0, l1, l2, l3)


@dual
def code_digits(byte: int) -> int:
    """Return 0 for -threshold, 1 for nothing and 2 for +threshold, at the position of each code."""
    high = byte >> 1
    return (byte & high & 0x55) << 1 | ~high & 0x55


@dual
def digit_value(digits: int, shift: int, t: Value) -> Value:
    """Return the value of the digit at bit `shift`.

    The digit becomes the last bits of 2 ** (23 - shift), a float32 with these bits as its ulp. Both
    operations are exact and use units that are idle; comparisons and selections would use busy ones.
    """
    base = (150 - shift) << 23  # exponent of 2 ** (23 - shift)
    return (real_of(digits & 3 << shift | base) - real_of(base | 1 << shift)) * t


@dual
def decode(byte: int, t: Value) -> Group:
    """Return the decoded values of the four codes of a byte."""
    places = code_digits(byte)
    return (
        digit_value(places, 6, t),
        digit_value(places, 4, t),
        digit_value(places, 2, t),
        digit_value(places, 0, t),
    )


CODEC = CodecOperations(
    LANES["float32"], 2, 4, 16, encode, encode_one, round_trip, round_trip_one, decode, decode_one
)
