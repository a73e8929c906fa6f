"""Images: the arguments of one launch, as one array of 64-bit words.

An image is, in this order:

* the chunk map, a word for each block of threads: the place of its row's header (low half) and the number of
  its chunk in that row (high half);
* a header of `HEADER` words for each row;
* the addresses of all rows' sources, then residuals, then words of a codec, then outs, which end with a 0 for
  each row.

Places in a header are counted in words from that header, so an image may be copied anywhere.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .spec import KernelSpec

Words = npt.NDArray[np.uint64]

#: Threads of a block.
BLOCK = 256

# Words of a row's header: sizes, then places in the image, then addresses.
NUMEL, ALIGNED, COUNT = range(3)
SOURCES, RESIDUALS, CODES, OUTS = range(3, 7)
DST, MASTER, PARAMS, STATES = range(7, 11)
MOST_STATES = 3
HEADER = STATES + MOST_STATES


class KernelRow(NamedTuple):
    """The arguments of a kernel for one key. All addresses are of the memory that the kernel uses, as int.

    Arrays are contiguous. If all arrays of a row begin at a multiple of 16 bytes, the row is read and written
    16 bytes at a time; others work too, more slowly. An out may be one of the sources, or dst; arrays may not
    overlap otherwise.

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


def launch_image(spec: KernelSpec, rows: Sequence[KernelRow]) -> tuple[Words, int]:
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
        Blocks of the launch; 0 if there is nothing to do.

    Raises
    ------
    ValueError
        A row does not have the arrays that the kernel needs.
    """
    if not rows:
        return np.empty(0, np.uint64), 0
    columns = KernelRow(*zip(*rows, strict=True))  # type: ignore[arg-type]
    lengths = _list_lengths(columns)
    _check_rows(spec, columns, lengths)
    sizes = np.array(columns.numel, np.int64)
    per_row = (sizes + (spec.chunk - 1)) // spec.chunk
    chunks = int(per_row.sum())
    headers = _row_headers(spec, columns, sizes, lengths)
    lists = _address_lists(columns, lengths, headers)
    return np.concatenate([_chunk_map(per_row, chunks), headers.reshape(-1), *lists]), chunks


class _ListLengths(NamedTuple):
    """The numbers of arrays of each kind in the rows."""

    srcs: list[int]
    residuals: list[int]
    words: list[int]
    outs: list[int]
    states: list[int]

    def summed_lengths(self, spec: KernelSpec) -> list[int]:
        """Return the number of summed arrays of each row."""
        return self.words if spec.op.startswith("dequantise") else self.srcs


def _list_lengths(columns: Any) -> _ListLengths:
    n = len(columns.numel)
    kinds = (getattr(columns, kind) for kind in _ListLengths._fields)
    return _ListLengths(*(list(map(len, lists)) if any(lists) else [0] * n for lists in kinds))


# The arrays of each kind that an operation needs: none, one, or as many as are summed.
_NONE, _ONE, _EACH = "none", "one", "each"
_ARRAYS = {
    "quantise": {"srcs": _EACH, "residuals": _ONE, "words": _ONE},
    "dequantise": {"srcs": _NONE, "residuals": _NONE, "words": _EACH},
    "reduce": {"srcs": _EACH, "residuals": _EACH, "words": _NONE},
}
_PLAIN = {"srcs": _EACH, "residuals": _NONE, "words": _NONE}


def _check_rows(spec: KernelSpec, columns: Any, lengths: _ListLengths) -> None:
    """Raise an error unless every row has the arrays that the kernel needs."""
    counts = lengths.summed_lengths(spec)
    if set(counts) != {spec.k} if spec.k else min(counts) < 1:
        _refuse_rows(spec, "arrays to sum", [n == spec.k if spec.k else n > 0 for n in counts])
    for kind, many in _ARRAYS.get(spec.op.partition("_")[0], _PLAIN).items():
        found = getattr(lengths, kind)
        if many == _NONE and not any(found):
            continue
        wanted = {_NONE: [0] * len(counts), _ONE: [1] * len(counts), _EACH: counts}[many]
        if found is not wanted and found != wanted:
            _refuse_rows(spec, kind, list(map(int.__eq__, found, wanted)))
    if set(lengths.states) != {spec.states}:
        _refuse_rows(spec, "states", [n == spec.states for n in lengths.states])
    if not spec.op.startswith("quantise") and not all(columns.dst):
        _refuse_rows(spec, "dst", columns.dst)
    if spec.op == "update" and not all(columns.params):
        _refuse_rows(spec, "params", columns.params)
    if any(columns.master) if not spec.master else not all(columns.master):
        _refuse_rows(spec, "master", [bool(address) == spec.master for address in columns.master])


def _refuse_rows(spec: KernelSpec, what: str, fits: Sequence[object]) -> None:
    row = next(number for number, fit in enumerate(fits) if not fit)
    raise ValueError(f"{spec.name}: row {row} does not have the {what} that this kernel needs")


def _flat_addresses(lists: Iterable[Iterable[int]], total: int) -> Words:
    return np.fromiter(chain.from_iterable(lists), np.uint64, total)


def _row_headers(
    spec: KernelSpec, columns: Any, sizes: npt.NDArray[np.int64], lengths: _ListLengths
) -> npt.NDArray[np.uint64]:
    """Make the headers of all rows, without the places of their lists."""
    headers = np.zeros((len(sizes), HEADER), np.uint64)
    headers[:, NUMEL] = sizes
    headers[:, COUNT] = lengths.summed_lengths(spec)
    headers[:, DST] = _column_addresses(columns.dst)
    if spec.op == "update":
        headers[:, PARAMS] = _column_addresses(columns.params)
        headers[:, MASTER] = _column_addresses(columns.master)
        if spec.states:
            states = _flat_addresses(columns.states, len(sizes) * spec.states)
            headers[:, STATES : STATES + spec.states] = states.reshape(-1, spec.states)
    together = headers[:, DST]
    if spec.op == "update":
        together = np.bitwise_or.reduce(headers[:, _SINGLE_ARRAYS], axis=1)
    headers[:, ALIGNED] = together & np.uint64(15) == 0
    return headers


_SINGLE_ARRAYS = [DST, MASTER, *range(STATES, HEADER)]


def _address_lists(columns: Any, lengths: _ListLengths, headers: npt.NDArray[np.uint64]) -> Iterator[Words]:
    """Yield the lists of addresses, and write their places, counted from each header, to the headers."""
    own = np.arange(len(headers)) * HEADER
    first = headers.size
    for kind, place in (("srcs", SOURCES), ("residuals", RESIDUALS), ("words", CODES), ("outs", OUTS)):
        if not any(getattr(lengths, kind)):
            if kind == "outs":  # all rows share the end of a list
                headers[:, OUTS] = first - own
                yield np.zeros(1, np.uint64)
            continue
        counts = np.array(getattr(lengths, kind), np.int64)
        addresses = _flat_addresses(getattr(columns, kind), int(counts.sum()))
        misaligned = addresses & np.uint64(15) != 0
        if kind != "words" and misaligned.any():  # codes are read byte by byte anyway
            headers[np.repeat(np.arange(len(counts)), counts)[misaligned], ALIGNED] = 0
        if kind == "outs":
            addresses, counts = _terminate_lists(addresses, counts)
        headers[:, place] = first + np.cumsum(counts) - counts - own
        first += addresses.size
        yield addresses


def _terminate_lists(addresses: Words, counts: npt.NDArray[np.int64]) -> tuple[Words, npt.NDArray[np.int64]]:
    """Append a 0 to each row's addresses."""
    ended = np.zeros(addresses.size + counts.size, np.uint64)
    ended[np.arange(addresses.size) + np.repeat(np.arange(counts.size), counts)] = addresses
    return ended, counts + 1


def _column_addresses(column: Sequence[int]) -> Words:
    return np.frombuffer(array("Q", column), np.uint64)


def _chunk_map(per_row: npt.NDArray[np.int64], chunks: int) -> Words:
    """Return for each block the place of its row, after the map, and the number of its chunk."""
    rows_at = chunks + HEADER * np.arange(len(per_row))
    first = np.cumsum(per_row) - per_row
    # Row plus number of the chunk, which is the block's number less that of the row's first block.
    entries = np.repeat(rows_at - (first << 32), per_row)
    entries += np.arange(0, chunks << 32, 1 << 32)
    return entries.view(np.uint64)
