"""The 2-bit codec: +threshold, -threshold or nothing for each element, as MXNet's, bit for bit.

``r = residual + gradient``; ``r >= t``: code 3, ``r - t`` is left; ``r <= -t``: code 2, ``r + t`` is left;
else code 0, and r is left. Code 1 is not used, and stands for 0. However large r is, no more than one
threshold is sent.
"""

from __future__ import annotations

from typing import Any

from .codecs import CodecOperations
from .intrinsics import dual, real_of, select, zero
from .lanes import LANES

Group = Any
Value = Any


@dual
def settle_one(r: Value, t: Value) -> tuple[Value, Value]:
    """Return what is sent for r, and what is left."""
    sent = select(r >= t, t, select(r <= -t, -t, zero(r)))
    return sent, r - sent


@dual
def encode_one(r: Value, t: Value) -> tuple[int, Value]:
    """Code for r, and what is left."""
    _, left = settle_one(r, t)
    return select(r >= t, 3, select(r <= -t, 2, 0)), left


@dual
def decode_one(code: int, t: Value) -> Value:
    """Return what a code stands for."""
    return select(code & 2 != 0, select(code & 1 != 0, t, -t), zero(t))


@dual
def encode(r: Group, t: Value) -> tuple[int, Group]:
    """Byte of four elements, and what is left of them."""
    c0, l0 = encode_one(r[0], t)
    c1, l1 = encode_one(r[1], t)
    c2, l2 = encode_one(r[2], t)
    c3, l3 = encode_one(r[3], t)
    return c0 << 6 | c1 << 4 | c2 << 2 | c3, (l0, l1, l2, l3)


@dual
def settle(r: Group, t: Value) -> tuple[Group, Group]:
    """Return what is sent for four elements, and what is left of them."""
    s0, l0 = settle_one(r[0], t)
    s1, l1 = settle_one(r[1], t)
    s2, l2 = settle_one(r[2], t)
    s3, l3 = settle_one(r[3], t)
    return (s0, s1, s2, s3), (l0, l1, l2, l3)


@dual
def digits(byte: int) -> int:
    """Return 0 for -threshold, 1 for nothing and 2 for +threshold, in the place of each code."""
    high = byte >> 1
    return (byte & high & 0x55) << 1 | ~high & 0x55


@dual
def worth(digits: int, shift: int, t: Value) -> Value:
    """Return what the digit that stands `shift` bits up counts for.

    The digit becomes the last bits of 2 ** (23 - shift), a float32 whose ulp they are. Both operations are
    exact, and the units for them have time; comparisons and selections would take those that have not.
    """
    base = (150 - shift) << 23  # exponent of 2 ** (23 - shift)
    return (real_of(digits & 3 << shift | base) - real_of(base | 1 << shift)) * t


@dual
def decode(byte: int, t: Value) -> Group:
    """Return what the four codes of a byte stand for."""
    places = digits(byte)
    return worth(places, 6, t), worth(places, 4, t), worth(places, 2, t), worth(places, 0, t)


CODEC = CodecOperations(
    LANES["float32"], 2, 4, 16, encode, encode_one, settle, settle_one, decode, decode_one
)
