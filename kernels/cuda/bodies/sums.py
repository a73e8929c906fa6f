"""Sums of k arrays, from left to right, into a dst and any number of outs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..spec import KernelSpec
from ..table import SOURCES
from .chunks import Body, listed, listed_now, make_body, make_counter, make_emitter
from .intrinsics import dual
from .lanes import LANES, ElementLanes

Group = Any

_MOST_PAIRED = 4


@cache
def make_summer(lanes: ElementLanes, k: int, grouped: bool) -> Callable[[int, int], Group]:
    """Make the function that sums the sources of a row: of a group of elements, or of one."""
    load, add = (lanes.load, lanes.add) if grouped else (lanes.load_one, lanes.add_one)
    count, size, source = make_counter(k), lanes.size, listed if k else listed_now

    @dual
    def sum_sources(row: int, e: int) -> Group:
        acc = load(source(row, SOURCES, 0) + e * size)
        for j in range(1, count(row)):
            acc = add(acc, load(source(row, SOURCES, j) + e * size))
        return acc

    return sum_sources


@cache
def make_pair_summer(lanes: ElementLanes, k: int) -> Callable[[int, int, int], tuple[Group, Group]]:
    """Make the function that sums two groups: the two loads of each source overlap."""
    load, add, count, size = lanes.load, lanes.add, make_counter(k), lanes.size

    @dual
    def sum_sources(row: int, e: int, f: int) -> tuple[Group, Group]:
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

    return sum_sources


def sum_body(spec: KernelSpec) -> Body:
    """Make the body of a sum."""
    lanes = LANES[spec.dtype]
    sum_sources, sum_one = make_summer(lanes, spec.k, grouped=True), make_summer(lanes, spec.k, grouped=False)
    sum_pair = make_pair_summer(lanes, spec.k)
    emit, emit_one = make_emitter(lanes.size, lanes.store), make_emitter(lanes.size, lanes.store_one)

    @dual
    def sum_group(row: int, e: int, end: int, scalar: Any) -> None:
        emit(row, e, sum_sources(row, e))

    @dual
    def process_pair(row: int, e: int, f: int, scalar: Any) -> None:
        a, b = sum_pair(row, e, f)
        emit(row, e, a)
        emit(row, f, b)

    @dual
    def sum_remaining(row: int, e: int, end: int, scalar: Any) -> None:
        emit_one(row, e, sum_one(row, e))

    # With many sources the loads of one group are enough, and save registers.
    return make_body(
        spec.chunk,
        lanes.width,
        sum_group,
        sum_remaining,
        process_pair if 1 <= spec.k <= _MOST_PAIRED else None,
    )
