"""Casts between float32 and the 16-bit floats, rounded to nearest even; NaN stays NaN."""

from __future__ import annotations

from typing import Any

from .chunks import Body, arrays, framed, spreader
from .intrinsics import dual, table
from .lanes import beside
from .spec import Spec
from .table import DST, FIRST_SOURCE


def body(spec: Spec) -> Body:
    """Make the body of a cast. In registers all of these are float32, so a cast is a load and a store."""
    target = str(spec.target)
    source_lanes, target_lanes = beside(spec.dtype, target), beside(target, spec.dtype)
    load, load_one, from_size = source_lanes.load, source_lanes.load_one, source_lanes.size
    store, store_one, to_size = target_lanes.store, target_lanes.store_one, target_lanes.size
    spread, spread_one = spreader(to_size, store), spreader(to_size, store_one)

    @dual
    def group(image: int, row: int, e: int, scalar: Any) -> None:
        lists = arrays(image, row)
        value = load(table(lists + 8 * FIRST_SOURCE) + e * from_size)
        store(table(lists + 8 * DST) + e * to_size, value)
        spread(row, lists, 1, e, value)

    @dual
    def rest(image: int, row: int, e: int, end: int, scalar: Any) -> None:
        lists = arrays(image, row)
        value = load_one(table(lists + 8 * FIRST_SOURCE) + e * from_size)
        store_one(table(lists + 8 * DST) + e * to_size, value)
        spread_one(row, lists, 1, e, value)

    return framed(spec.chunk, source_lanes.count, group, rest)
