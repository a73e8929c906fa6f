"""Rows that the workers of a host push to slices of keys on servers: merged there, and sent as one part.

They pass through the region and do not stay: a row-sparse key has one byte there, and only its rounds matter;
a dense key, to which rows may be pushed too, has its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arrays.grouping import Group, Key
from ...arrays.sparse import RowSparseArray, trusted_rows
from ...kernels import cpu
from ..entry import Array
from ..parameter_server.protocol.messages import PayloadLocation, Record, RecordKind, Slice
from ..parameter_server.protocol.payload_bytes import as_bytes
from ..parameter_server.worker.key_directory import DistKey
from ..parameter_server.worker.operations import PartRequest, Take
from ..parameter_server.worker.request_builder import lines_of, split_rows
from ..rows import sum_rows
from ..shared.native import _shared as shm
from ..shared.rows import rows_at

Handle = shm.Handle


class SliceOfRows(NamedTuple):
    """A slice to which rows may be pushed.

    Attributes
    ----------
    sparse : bool
        Whether its key is row-sparse.
    first : int
        Id of its first row.
    shape : tuple of int
        Of the key, as lines.
    dtype : numpy.dtype
    """

    sparse: bool
    first: int
    shape: tuple[int, int]
    dtype: np.dtype[Any]


class HostRows:
    """The slices of one worker's keys to which rows can be pushed."""

    def __init__(self) -> None:
        self._slices: dict[Key, SliceOfRows] = {}

    def note_slice(self, name: Key, key: DistKey, part: Slice) -> None:
        """Record a slice, by its name in the region."""
        if key.sparse or key.takes_rows:
            first = part.start if key.sparse else part.start // key.line
            self._slices[name] = SliceOfRows(key.sparse, first, _shape_in_lines(key), key.dtype)

    def knows_slice(self, handle: Handle) -> bool:
        """Return whether rows may be pushed to a slice, as far as this worker knows."""
        return handle.key in self._slices

    def is_table(self, handle: Handle) -> bool:
        """Return whether a slice is of a row-sparse key."""
        known = self._slices.get(handle.key)
        return known is not None and known.sparse

    def sum_parts(self, handle: Handle, sources: Sequence[int | Array]) -> RowSparseArray | Array:
        """Sum the parts of a round, in private memory: to rows, or to a dense value if one part is dense."""
        of = self._slices[handle.key]
        parts = [
            rows_at(handle, source, of.shape, of.dtype) if isinstance(source, int) else source
            for source in sources
        ]
        rows = [part for part in parts if isinstance(part, RowSparseArray)]
        if len(rows) == len(parts):
            return sum_rows(rows)
        total = np.empty(handle.shape, handle.dtype)
        cpu.reduce([([_dense_part(part, of, handle) for part in parts], total, [])])
        return total

    def push_requests(
        self,
        handle: Handle,
        round: int,
        version: int,
        clock: int,
        part: Slice,
        total: RowSparseArray,
        take: Take | None,
    ) -> list[PartRequest]:
        """Return the requests that push rows and, with `take`, read the result when the round is complete.

        The read is of the value of a dense key, or of one row of a row-sparse key, if it has any: its data is
        not used. `take` is called with the answer.
        """
        payload = as_bytes(total.indices), as_bytes(total.data)
        nbytes = sum(map(len, payload))
        rows, frame = len(total.indices), PayloadLocation.FRAME
        record = Record(
            RecordKind.PUSH, part.id, 0, round, version, clock, rows=rows, place=frame, nbytes=nbytes
        )
        made = [PartRequest(part.server, record, payload, None, part)]
        if take is None:
            return made
        if self.is_table(handle) and part.stop > part.start:
            some = np.array([self._slices[handle.key].first], np.int64)
            record = Record(RecordKind.PULL_ROWS, part.id, 0, round, rows=1, place=frame, nbytes=some.nbytes)
            return [*made, PartRequest(part.server, record, (as_bytes(some),), take, part)]
        return [*made, PartRequest(part.server, Record(RecordKind.PULL, part.id, 0, round), (), take, part)]


def cut_rows(key: DistKey, handles: Sequence[Handle], arrays: Sequence[RowSparseArray]) -> list[Group]:
    """Cut rows at the slices of their key, as lines."""
    cut: list[list[RowSparseArray]] = [[] for _ in handles]
    for array in arrays:
        ids, lines = lines_of(key, array)
        for into, (_, low, high) in zip(cut, split_rows(key, ids), strict=True):
            into.append(trusted_rows(lines[low:high], ids[low:high], _shape_in_lines(key)))
    return [(handle.key, rows) for handle, rows in zip(handles, cut, strict=True)]


def _shape_in_lines(key: DistKey) -> tuple[int, int]:
    return key.shape[0] * key.row_size // key.line if key.line else key.shape[0], key.line


def _dense_part(part: RowSparseArray | Array, of: SliceOfRows, handle: Handle) -> Array:
    """Return a part as an array of its slice."""
    if not isinstance(part, RowSparseArray):
        return part
    lines = np.zeros((handle.shape[0] // of.shape[1], of.shape[1]), of.dtype)
    lines[part.indices - of.first] = part.data
    return lines.reshape(-1)
