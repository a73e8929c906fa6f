"""Sixteen bytes of an element type in registers: how they are loaded, added and stored.

16-bit floats are float32 in registers. Integers are unsigned: sums wrap, and then a sign makes no difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..spec import HALVES
from . import intrinsics as i
from .intrinsics import dual

Group = Any  # a tuple of as many numbers as there are lanes
Value = Any


class ElementLanes(NamedTuple):
    """One element type.

    Attributes
    ----------
    size : int
        Bytes of an element.
    width : int
        Elements that a thread handles together.
    load, store : callable
        `width` elements, at an address that is a multiple of 16.
    load_one, store_one : callable
        One element, at an address that is a multiple of its size.
    add, add_one : callable
        Sums of two groups, and of two elements.
    round_one : callable
        Rounds an element as a store and a load would.
    pack, unpack : callable
        Between a group and the words that are stored: for 16-bit floats, where these take half the registers.
    """

    size: int
    width: int
    load: Callable[[int], Group]
    store: Callable[[int, Group], None]
    load_one: Callable[[int], Value]
    store_one: Callable[[int, Value], None]
    add: Callable[[Group, Group], Group]
    add_one: Callable[[Value, Value], Value]
    round_one: Callable[[Value], Value]
    pack: Callable[[Group], Group]
    unpack: Callable[[Group], Group]


@dual
def _as_is(x: Any) -> Any:
    return x


@dual
def _add_one(a: Value, b: Value) -> Value:
    return a + b


@dual
def _add2(a: Group, b: Group) -> Group:
    return a[0] + b[0], a[1] + b[1]


@dual
def _add4(a: Group, b: Group) -> Group:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


@dual
def _add8(a: Group, b: Group) -> Group:
    return (
        a[0] + b[0],
        a[1] + b[1],
        a[2] + b[2],
        a[3] + b[3],
        a[4] + b[4],
        a[5] + b[5],
        a[6] + b[6],
        a[7] + b[7],
    )


@dual
def _wrap2(a: Group, b: Group) -> Group:
    return i.wrap_add(a[0], b[0]), i.wrap_add(a[1], b[1])


@dual
def _wrap4(a: Group, b: Group) -> Group:
    return i.wrap_add(a[0], b[0]), i.wrap_add(a[1], b[1]), i.wrap_add(a[2], b[2]), i.wrap_add(a[3], b[3])


@dual
def _wrap16(a: Group, b: Group) -> Group:
    return (
        i.wrap_add_bytes(a[0], b[0]),
        i.wrap_add_bytes(a[1], b[1]),
        i.wrap_add_bytes(a[2], b[2]),
        i.wrap_add_bytes(a[3], b[3]),
    )


@dual
def _store_4f(address: int, g: Group) -> None:
    i.store_4f(address, g[0], g[1], g[2], g[3])


@dual
def _store_2d(address: int, g: Group) -> None:
    i.store_2d(address, g[0], g[1])


@dual
def store_words(address: int, g: Group) -> None:
    """Store four uint32 in one access."""
    i.store_4u(address, g[0], g[1], g[2], g[3])


@dual
def _store_2q(address: int, g: Group) -> None:
    i.store_2q(address, g[0], g[1])


@dual
def _load_8f(address: int) -> Group:
    """Load eight float32, to be used with eight halves."""
    a = i.load_4f(address)
    b = i.load_4f(address + 16)
    return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]


@dual
def _store_8f(address: int, g: Group) -> None:
    i.store_4f(address, g[0], g[1], g[2], g[3])
    i.store_4f(address + 16, g[4], g[5], g[6], g[7])


def _half_lanes(low: Any, high: Any, pack: Any) -> ElementLanes:
    """Lanes of a 16-bit float, given its conversions."""

    @dual
    def wide(w: Group) -> Group:
        return low(w[0]), high(w[0]), low(w[1]), high(w[1]), low(w[2]), high(w[2]), low(w[3]), high(w[3])

    @dual
    def narrow(g: Group) -> Group:
        return pack(g[0], g[1]), pack(g[2], g[3]), pack(g[4], g[5]), pack(g[6], g[7])

    @dual
    def load(address: int) -> Group:
        return wide(i.load_4u(address))

    @dual
    def store(address: int, g: Group) -> None:
        store_words(address, narrow(g))

    @dual
    def load_one(address: int) -> Value:
        return low(i.load_u16(address))

    @dual
    def store_one(address: int, x: Value) -> None:
        i.store_u16(address, pack(x, i.zero_like(x)))

    @dual
    def round_one(x: Value) -> Value:
        return low(pack(x, i.zero_like(x)))

    return ElementLanes(2, 8, load, store, load_one, store_one, _add8, _add_one, round_one, narrow, wide)


_SAME = (_as_is, _as_is, _as_is)

LANES = {
    "float32": ElementLanes(4, 4, i.load_4f, _store_4f, i.load_f, i.store_f, _add4, _add_one, *_SAME),
    "float64": ElementLanes(8, 2, i.load_2d, _store_2d, i.load_d, i.store_d, _add2, _add_one, *_SAME),
    "float16": _half_lanes(i.f16_low, i.f16_high, i.f16_pack),
    "bfloat16": _half_lanes(i.bf16_low, i.bf16_high, i.bf16_pack),
    "int8": ElementLanes(1, 16, i.load_4u, store_words, i.load_u8, i.store_u8, _wrap16, i.wrap_add, *_SAME),
    "int32": ElementLanes(4, 4, i.load_4u, store_words, i.load_u32, i.store_u32, _wrap4, i.wrap_add, *_SAME),
    "int64": ElementLanes(8, 2, i.load_2q, _store_2q, i.load_u64, i.store_u64, _wrap2, i.wrap_add, *_SAME),
}
#: Eight float32 at a time, in two accesses.
EIGHT_FLOATS = ElementLanes(4, 8, _load_8f, _store_8f, i.load_f, i.store_f, _add8, _add_one, *_SAME)


def matching_lanes(dtype: str, other: str) -> ElementLanes:
    """Return the lanes of `dtype` for use with one element of `other` each."""
    if dtype == "float32" and other in HALVES:
        return EIGHT_FLOATS
    return LANES[dtype]
