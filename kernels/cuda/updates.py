"""Sum of k gradients and one step of an optimizer, in one pass over memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .chunks import Body, field, framed, spreader
from .intrinsics import dual, table_d, table_f
from .lanes import LANES, beside
from .rules import RULES, Rule
from .spec import Spec
from .sums import summer
from .table import DST, MASTER, PARAMS, STATES

Group = Any
Number = Any


def constant_reader(real: str) -> Callable[[int], tuple[Number, ...]]:
    """Make the function that reads a row's constants; those that a rule does not look at cost nothing."""
    read, size = (table_d, 8) if real == "float64" else (table_f, 4)

    @dual
    def at(row: int, place: int) -> Number:
        return read(field(row, PARAMS) + place * size)

    @dual
    def constants(row: int) -> tuple[Number, ...]:
        return (
            at(row, 0),
            at(row, 1),
            at(row, 2),
            at(row, 3),
            at(row, 4),
            at(row, 5),
            at(row, 6),
            at(row, 7),
            at(row, 8),
            at(row, 9),
            at(row, 10),
            at(row, 11),
            at(row, 12),
            at(row, 13),
            at(row, 14),
            at(row, 15),
        )

    return constants


Stepper = Callable[[Group, Group, Group, Group, Group, Any], tuple[Group, Group, Group, Group]]


def _two(rule: Rule) -> Stepper:
    @dual
    def step(w: Group, g: Group, a: Group, b: Group, c: Group, p: Any) -> tuple[Group, ...]:
        w0, a0, b0, c0 = rule(w[0], g[0], a[0], b[0], c[0], p)
        w1, a1, b1, c1 = rule(w[1], g[1], a[1], b[1], c[1], p)
        return (w0, w1), (a0, a1), (b0, b1), (c0, c1)

    return step  # type: ignore[return-value]


def _four(rule: Rule) -> Stepper:
    @dual
    def step(w: Group, g: Group, a: Group, b: Group, c: Group, p: Any) -> tuple[Group, ...]:
        w0, a0, b0, c0 = rule(w[0], g[0], a[0], b[0], c[0], p)
        w1, a1, b1, c1 = rule(w[1], g[1], a[1], b[1], c[1], p)
        w2, a2, b2, c2 = rule(w[2], g[2], a[2], b[2], c[2], p)
        w3, a3, b3, c3 = rule(w[3], g[3], a[3], b[3], c[3], p)
        return (w0, w1, w2, w3), (a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3)

    return step  # type: ignore[return-value]


@dual
def _low(g: Group) -> Group:
    return g[0], g[1], g[2], g[3]


@dual
def _high(g: Group) -> Group:
    return g[4], g[5], g[6], g[7]


@dual
def _joined(a: Group, b: Group) -> Group:
    return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]


def _eight(rule: Rule) -> Stepper:
    four = _four(rule)

    @dual
    def step(w: Group, g: Group, a: Group, b: Group, c: Group, p: Any) -> tuple[Group, ...]:
        w0, a0, b0, c0 = four(_low(w), _low(g), _low(a), _low(b), _low(c), p)
        w1, a1, b1, c1 = four(_high(w), _high(g), _high(a), _high(b), _high(c), p)
        return _joined(w0, w1), _joined(a0, a1), _joined(b0, b1), _joined(c0, c1)

    return step  # type: ignore[return-value]


_STEPPERS = {2: _two, 4: _four, 8: _eight}


def _states(states: int, size: int, load: Any, store: Any) -> tuple[Any, Any]:
    """Make what loads a row's three states, as far as there are so many, and what stores them."""

    @dual
    def address(row: int, place: int, e: int) -> int:
        return field(row, STATES + place) + e * size

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


def _updater(spec: Spec, grouped: bool) -> Callable[[int, int, int], None]:
    """Make the function that updates a group of elements, or one."""
    rule, k, master = RULES[str(spec.rule)], spec.k, spec.master
    grad = LANES[spec.dtype]
    inner = "float32" if master else spec.dtype
    wide = beside(inner, spec.dtype)
    total = summer(grad, k, grouped)
    load, store = (wide.load, wide.store) if grouped else (wide.load_one, wide.store_one)
    narrow, settle = (grad.store, grad.settle) if grouped else (grad.store_one, grad.settle_one)
    step = _STEPPERS[grad.count](rule) if grouped else rule
    read, write = _states(spec.states, wide.size, load, store)
    constants, spread = constant_reader(spec.real), spreader(grad.size, narrow)
    home, grad_size, wide_size = MASTER if master else DST, grad.size, wide.size

    @dual
    def update(image: int, row: int, e: int) -> None:
        place = field(row, home) + e * wide_size
        w = load(place)
        a, b, c = read(row, e, w)
        g = settle(total(image, row, e))  # a sum of 16-bit floats is one before the rule sees it
        w, a, b, c = step(w, g, a, b, c, constants(row))
        store(place, w)
        write(row, e, a, b, c)
        if master:
            narrow(field(row, DST) + e * grad_size, w)
        spread(image, row, e, w)

    return update


def body(spec: Spec) -> Body:
    """Make the body of an update."""
    update, update_one = _updater(spec, grouped=True), _updater(spec, grouped=False)

    @dual
    def group(image: int, row: int, e: int, scalar: Any) -> None:
        update(image, row, e)

    @dual
    def rest(image: int, row: int, e: int, end: int, scalar: Any) -> None:
        update_one(image, row, e)

    return framed(spec.chunk, LANES[spec.dtype].count, group, rest)
