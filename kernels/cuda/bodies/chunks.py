"""The frame of every kernel: a block finds its chunk.

Groups of 16 bytes are processed first, then the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..table import ALIGNED, BLOCK, COUNT, DST, NUMEL, OUTS
from .intrinsics import dual, forget_reads, image_word, select, table_word

Body = Callable[[int, int, int, Any], None]
Scalar = Any

_LOW = 0xFFFFFFFF


def make_body(
    chunk: int,
    count: int,
    process_group: Callable[[int, int, int, Scalar], None],
    process_remaining: Callable[[int, int, int, Scalar], None],
    process_pair: Callable[[int, int, int, Scalar], None] | None = None,
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
    process_group : callable
        ``process_group(row, e, end, scalar)`` processes elements e to e + count of a row with aligned arrays.
    process_remaining : callable
        ``process_remaining(row, e, end, scalar)`` processes elements e to e + step that are below `end`.
    process_pair : callable or None
        ``process_pair(row, e, f, scalar)`` processes two groups; the loads of both precede the stores.
    step : int
        Elements that `process_remaining` processes.
    whole : int
        `process_remaining` is also called for the padding of a row, up to a multiple of this power of two.
    """
    stride = BLOCK * count
    in_row, in_chunk = _bound_checks(chunk, count)
    paired = process_pair is not None
    both = process_pair if process_pair is not None else _no_pair

    @dual
    def process_groups(block: int, thread: int, image: int, scalar: Scalar) -> None:
        entry = image_word(image + 8 * block)
        row = image + 8 * (entry & _LOW)
        e = (entry >> 32) * chunk + thread * count
        more = header_word_now(row, ALIGNED) != 0
        if paired:
            while more and in_row(row, e + stride):
                both(row, e, e + stride, scalar)
                e += 2 * stride
                more = in_chunk(e)
        while more and in_row(row, e):
            process_group(row, e, e + count, scalar)
            e += stride
            more = in_chunk(e)

    @dual
    def process_remainder(block: int, thread: int, image: int, scalar: Scalar) -> None:
        entry = image_word(image + 8 * block)
        row = image + 8 * (entry & _LOW)
        first = (entry >> 32) * chunk
        end = min(header_word_now(row, NUMEL), first + chunk)
        e = select(header_word_now(row, ALIGNED) != 0, end & -count, first) + thread * step
        limit = (end + (whole - 1)) & -whole
        while e < limit:
            process_remaining(row, e, end, scalar)
            e += BLOCK * step

    def body(block: int, thread: int, image: int, scalar: Scalar) -> None:
        process_groups(block, thread, image, scalar)
        forget_reads()  # the chunk is found again, so that the first loop keeps nothing in registers
        process_remainder(block, thread, image, scalar)

    return dual(body)


@cache
def _bound_checks(chunk: int, count: int) -> tuple[Callable[[int, int], bool], Callable[[int], bool]]:
    """Make the functions that check whether a group is in its row, and in its chunk."""

    @dual
    def in_row(row: int, e: int) -> bool:
        return e + count <= header_word_now(row, NUMEL)

    @dual
    def in_chunk(e: int) -> bool:
        """Check an e that was increased: beyond its chunk it is at a first position of the next."""
        return e & (chunk - 1) >= BLOCK * count

    return in_row, in_chunk


@dual
def _no_pair(row: int, e: int, f: int, scalar: Scalar) -> None:
    return None


@dual
def header_word(row: int, place: int) -> int:
    """Return one word of a row's header."""
    return table_word(row + 8 * place)


@dual
def header_word_now(row: int, place: int) -> int:
    """Return one word of a row's header, read at this point, to save registers."""
    return image_word(row + 8 * place)


@dual
def listed(row: int, place: int, j: int) -> int:
    """Return address number j of the list at the place in the header's word `place`."""
    return table_word(row + 8 * (table_word(row + 8 * place) + j))


@dual
def listed_now(row: int, place: int, j: int) -> int:
    """As `listed`, read at this point, to save registers."""
    return image_word(row + 8 * (image_word(row + 8 * place) + j))


@cache
def make_counter(k: int) -> Callable[[int], int]:
    """Make the function that returns the number of summed arrays: a constant, or a word of the row."""

    @dual
    def fixed_number(row: int) -> int:
        return k

    @dual
    def any_number(row: int) -> int:
        return header_word_now(row, COUNT)

    return fixed_number if k else any_number


@cache
def make_emitter(size: int, store: Callable[[int, Any], None]) -> Callable[[int, int, Any], None]:
    """Make the function that stores into dst and all outs of a row.

    Parameters
    ----------
    size : int
        Bytes of an element.
    store : callable
        Stores a group or an element.
    """
    spread_value = make_spreader(size, store)

    @dual
    def emit_value(row: int, e: int, value: Any) -> None:
        store(header_word(row, DST) + e * size, value)
        spread_value(row, e, value)

    return emit_value


@cache
def make_spreader(size: int, store: Callable[[int, Any], None]) -> Callable[[int, int, Any], None]:
    """Make the function that stores into all outs of a row, as `make_emitter`, but not into dst."""

    @dual
    def spread_value(row: int, e: int, value: Any) -> None:
        at = row + 8 * header_word_now(row, OUTS)
        out = image_word(at)
        while out != 0:  # unlike a loop over a count, this loop is not unrolled, which would be useless
            store(out + e * size, value)
            at += 8
            out = image_word(at)

    return spread_value
