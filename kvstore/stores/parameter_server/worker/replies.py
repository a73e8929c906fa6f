"""Writes the values of replies to their destinations while they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....arrays.sparse import RowSparseArray, reserve_rows
from ....kernels import cpu
from ...entry import Array
from ...rows import Ids
from ..protocol.messages import IN_PLACE, PayloadLocation, Record, Slice
from ..protocol.payload_bytes import ABSENT, SHARED_BYTES, as_bytes
from ..transport.native._streams import ExpectedRows
from .key_directory import DistKey

if TYPE_CHECKING:
    from .shared_payloads import SharedPayloads

Frames = Sequence[Any]


class FillOuts:
    """Writes a dense key's value to outs of its type."""

    __slots__ = ("_flat", "_key", "_memory", "in_place")

    def __init__(
        self, key: DistKey, outs: list[Array], memory: SharedPayloads, in_place: bool = False
    ) -> None:
        self._key, self._memory = key, memory
        #: Whether the only out is the pushed array.
        self.in_place = in_place
        self._flat = [out.reshape(-1) for out in outs]

    def __call__(self, part: Slice, record: Record, frames: Frames) -> bool:
        """Copy one slice; False: it has changed in the server's memory, and must be requested again."""
        if record.flags == IN_PLACE and record.place == PayloadLocation.NONE:
            self._memory.note_in_place((part.stop - part.start) * self._key.dtype.itemsize)
            return True
        targets = [flat[part.start : part.stop] for flat in self._flat]
        if record.place == PayloadLocation.SHARED:
            return self._memory.copy_value(part.server, record, targets)
        if targets:
            value = self._sources(record, frames, part.stop - part.start)
            cpu.reduce([(value, targets[0], targets[1:])])
        return True

    def _sources(self, record: Record, frames: Frames, count: int) -> list[Array] | cpu.Coded:
        """Return the sources of the value: itself, or packed parts."""
        if not record.coding:
            return [aligned_elements(frames[record.frame], record.offset, self._key.dtype, count)]
        packed = np.frombuffer(frames[record.frame], np.uint8, record.nbytes, record.offset)
        parts = list(packed.reshape(-1, cpu.encoded_bytes(record.coding, count)))
        return cpu.Coded(record.coding, record.threshold, count, parts, packed=True)


class CollectRows:
    """Collects the requested rows, in the order of their ids."""

    def __init__(self, key: DistKey, out: RowSparseArray, ids: Ids) -> None:
        self._key, self._out, self.ids = key, out, ids
        #: Memory of `out` for the rows.
        self.block = reserve_rows(out, len(ids))
        #: The memory that rows are written to.
        self.rows = self.block
        self._direct = True

    def begin(self, direct: bool) -> None:
        """Prepare to receive rows; `direct`: no other out uses a part of this out's memory."""
        self._direct = direct and self.block.dtype == self._key.dtype
        if not self._direct:
            self.rows = np.empty(self.block.shape, self._key.dtype)

    def __call__(self, part: Slice, record: Record, frames: Frames) -> bool:
        """Write the rows of one slice."""
        ids, data = table_of(self._key, record, frames)
        rows = self._slice_rows(part, len(ids))
        if rows.ctypes.data != data.ctypes.data:
            rows[...] = data
        return True

    def expected_rows(self, part: Slice, n: int) -> ExpectedRows | None:
        """Return the destination of the rows of one slice; None: they are to be copied."""
        rows = self._slice_rows(part, n)
        if not self._direct or rows.nbytes < SHARED_BYTES:
            return None
        low = self._first_row(part)
        return ExpectedRows(part.id, self.ids[low : low + n], as_bytes(rows))

    def _slice_rows(self, part: Slice, n: int) -> Array:
        low = self._first_row(part)
        return self.rows[low : low + n]

    def _first_row(self, part: Slice) -> int:
        """Return where the rows of a slice begin."""
        return int(np.searchsorted(self.ids, part.start)) if part.start else 0

    def deliver(self) -> None:
        """Set the rows of the out."""
        if self._direct:
            self._out.data, self._out.indices = self.rows, self.ids.copy()
        else:
            hand_over(self._out, self.rows, self.ids)


class CollectTable:
    """Collects a whole table, for dense and row-sparse outs."""

    def __init__(self, key: DistKey, dense: list[Array], sparse: list[RowSparseArray]) -> None:
        self._key, self._dense, self._sparse = key, dense, sparse
        self._found: dict[int, tuple[Ids, Array]] = {}
        self._absent: dict[int, tuple[int, Array]] = {}  # by first row of a slice: its end, and an absent row

    def __call__(self, part: Slice, record: Record, frames: Frames) -> bool:
        """Store the rows of one slice; the row with number `ABSENT` is the value of all absent rows."""
        ids, data = table_of(self._key, record, frames)
        first = int(len(ids) > 0 and ids[0] == ABSENT)
        self._found[part.start] = ids[first:].copy(), data[first:].copy()
        if first and self._dense:
            self._absent[part.start] = part.stop, data[0].copy()
        return True

    def deliver(self) -> None:
        """Join the slices in all outs."""
        ids = np.concatenate([self._found[start][0] for start in sorted(self._found)])
        data = np.concatenate([self._found[start][1] for start in sorted(self._found)])
        for out in self._dense:
            with np.errstate(all="ignore"):
                out[...] = 0
                for start, (stop, row) in self._absent.items():
                    out[start:stop] = row.astype(out.dtype, copy=False)
                out[ids] = data.astype(out.dtype, copy=False)
        for sparse in self._sparse:
            hand_over(sparse, data, ids)


class CollectStates:
    """Collects the optimizer's states of all keys, slice by slice."""

    def __init__(self) -> None:
        #: The states from the servers, by slice.
        self.found: dict[int, bytes] = {}

    def __call__(self, part: Slice, record: Record, frames: Frames) -> bool:
        """Store the state of one slice."""
        view = memoryview(frames[record.frame]).cast("B")
        self.found[part.id] = bytes(view[record.offset : record.offset + record.nbytes])
        return True


def aligned_elements(buffer: Any, offset: int, dtype: np.dtype[Any], count: int) -> Array:
    """View a payload as aligned elements; a copy if it is not aligned."""
    array = np.frombuffer(buffer, np.uint8, count * dtype.itemsize, offset)
    if array.ctypes.data % dtype.itemsize:
        array = array.copy()
    return array.view(dtype)


def table_of(key: DistKey, record: Record, frames: Frames) -> tuple[Ids, Array]:
    """View a payload as ids and rows, which lie in one frame, or in two."""
    ids = aligned_elements(frames[record.frame], record.offset, np.dtype(np.int64), record.rows)
    count = record.rows * key.row_size
    behind = record.offset + record.rows * 8
    together = memoryview(frames[record.frame]).nbytes >= record.offset + record.nbytes
    frame, offset = (record.frame, behind) if together else (record.frame + 1, 0)
    data = aligned_elements(frames[frame], offset, key.dtype, count) if count else np.empty(0, key.dtype)
    return ids, data.reshape(record.rows, *key.shape[1:])


def hand_over(out: RowSparseArray, rows: Array, ids: Ids) -> None:
    """Fill a row-sparse out; it may have another element type."""
    block = reserve_rows(out, len(ids))
    with np.errstate(all="ignore"):
        np.copyto(block, rows, casting="unsafe")
    out.data, out.indices = block, ids.copy()
