"""Sum of k gradients and one step of an optimizer, in one pass over memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..spec import KernelSpec
from ..table import DST, MASTER, PARAMS, STATES
from .chunks import Body, header_word_now, make_body, make_spreader
from .intrinsics import bf16_pack, dual, f16_pack, forget_reads
from .lanes import LANES, ElementLanes, matching_lanes, store_words
from .rules import RULES, Rule
from .sums import make_summer

Group = Any
Number = Any


@cache
def constant_reader(real: str) -> Callable[[int], tuple[Number, ...]]:
    """Make the function that reads a row's constants; those that a rule does not use cost nothing."""
    read, size = LANES[real].load_one, LANES[real].size

    @dual
    def row_constants(row: int) -> tuple[Number, ...]:
        at = header_word_now(row, PARAMS)
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

    return row_constants


# A group's elements are updated one after the other, and the constants read again for each: all at once would
# need more registers than there are.
Stepper = Callable[[int, Group, Group, Group, Group, Group], tuple[Group, Group, Group, Group]]


@cache
def _step_one(rule: Rule, real: str) -> Stepper:
    row_constants = constant_reader(real)

    @dual
    def step(row: int, w: Number, g: Number, a: Number, b: Number, c: Number) -> tuple[Number, ...]:
        forget_reads()
        return rule(w, g, a, b, c, row_constants(row))

    return step


@cache
def _step_two(rule: Rule, real: str) -> Stepper:
    one = _step_one(rule, real)

    @dual
    def step(row: int, w: Group, g: Group, a: Group, b: Group, c: Group) -> tuple[Group, ...]:
        w0, a0, b0, c0 = one(row, w[0], g[0], a[0], b[0], c[0])
        w1, a1, b1, c1 = one(row, w[1], g[1], a[1], b[1], c[1])
        return (w0, w1), (a0, a1), (b0, b1), (c0, c1)

    return step


@cache
def _step_four(rule: Rule, real: str) -> Stepper:
    one = _step_one(rule, real)

    @dual
    def step(row: int, w: Group, g: Group, a: Group, b: Group, c: Group) -> tuple[Group, ...]:
        w0, a0, b0, c0 = one(row, w[0], g[0], a[0], b[0], c[0])
        w1, a1, b1, c1 = one(row, w[1], g[1], a[1], b[1], c[1])
        w2, a2, b2, c2 = one(row, w[2], g[2], a[2], b[2], c[2])
        w3, a3, b3, c3 = one(row, w[3], g[3], a[3], b[3], c[3])
        return (w0, w1, w2, w3), (a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3)

    return step


@dual
def _low_half(g: Group) -> Group:
    return g[0], g[1], g[2], g[3]


@dual
def _high_half(g: Group) -> Group:
    return g[4], g[5], g[6], g[7]


@dual
def _join_halves(a: Group, b: Group) -> Group:
    return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]


@cache
def _step_eight(rule: Rule, real: str) -> Stepper:
    four = _step_four(rule, real)

    @dual
    def step(row: int, w: Group, g: Group, a: Group, b: Group, c: Group) -> tuple[Group, ...]:
        w0, a0, b0, c0 = four(row, _low_half(w), _low_half(g), _low_half(a), _low_half(b), _low_half(c))
        w1, a1, b1, c1 = four(row, _high_half(w), _high_half(g), _high_half(a), _high_half(b), _high_half(c))
        return _join_halves(w0, w1), _join_halves(a0, a1), _join_halves(b0, b1), _join_halves(c0, c1)

    return step


_STEPPERS = {1: _step_one, 2: _step_two, 4: _step_four, 8: _step_eight}


@cache
def _state_access(states: int, size: int, load: Any, store: Any) -> tuple[Any, Any]:
    """Make the functions that load and store a row's states, up to three."""

    @dual
    def state_address(row: int, place: int, e: int) -> int:
        return header_word_now(row, STATES + place) + e * size

    @dual
    def read(row: int, e: int, like: Group) -> tuple[Group, ...]:
        a, b, c = like, like, like
        if states > 0:
            a = load(state_address(row, 0, e))
        if states > 1:
            b = load(state_address(row, 1, e))
        if states > 2:
            c = load(state_address(row, 2, e))
        return a, b, c

    @dual
    def write(row: int, e: int, a: Group, b: Group, c: Group) -> None:
        if states > 0:
            store(state_address(row, 0, e), a)
        if states > 1:
            store(state_address(row, 1, e), b)
        if states > 2:
            store(state_address(row, 2, e), c)

    return read, write


@cache
def _make_rounding(lanes: ElementLanes) -> Callable[[Group], Group]:
    """Make the function that rounds a group as a store and a load would."""
    pack, unpack = lanes.pack, lanes.unpack

    @dual
    def round_group(g: Group) -> Group:
        return unpack(pack(g))

    return round_group


def _halves_updater(spec: KernelSpec) -> Callable[[int, int, int, Any], None]:
    """Make the function that updates eight 16-bit weights with a master, four at a time for few registers."""
    grad, wide = LANES[spec.dtype], LANES["float32"]
    total, load, store = make_summer(grad, spec.k, True), wide.load, wide.store
    step = _step_four(RULES[str(spec.rule)], "float32")
    pack, unpack, size, wide_size = grad.pack, grad.unpack, grad.size, wide.size
    pack_two = {"float16": f16_pack, "bfloat16": bf16_pack}[spec.dtype]
    read, write = _state_access(spec.states, wide.size, load, store)
    spread = make_spreader(size, store_words)

    @dual
    def update_half(row: int, e: int, g: Group) -> Group:
        forget_reads()
        place = header_word_now(row, MASTER) + e * wide_size
        w = load(place)
        a, b, c = read(row, e, w)
        w, a, b, c = step(row, w, g, a, b, c)
        store(place, w)
        write(row, e, a, b, c)
        return pack_two(w[0], w[1]), pack_two(w[2], w[3])

    @dual
    def update_group(row: int, e: int, end: int, scalar: Any) -> None:
        g = pack(total(row, e))  # a sum of 16-bit floats is one before the rule sees it
        first = update_half(row, e, _low_half(unpack(g)))
        second = update_half(row, e + 4, _high_half(unpack(g)))
        w = first[0], first[1], second[0], second[1]
        store_words(header_word_now(row, DST) + e * size, w)
        spread(row, e, w)

    return update_group


def _group_updater(spec: KernelSpec, grouped: bool) -> Callable[[int, int, int, Any], None]:
    """Make the function that updates a group of elements, or one."""
    rule, k, master = RULES[str(spec.rule)], spec.k, spec.master
    grad = LANES[spec.dtype]
    inner = "float32" if master else spec.dtype
    wide = matching_lanes(inner, spec.dtype)
    total = make_summer(grad, k, grouped)
    load, store = (wide.load, wide.store) if grouped else (wide.load_one, wide.store_one)
    narrow, round_group = (grad.store, _make_rounding(grad)) if grouped else (grad.store_one, grad.round_one)
    step = _STEPPERS[grad.width if grouped else 1](rule, spec.real_type)
    read, write = _state_access(spec.states, wide.size, load, store)
    spread = make_spreader(grad.size, narrow)
    home, grad_size, wide_size = MASTER if master else DST, grad.size, wide.size

    @dual
    def update_group(row: int, e: int, end: int, scalar: Any) -> None:
        place = header_word_now(row, home) + e * wide_size
        w = load(place)
        a, b, c = read(row, e, w)
        g = round_group(total(row, e))  # a sum of 16-bit floats is one before the rule sees it
        w, a, b, c = step(row, w, g, a, b, c)
        store(place, w)
        write(row, e, a, b, c)
        if master:
            narrow(header_word_now(row, DST) + e * grad_size, w)
        spread(row, e, w)

    return update_group


def update_body(spec: KernelSpec) -> Body:
    """Make the body of an update."""
    update_group = _halves_updater(spec) if spec.master else _group_updater(spec, grouped=True)
    return make_body(spec.chunk, LANES[spec.dtype].width, update_group, _group_updater(spec, grouped=False))
