"""Sum of k gradients and one step of an optimizer, in one pass over memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..spec import Spec
from ..table import DST, MASTER, PARAMS, STATES
from .chunks import Body, field_now, framed, spreader
from .intrinsics import bf16_pack, dual, f16_pack, forget
from .lanes import LANES, Lanes, matching_lanes, store_words
from .rules import RULES, Rule
from .sums import summer

Group = Any
Number = Any


@cache
def constant_reader(real: str) -> Callable[[int], tuple[Number, ...]]:
    """Make the function that reads a row's constants; those that a rule does not use cost nothing."""
    read, size = LANES[real].load_one, LANES[real].size

    @dual
    def constants(row: int) -> tuple[Number, ...]:
        at = field_now(row, PARAMS)
        return (
            read(at),
            read(at + size),
            read(at + 2 * size),
            read(at + 3 * size),
            read(at + 4 * size),
            read(at + 5 * size),
            read(at + 6 * size),
            read(at + 7 * size),
            read(at + 8 * size),
            read(at + 9 * size),
            read(at + 10 * size),
            read(at + 11 * size),
            read(at + 12 * size),
            read(at + 13 * size),
            read(at + 14 * size),
            read(at + 15 * size),
        )

    return constants


# A group's elements are updated one after the other, and the constants read again for each: all at once would
# need more registers than there are.
Stepper = Callable[[int, Group, Group, Group, Group, Group], tuple[Group, Group, Group, Group]]


@cache
def _one(rule: Rule, real: str) -> Stepper:
    constants = constant_reader(real)

    @dual
    def step(row: int, w: Number, g: Number, a: Number, b: Number, c: Number) -> tuple[Number, ...]:
        forget()
        return rule(w, g, a, b, c, constants(row))

    return step


@cache
def _two(rule: Rule, real: str) -> Stepper:
    one = _one(rule, real)

    @dual
    def step(row: int, w: Group, g: Group, a: Group, b: Group, c: Group) -> tuple[Group, ...]:
        w0, a0, b0, c0 = one(row, w[0], g[0], a[0], b[0], c[0])
        w1, a1, b1, c1 = one(row, w[1], g[1], a[1], b[1], c[1])
        return (w0, w1), (a0, a1), (b0, b1), (c0, c1)

    return step


@cache
def _four(rule: Rule, real: str) -> Stepper:
    one = _one(rule, real)

    @dual
    def step(row: int, w: Group, g: Group, a: Group, b: Group, c: Group) -> tuple[Group, ...]:
        w0, a0, b0, c0 = one(row, w[0], g[0], a[0], b[0], c[0])
        w1, a1, b1, c1 = one(row, w[1], g[1], a[1], b[1], c[1])
        w2, a2, b2, c2 = one(row, w[2], g[2], a[2], b[2], c[2])
        w3, a3, b3, c3 = one(row, w[3], g[3], a[3], b[3], c[3])
        return (w0, w1, w2, w3), (a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3)

    return step


@dual
def _low(g: Group) -> Group:
    return g[0], g[1], g[2], g[3]


@dual
def _high(g: Group) -> Group:
    return g[4], g[5], g[6], g[7]


@dual
def _joined(a: Group, b: Group) -> Group:
    return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]


@cache
def _eight(rule: Rule, real: str) -> Stepper:
    four = _four(rule, real)

    @dual
    def step(row: int, w: Group, g: Group, a: Group, b: Group, c: Group) -> tuple[Group, ...]:
        w0, a0, b0, c0 = four(row, _low(w), _low(g), _low(a), _low(b), _low(c))
        w1, a1, b1, c1 = four(row, _high(w), _high(g), _high(a), _high(b), _high(c))
        return _joined(w0, w1), _joined(a0, a1), _joined(b0, b1), _joined(c0, c1)

    return step


_STEPPERS = {1: _one, 2: _two, 4: _four, 8: _eight}


@cache
def _states(states: int, size: int, load: Any, store: Any) -> tuple[Any, Any]:
    """Make the functions that load and store a row's states, up to three."""

    @dual
    def address(row: int, place: int, e: int) -> int:
        return field_now(row, STATES + place) + e * size

    @dual
    def read(row: int, e: int, like: Group) -> tuple[Group, ...]:
        a, b, c = like, like, like
        if states > 0:
            a = load(address(row, 0, e))
        if states > 1:
            b = load(address(row, 1, e))
        if states > 2:
            c = load(address(row, 2, e))
        return a, b, c

    @dual
    def write(row: int, e: int, a: Group, b: Group, c: Group) -> None:
        if states > 0:
            store(address(row, 0, e), a)
        if states > 1:
            store(address(row, 1, e), b)
        if states > 2:
            store(address(row, 2, e), c)

    return read, write


@cache
def _settled(lanes: Lanes) -> Callable[[Group], Group]:
    """Make the function that rounds a group as a store and a load would."""
    pack, unpack = lanes.pack, lanes.unpack

    @dual
    def settle(g: Group) -> Group:
        return unpack(pack(g))

    return settle


def _halves_updater(spec: Spec) -> Callable[[int, int, int, Any], None]:
    """Make the function that updates eight 16-bit weights with a master, four at a time for few registers."""
    grad, wide = LANES[spec.dtype], LANES["float32"]
    total, load, store = summer(grad, spec.k, True), wide.load, wide.store
    step = _four(RULES[str(spec.rule)], "float32")
    pack, unpack, size, wide_size = grad.pack, grad.unpack, grad.size, wide.size
    pack_two = {"float16": f16_pack, "bfloat16": bf16_pack}[spec.dtype]
    read, write = _states(spec.states, wide.size, load, store)
    spread = spreader(size, store_words)

    @dual
    def half(row: int, e: int, g: Group) -> Group:
        forget()
        place = field_now(row, MASTER) + e * wide_size
        w = load(place)
        a, b, c = read(row, e, w)
        w, a, b, c = step(row, w, g, a, b, c)
        store(place, w)
        write(row, e, a, b, c)
        return pack_two(w[0], w[1]), pack_two(w[2], w[3])

    @dual
    def update(row: int, e: int, end: int, scalar: Any) -> None:
        g = pack(total(row, e))  # a sum of 16-bit floats is one before the rule sees it
        first = half(row, e, _low(unpack(g)))
        second = half(row, e + 4, _high(unpack(g)))
        w = first[0], first[1], second[0], second[1]
        store_words(field_now(row, DST) + e * size, w)
        spread(row, e, w)

    return update


def _updater(spec: Spec, grouped: bool) -> Callable[[int, int, int, Any], None]:
    """Make the function that updates a group of elements, or one."""
    rule, k, master = RULES[str(spec.rule)], spec.k, spec.master
    grad = LANES[spec.dtype]
    inner = "float32" if master else spec.dtype
    wide = matching_lanes(inner, spec.dtype)
    total = summer(grad, k, grouped)
    load, store = (wide.load, wide.store) if grouped else (wide.load_one, wide.store_one)
    narrow, settle = (grad.store, _settled(grad)) if grouped else (grad.store_one, grad.settle_one)
    step = _STEPPERS[grad.width if grouped else 1](rule, spec.real)
    read, write = _states(spec.states, wide.size, load, store)
    spread = spreader(grad.size, narrow)
    home, grad_size, wide_size = MASTER if master else DST, grad.size, wide.size

    @dual
    def update(row: int, e: int, end: int, scalar: Any) -> None:
        place = field_now(row, home) + e * wide_size
        w = load(place)
        a, b, c = read(row, e, w)
        g = settle(total(row, e))  # a sum of 16-bit floats is one before the rule sees it
        w, a, b, c = step(row, w, g, a, b, c)
        store(place, w)
        write(row, e, a, b, c)
        if master:
            narrow(field_now(row, DST) + e * grad_size, w)
        spread(row, e, w)

    return update


def body(spec: Spec) -> Body:
    """Make the body of an update."""
    update = _halves_updater(spec) if spec.master else _updater(spec, grouped=True)
    return framed(spec.chunk, LANES[spec.dtype].width, update, _updater(spec, grouped=False))
