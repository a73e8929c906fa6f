"""Sums of k arrays, from left to right, into a dst and any number of outs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..spec import Spec
from ..table import SOURCES
from .chunks import Body, counter, emitter, framed, listed, listed_now
from .intrinsics import dual
from .lanes import LANES, Lanes

Group = Any

_MOST_PAIRED = 4


@cache
def summer(lanes: Lanes, k: int, grouped: bool) -> Callable[[int, int], Group]:
    """Make the function that sums the sources of a row: of a group of elements, or of one."""
    load, add = (lanes.load, lanes.add) if grouped else (lanes.load_one, lanes.add_one)
    count, size, source = counter(k), lanes.size, listed if k else listed_now

    @dual
    def total(row: int, e: int) -> Group:
        acc = load(source(row, SOURCES, 0) + e * size)
        for j in range(1, count(row)):
            acc = add(acc, load(source(row, SOURCES, j) + e * size))
        return acc

    return total


@cache
def pair_summer(lanes: Lanes, k: int) -> Callable[[int, int, int], tuple[Group, Group]]:
    """Make the function that sums two groups: the two loads of each source overlap."""
    load, add, count, size = lanes.load, lanes.add, counter(k), lanes.size

    @dual
    def total(row: int, e: int, f: int) -> tuple[Group, Group]:
        source = listed(row, SOURCES, 0)
        a = load(source + e * size)
        b = load(source + f * size)
        for j in range(1, count(row)):
            source = listed(row, SOURCES, j)
            next_a = load(source + e * size)
            next_b = load(source + f * size)
            a = add(a, next_a)
            b = add(b, next_b)
        return a, b

    return total


def body(spec: Spec) -> Body:
    """Make the body of a sum."""
    lanes = LANES[spec.dtype]
    total, total_one = summer(lanes, spec.k, grouped=True), summer(lanes, spec.k, grouped=False)
    total_pair = pair_summer(lanes, spec.k)
    emit, emit_one = emitter(lanes.size, lanes.store), emitter(lanes.size, lanes.store_one)

    @dual
    def group(row: int, e: int, end: int, scalar: Any) -> None:
        emit(row, e, total(row, e))

    @dual
    def pair(row: int, e: int, f: int, scalar: Any) -> None:
        a, b = total_pair(row, e, f)
        emit(row, e, a)
        emit(row, f, b)

    @dual
    def rest(row: int, e: int, end: int, scalar: Any) -> None:
        emit_one(row, e, total_one(row, e))

    # With many sources the loads of one group are enough, and save registers.
    return framed(spec.chunk, lanes.width, group, rest, pair if 1 <= spec.k <= _MOST_PAIRED else None)
