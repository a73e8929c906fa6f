"""Sums of k arrays, from left to right, into a dst and any number of outs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .chunks import Body, arrays, counter, framed, spreader
from .intrinsics import dual, table
from .lanes import LANES, Lanes
from .spec import Spec
from .table import DST, FIRST_SOURCE

Group = Any


def summer(lanes: Lanes, k: int, grouped: bool) -> Callable[[int, int, int], Group]:
    """Make the function that sums the sources in a row's list: a group of elements, or one."""
    load, add = (lanes.load, lanes.add) if grouped else (lanes.load_one, lanes.add_one)
    count, size = counter(k), lanes.size

    @dual
    def total(row: int, lists: int, e: int) -> Group:
        acc = load(table(lists + 8 * FIRST_SOURCE) + e * size)
        for j in range(1, count(row)):
            acc = add(acc, load(table(lists + 8 * (FIRST_SOURCE + j)) + e * size))
        return acc

    return total


def pair_summer(lanes: Lanes, k: int) -> Callable[[int, int, int, int], tuple[Group, Group]]:
    """Make the function that sums two groups: two loads of each source are under way together."""
    load, add, count, size = lanes.load, lanes.add, counter(k), lanes.size

    @dual
    def total(row: int, lists: int, e: int, f: int) -> tuple[Group, Group]:
        source = table(lists + 8 * FIRST_SOURCE)
        a = load(source + e * size)
        b = load(source + f * size)
        for j in range(1, count(row)):
            source = table(lists + 8 * (FIRST_SOURCE + j))
            more = load(source + e * size)
            other = load(source + f * size)
            a = add(a, more)
            b = add(b, other)
        return a, b

    return total


def body(spec: Spec) -> Body:
    """Make the body of a sum."""
    lanes = LANES[spec.dtype]
    size, count = lanes.size, counter(spec.k)
    total, total_pair, total_one = (
        summer(lanes, spec.k, grouped=True),
        pair_summer(lanes, spec.k),
        summer(lanes, spec.k, grouped=False),
    )
    store, store_one = lanes.store, lanes.store_one
    spread, spread_one = spreader(size, store), spreader(size, store_one)

    @dual
    def emit(row: int, lists: int, e: int, value: Group) -> None:
        store(table(lists + 8 * DST) + e * size, value)
        spread(row, lists, count(row), e, value)

    @dual
    def group(image: int, row: int, e: int, scalar: Any) -> None:
        lists = arrays(image, row)
        emit(row, lists, e, total(row, lists, e))

    @dual
    def pair(image: int, row: int, e: int, f: int, scalar: Any) -> None:
        lists = arrays(image, row)
        a, b = total_pair(row, lists, e, f)
        emit(row, lists, e, a)
        emit(row, lists, f, b)

    @dual
    def rest(image: int, row: int, e: int, end: int, scalar: Any) -> None:
        lists = arrays(image, row)
        value = total_one(row, lists, e)
        store_one(table(lists + 8 * DST) + e * size, value)
        spread_one(row, lists, count(row), e, value)

    return framed(spec.chunk, lanes.count, group, rest, pair)
