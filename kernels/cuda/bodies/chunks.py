"""The frame of every kernel: a block finds its chunk.

Groups of 16 bytes are processed first, then the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..table import ALIGNED, BLOCK, COUNT, DST, NUMEL, OUTS
from .intrinsics import dual, forget, select, table, word

Body = Callable[[int, int, int, Any], None]
Scalar = Any

_LOW = 0xFFFFFFFF


def framed(
    chunk: int,
    count: int,
    group: Callable[[int, int, int, Scalar], None],
    rest: Callable[[int, int, int, Scalar], None],
    pair: Callable[[int, int, int, Scalar], None] | None = None,
    step: int = 1,
    whole: int = 1,
) -> Body:
    """Make a body from functions for a group of elements, and for the remaining elements.

    Parameters
    ----------
    chunk : int
        Elements that a block works on, a power of two, at least ``2 * BLOCK * count``.
    count : int
        Elements of a group, a power of two.
    group : callable
        ``group(row, e, end, scalar)`` processes elements e to e + count of a row with aligned arrays.
    rest : callable
        ``rest(row, e, end, scalar)`` processes elements e to e + step, as far as they are below `end`.
    pair : callable or None
        ``pair(row, e, f, scalar)`` processes two groups, with the loads of both before the first store.
    step : int
        Elements that `rest` processes.
    whole : int
        `rest` is also called beyond the end of a row, up to a multiple of this power of two: for padding.
    """
    stride = BLOCK * count
    fits, in_chunk = _bounds(chunk, count)
    paired = pair is not None
    both = pair if pair is not None else _no_pair

    @dual
    def groups(block: int, thread: int, image: int, scalar: Scalar) -> None:
        entry = word(image + 8 * block)
        row = image + 8 * (entry & _LOW)
        e = (entry >> 32) * chunk + thread * count
        more = field_now(row, ALIGNED) != 0
        if paired:
            while more and fits(row, e + stride):
                both(row, e, e + stride, scalar)
                e += 2 * stride
                more = in_chunk(e)
        while more and fits(row, e):
            group(row, e, e + count, scalar)
            e += stride
            more = in_chunk(e)

    @dual
    def remainder(block: int, thread: int, image: int, scalar: Scalar) -> None:
        entry = word(image + 8 * block)
        row = image + 8 * (entry & _LOW)
        first = (entry >> 32) * chunk
        end = min(field_now(row, NUMEL), first + chunk)
        e = select(field_now(row, ALIGNED) != 0, end & -count, first) + thread * step
        limit = (end + (whole - 1)) & -whole
        while e < limit:
            rest(row, e, end, scalar)
            e += BLOCK * step

    def body(block: int, thread: int, image: int, scalar: Scalar) -> None:
        groups(block, thread, image, scalar)
        forget()  # the chunk is found again, so that the first loop keeps nothing in registers
        remainder(block, thread, image, scalar)

    return dual(body)


@cache
def _bounds(chunk: int, count: int) -> tuple[Callable[[int, int], bool], Callable[[int], bool]]:
    """Make the functions that check whether a group is in its row, and in its chunk."""

    @dual
    def fits(row: int, e: int) -> bool:
        return e + count <= field_now(row, NUMEL)

    @dual
    def in_chunk(e: int) -> bool:
        """Check an e that was increased: beyond its chunk it is at a first position of the next."""
        return e & (chunk - 1) >= BLOCK * count

    return fits, in_chunk


@dual
def _no_pair(row: int, e: int, f: int, scalar: Scalar) -> None:
    return None


@dual
def field(row: int, place: int) -> int:
    """Return one word of a row's header."""
    return table(row + 8 * place)


@dual
def field_now(row: int, place: int) -> int:
    """Return one word of a row's header, read at this point, to save registers."""
    return word(row + 8 * place)


@dual
def listed(row: int, place: int, j: int) -> int:
    """Return address number j of the list at the place in the header's word `place`."""
    return table(row + 8 * (table(row + 8 * place) + j))


@dual
def listed_now(row: int, place: int, j: int) -> int:
    """As `listed`, read at this point, to save registers."""
    return word(row + 8 * (word(row + 8 * place) + j))


@cache
def counter(k: int) -> Callable[[int], int]:
    """Make the function that returns the number of summed arrays: a constant, or a word of the row."""

    @dual
    def fixed(row: int) -> int:
        return k

    @dual
    def any_number(row: int) -> int:
        return field_now(row, COUNT)

    return fixed if k else any_number


@cache
def emitter(size: int, store: Callable[[int, Any], None]) -> Callable[[int, int, Any], None]:
    """Make the function that stores into dst and all outs of a row.

    Parameters
    ----------
    size : int
        Bytes of an element.
    store : callable
        Stores a group or an element.
    """
    spread = spreader(size, store)

    @dual
    def emit(row: int, e: int, value: Any) -> None:
        store(field(row, DST) + e * size, value)
        spread(row, e, value)

    return emit


@cache
def spreader(size: int, store: Callable[[int, Any], None]) -> Callable[[int, int, Any], None]:
    """Make the function that stores into all outs of a row, as `emitter`, but not into dst."""

    @dual
    def spread(row: int, e: int, value: Any) -> None:
        at = row + 8 * field_now(row, OUTS)
        out = word(at)
        while out != 0:  # unlike a loop over a count, this loop is not unrolled, which would be useless
            store(out + e * size, value)
            at += 8
            out = word(at)

    return spread
