"""The frame of every kernel: a block finds its chunk; groups go 16 bytes at a time, the rest singly."""

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
    """Make a body out of what is done to a group of elements, and to what is left.

    Parameters
    ----------
    chunk : int
        Elements that a block works on, a power of two, at least ``2 * BLOCK * count``.
    count : int
        Elements of a group, a power of two.
    group : callable
        ``group(row, e, end, scalar)`` does elements e to e + count of a row whose arrays are aligned.
    rest : callable
        ``rest(row, e, end, scalar)`` does elements e to e + step, as far as they are below `end`.
    pair : callable or None
        ``pair(row, e, f, scalar)`` does two groups, with the loads of both before the first store.
    step : int
        Elements that `rest` does.
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
        forget()  # the chunk is found again, so that nothing is kept in registers through the first loop
        remainder(block, thread, image, scalar)

    return dual(body)


@cache
def _bounds(chunk: int, count: int) -> tuple[Callable[[int, int], bool], Callable[[int], bool]]:
    """Make the functions that tell whether a group lies in its row, and whether in its chunk."""

    @dual
    def fits(row: int, e: int) -> bool:
        return e + count <= field_now(row, NUMEL)

    @dual
    def in_chunk(e: int) -> bool:
        """Say so of an e that was moved on: behind its chunk it is at a first place of the next."""
        return e & (chunk - 1) >= BLOCK * count

    return fits, in_chunk


@dual
def _no_pair(row: int, e: int, f: int, scalar: Scalar) -> None:
    return None


@dual
def field(row: int, place: int) -> int:
    """One word of a row's header."""
    return table(row + 8 * place)


@dual
def field_now(row: int, place: int) -> int:
    """One word of a row's header, read at this point: where registers are few."""
    return word(row + 8 * place)


@dual
def listed(row: int, place: int, j: int) -> int:
    """Address number j of the list that begins where the header's word `place` says."""
    return table(row + 8 * (table(row + 8 * place) + j))


@dual
def listed_now(row: int, place: int, j: int) -> int:
    """As `listed`, read at this point: where registers are few."""
    return word(row + 8 * (word(row + 8 * place) + j))


@cache
def counter(k: int) -> Callable[[int], int]:
    """Make the function that tells how many arrays of a row are summed: a constant, or what the row says."""

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
        Of a group or of an element.
    """
    spread = spreader(size, store)

    @dual
    def emit(row: int, e: int, value: Any) -> None:
        store(field(row, DST) + e * size, value)
        spread(row, e, value)

    return emit


@cache
def spreader(size: int, store: Callable[[int, Any], None]) -> Callable[[int, int, Any], None]:
    """Make the function that stores into all outs of a row, as `emitter`, but leaves dst alone."""

    @dual
    def spread(row: int, e: int, value: Any) -> None:
        at = row + 8 * field_now(row, OUTS)
        out = word(at)
        while out != 0:  # a loop that cannot be unrolled, as one over a number of outs would be, for nothing
            store(out + e * size, value)
            at += 8
            out = word(at)

    return spread
