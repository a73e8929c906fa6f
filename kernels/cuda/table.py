"""Images: what one launch works on, as one array of 64-bit words.

An image is, in this order:

* the chunk map, a word for each block of threads: where its row begins (low half, in words from the beginning
  of the image) and which chunk of that row is its (high half);
* a header of `HEADER` words for each row;
* the rows' lists: dst, sources, residuals, outs, one behind the other;
* the rows' lists of words of a codec.

Places are counted in words from the beginning of the image, so it may be copied anywhere.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .spec import Spec

Words = npt.NDArray[np.uint64]

#: Threads of a block.
BLOCK = 256

# Words of a row's header.
NUMEL, ALIGNED, OUTS, SOURCES, LISTS, CODES, MASTER, PARAMS, STATES = range(9)
MOST_STATES = 3
HEADER = STATES + MOST_STATES
# Words of a row's list: dst comes first, then the sources.
DST, FIRST_SOURCE = 0, 1


class Row(NamedTuple):
    """What a kernel does to one key. All addresses are of the memory that the kernel sees, as int.

    Arrays are contiguous. Rows whose arrays all begin at a multiple of 16 bytes are read and written 16 bytes
    at a time; others work too, more slowly. An out may be one of the sources, or dst; arrays may not overlap
    otherwise.

    Attributes
    ----------
    numel : int
        Elements of the key.
    srcs : tuple of int
        Arrays to sum, to quantise or to cast.
    dst : int
        Array for the result; the weight of an update. Not read by quantising kernels.
    outs : tuple of int
        Further arrays for the result, any number.
    states : tuple of int
        States of an update's rule, in the order of kernels/rules.h.
    master : int
        Float32 copy behind a 16-bit weight.
    residuals : tuple of int
        One for quantising; one for each source for reducing.
    words : tuple of int
        Quantising: the one array to write, of ``4 * ceil(numel / 16)`` bytes (2bit) or ``4 * ceil(numel /
        32)`` (1bit). Dequantising: the arrays to decode and sum; these are counted by `Spec.k`.
    params : int
        The row's constants: `WIDTH` numbers, made by `constants`, on the device.
    """

    numel: int
    srcs: tuple[int, ...] = ()
    dst: int = 0
    outs: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    master: int = 0
    residuals: tuple[int, ...] = ()
    words: tuple[int, ...] = ()
    params: int = 0


def image(spec: Spec, rows: Sequence[Row]) -> tuple[Words, int]:
    """Lay out rows for one launch.

    Parameters
    ----------
    spec : Spec
        The kernel.
    rows : sequence of Row
        One for each key; keys without elements are allowed.

    Returns
    -------
    words : numpy.ndarray of uint64
        To be copied to the device, at a multiple of 8 bytes, before the launch, and kept until it is done.
    chunks : int
        Blocks of the launch; 0 where there is nothing to do.

    Raises
    ------
    ValueError
        A row has not the arrays that the kernel wants.
    """
    if not rows:
        return np.empty(0, np.uint64), 0
    columns = Row(*zip(*rows, strict=True))  # type: ignore[arg-type]
    lengths = _lengths(spec, columns)
    sizes = np.array(columns.numel, np.int64)
    per_row = (sizes + (spec.chunk - 1)) // spec.chunk
    chunks = int(per_row.sum())
    lists = _lists(columns)
    codes = _flat(columns.words)
    headers = _headers(spec, columns, sizes, lengths, lists)
    first_list = chunks + headers.size
    headers[:, LISTS] += np.uint64(first_list)
    headers[:, CODES] += np.uint64(first_list + lists.size)
    return np.concatenate([_chunk_map(per_row, chunks), headers.reshape(-1), lists, codes]), chunks


class _Lengths(NamedTuple):
    srcs: npt.NDArray[np.int64]
    residuals: npt.NDArray[np.int64]
    words: npt.NDArray[np.int64]
    outs: npt.NDArray[np.int64]

    def count(self, spec: Spec) -> npt.NDArray[np.int64]:
        """How many arrays of each row are summed."""
        return self.words if spec.op.startswith("dequantise") else self.srcs


def _lengths(spec: Spec, columns: Any) -> _Lengths:
    """Count the arrays of each row, and raise unless they are what the kernel wants."""
    n = len(columns.numel)
    columns_of_lists = (columns.srcs, columns.residuals, columns.words, columns.outs)
    lengths = _Lengths(*(np.fromiter(map(len, lists), np.int64, n) for lists in columns_of_lists))
    count = lengths.count(spec)
    wanted_residuals: Any = 0
    if spec.codec:
        wanted_residuals = {"quantise": 1, "dequantise": 0, "reduce": count}[spec.op.partition("_")[0]]
    wanted_words = {"quantise": 1, "dequantise": count}.get(spec.op.partition("_")[0], 0)
    no_sources = spec.op.startswith("dequantise")
    _demand(spec, (count == spec.k) if spec.k else (count > 0), "arrays to sum")
    _demand(spec, (lengths.srcs == 0) | (not no_sources), "srcs")
    _demand(spec, lengths.residuals == wanted_residuals, "residuals")
    _demand(spec, lengths.words == wanted_words, "words")
    _demand(spec, np.array([len(states) for states in columns.states]) == spec.states, "states")
    if spec.op == "update":
        _demand(spec, np.array(columns.params, np.uint64) != 0, "params")
        _demand(spec, (np.array(columns.master, np.uint64) != 0) == spec.master, "master")
    if not spec.op.startswith("quantise"):
        _demand(spec, np.array(columns.dst, np.uint64) != 0, "dst")
    return lengths


def _demand(spec: Spec, fits: npt.NDArray[np.bool_], what: str) -> None:
    if not fits.all():
        raise ValueError(f"{spec.name}: row {int(fits.argmin())} has not the {what} that this kernel wants")


def _flat(lists: Iterable[Iterable[int]]) -> Words:
    return np.frombuffer(array("Q", chain.from_iterable(lists)), np.uint64)


def _lists(columns: Any) -> Words:
    """Concatenate the rows' lists: dst, sources, residuals, outs of each."""
    of_rows = zip(zip(columns.dst), columns.srcs, columns.residuals, columns.outs)  # noqa: B905
    return _flat(chain.from_iterable(of_rows))


def _headers(
    spec: Spec, columns: Any, sizes: npt.NDArray[np.int64], lengths: _Lengths, lists: Words
) -> npt.NDArray[np.uint64]:
    """Headers of all rows, their lists counted from the beginning of the lists."""
    headers = np.zeros((len(sizes), HEADER), np.uint64)
    in_list = 1 + lengths.srcs + lengths.residuals + lengths.outs
    headers[:, NUMEL] = sizes
    headers[:, OUTS] = lengths.outs
    headers[:, SOURCES] = lengths.count(spec)
    headers[:, LISTS] = np.cumsum(in_list) - in_list
    headers[:, CODES] = np.cumsum(lengths.words) - lengths.words
    headers[:, MASTER] = columns.master
    headers[:, PARAMS] = columns.params
    if spec.states:
        headers[:, STATES : STATES + spec.states] = _flat(columns.states).reshape(-1, spec.states)
    together = np.bitwise_or.reduceat(lists, headers[:, LISTS].astype(np.intp))
    together |= np.bitwise_or.reduce(headers[:, [MASTER, *range(STATES, HEADER)]], axis=1)
    headers[:, ALIGNED] = together & np.uint64(15) == 0
    return headers


def _chunk_map(per_row: npt.NDArray[np.int64], chunks: int) -> Words:
    """For each block, row (as a place, behind the map) and chunk."""
    rows_at = chunks + HEADER * np.arange(len(per_row))
    first = np.cumsum(per_row) - per_row
    number = np.arange(chunks) - np.repeat(first, per_row)
    return (np.repeat(rows_at, per_row) | number << 32).astype(np.uint64)
