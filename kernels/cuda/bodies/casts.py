"""Casts between float32 and the 16-bit floats, rounded to nearest even; NaN stays NaN."""

from __future__ import annotations

from typing import Any

from ..spec import KernelSpec
from ..table import SOURCES
from .chunks import Body, listed, make_body, make_emitter
from .intrinsics import dual
from .lanes import matching_lanes


def cast_body(spec: KernelSpec) -> Body:
    """Make the body of a cast. In registers all of these are float32, so a cast is a load and a store."""
    source, target = (
        matching_lanes(spec.dtype, str(spec.target)),
        matching_lanes(str(spec.target), spec.dtype),
    )
    load, load_one, size = source.load, source.load_one, source.size
    emit, emit_one = make_emitter(target.size, target.store), make_emitter(target.size, target.store_one)

    @dual
    def cast_group(row: int, e: int, end: int, scalar: Any) -> None:
        emit(row, e, load(listed(row, SOURCES, 0) + e * size))

    @dual
    def cast_remaining(row: int, e: int, end: int, scalar: Any) -> None:
        emit_one(row, e, load_one(listed(row, SOURCES, 0) + e * size))

    return make_body(spec.chunk, source.width, cast_group, cast_remaining)
