"""Casts between float32 and the 16-bit floats, rounded to nearest even; NaN stays NaN."""

from __future__ import annotations

from typing import Any

from ..spec import Spec
from ..table import SOURCES
from .chunks import Body, emitter, framed, listed
from .intrinsics import dual
from .lanes import matching_lanes


def body(spec: Spec) -> Body:
    """Make the body of a cast. In registers all of these are float32, so a cast is a load and a store."""
    source, target = (
        matching_lanes(spec.dtype, str(spec.target)),
        matching_lanes(str(spec.target), spec.dtype),
    )
    load, load_one, size = source.load, source.load_one, source.size
    emit, emit_one = emitter(target.size, target.store), emitter(target.size, target.store_one)

    @dual
    def group(row: int, e: int, end: int, scalar: Any) -> None:
        emit(row, e, load(listed(row, SOURCES, 0) + e * size))

    @dual
    def rest(row: int, e: int, end: int, scalar: Any) -> None:
        emit_one(row, e, load_one(listed(row, SOURCES, 0) + e * size))

    return framed(spec.chunk, source.width, group, rest)
