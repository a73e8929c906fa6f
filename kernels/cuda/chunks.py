"""The frame of every kernel: a block finds its chunk; groups go 16 bytes at a time, the rest singly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .intrinsics import dual, table
from .table import ALIGNED, BLOCK, COUNT, DST, NUMEL, OUT_COUNT, OUTS

Body = Callable[[int, int, int, Any], None]
Group = Any
Scalar = Any

_LOW = 0xFFFFFFFF


def framed(
    chunk: int,
    count: int,
    group: Callable[[int, int, int, Scalar], None],
    rest: Callable[[int, int, int, int, Scalar], None],
    pair: Callable[[int, int, int, int, Scalar], None] | None = None,
    step: int = 1,
    whole: int = 1,
) -> Body:
    """Make a body out of what is done to a group of elements, and to what is left.

    Parameters
    ----------
    chunk : int
        Elements that a block works on, a multiple of ``2 * BLOCK * count``.
    count : int
        Elements of a group, a power of two.
    group : callable
        ``group(image, row, e, scalar)`` does elements e to e + count of a row whose arrays are aligned.
    rest : callable
        ``rest(image, row, e, end, scalar)`` does elements e to e + step, as far as they are below `end`.
    pair : callable or None
        ``pair(image, row, e, f, scalar)`` does two groups, with the loads of both before the first store.
    step : int
        Elements that `rest` does.
    whole : int
        `rest` is also called beyond the end of a row, up to a multiple of this power of two: for padding.
    """
    stride = BLOCK * count
    paired = pair is not None
    both = pair if pair is not None else _no_pair

    def body(block: int, thread: int, image: int, scalar: Scalar) -> None:
        entry = table(image + 8 * block)
        row = image + 8 * (entry & _LOW)
        first = (entry >> 32) * chunk
        end = min(field(row, NUMEL), first + chunk)
        at = first
        if field(row, ALIGNED) != 0:
            at = end & -count
            e = first + thread * count
            if paired:
                while e + stride < at:
                    both(image, row, e, e + stride, scalar)
                    e += 2 * stride
            while e < at:
                group(image, row, e, scalar)
                e += stride
        e = at + thread * step
        limit = (end + (whole - 1)) & -whole
        while e < limit:
            rest(image, row, e, end, scalar)
            e += BLOCK * step

    return dual(body)


@dual
def _no_pair(image: int, row: int, e: int, f: int, scalar: Scalar) -> None:
    return None


@dual
def field(row: int, place: int) -> int:
    """One word of a row's header."""
    return table(row + 8 * place)


@dual
def listed(image: int, row: int, place: int, j: int) -> int:
    """Address number j of the list that begins where the header's word `place` says."""
    return table(image + 8 * (table(row + 8 * place) + j))


def counter(k: int) -> Callable[[int], int]:
    """Make the function that tells how many arrays of a row are summed: a constant, or what the row says."""

    @dual
    def fixed(row: int) -> int:
        return k

    @dual
    def any_number(row: int) -> int:
        return field(row, COUNT)

    return fixed if k else any_number


def emitter(size: int, store: Callable[[int, Any], None]) -> Callable[[int, int, int, Any], None]:
    """Make the function that stores into dst and all outs of a row.

    Parameters
    ----------
    size : int
        Bytes of an element.
    store : callable
        Of a group or of an element.
    """
    spread = spreader(size, store)

    @dual
    def emit(image: int, row: int, e: int, value: Any) -> None:
        store(field(row, DST) + e * size, value)
        spread(image, row, e, value)

    return emit


def spreader(size: int, store: Callable[[int, Any], None]) -> Callable[[int, int, int, Any], None]:
    """Make the function that stores into all outs of a row, as `emitter`, but leaves dst alone."""

    @dual
    def spread(image: int, row: int, e: int, value: Any) -> None:
        for j in range(field(row, OUT_COUNT)):
            store(listed(image, row, OUTS, j) + e * size, value)

    return spread
