"""Builds requests about the slices of one key: reads, and pushes of sums, packed or not, cut at slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ....arrays import pages
from ....arrays.sparse import RowSparseArray
from ....compression import Feedback
from ....kernels import cpu
from ....observe.counters import CONVERTING, SUMMING
from ...entry import Array
from ...rows import sum_rows
from ...update import kernel_sources
from ..protocol.messages import IN_PLACE, PACKED, PayloadLocation, Record, RecordKind, Slice
from ..protocol.payload_bytes import as_bytes
from .key_directory import DistKey
from .operations import PartRequest, Take
from .replies import FillOuts
from .shared_payloads import SharedPayload, SharedPayloads


class PushHeader(NamedTuple):
    """The common fields of all records of one push."""

    kind: RecordKind
    version: int = 0
    clock: int = 0


class RequestBuilder:
    """Builds requests with values."""

    def __init__(self, memory: SharedPayloads) -> None:
        self._memory = memory

    def dense_requests(
        self, key: DistKey, values: list[Array], head: PushHeader, take: FillOuts | None, divisor: int = 1
    ) -> Iterator[PartRequest]:
        """Send the sum of values, which servers divide; values must not change until all is answered."""
        shared = self._memory.put_sum(key, values, head.kind != RecordKind.ASSIGN)
        value = values[0] if shared is not None else self._sum_values(key, values)
        yield from self.placed_requests(key, value, head, take, shared, divisor)

    def _sum_values(self, key: DistKey, values: list[Array]) -> Array:
        """Return the sum of values; a single value itself."""
        if len(values) == 1:
            return values[0]
        total = pages.empty(key.shape, key.dtype)
        with self._memory.counters.during(SUMMING):
            cpu.reduce([(values, total, [])])
        return total

    def placed_requests(
        self,
        key: DistKey,
        value: Array,
        head: PushHeader,
        take: FillOuts | None,
        shared: SharedPayload | None,
        divisor: int = 1,
    ) -> Iterator[PartRequest]:
        """Push a value, in shared memory or in frames; it must not change until all is answered."""
        data = as_bytes(value) if shared is None else None
        coding = (cpu.DIVIDED, float(divisor)) if divisor > 1 else (0, 0.0)
        return self._cut_payload(key, data, key.dtype.itemsize * 8, head, take, shared, *coding)

    def packed_requests(
        self,
        key: DistKey,
        values: list[Array],
        head: PushHeader,
        take: FillOuts | None,
        feedback: Feedback,
        then: list[Callable[[], None]],
    ) -> Iterator[PartRequest]:
        """Send the sum of values as the codec packs it; a codec without kernels packs and unpacks it here.

        Functions that change residuals are added to `then`, to be called just before the requests are sent.
        """
        compiled = feedback.codec.compiled
        if compiled is None:
            with self._memory.counters.during(CONVERTING):
                pushed = feedback.total(key.key, values)
                restored = kernel_sources(pushed)
                assert isinstance(restored, list)
            then.append(pushed.keep)
            yield from self.dense_requests(key, restored, head, take)
            return
        feedback.prepare(key.key, key.shape)
        words = np.empty(cpu.encoded_bytes(compiled[0], key.size), np.uint8)
        then.append(partial(feedback.pack, key.key, values, words))
        yield from self.coded_requests(key, words, head, take, compiled)

    def coded_requests(
        self, key: DistKey, words: Array, head: PushHeader, take: FillOuts | None, codec: tuple[int, float]
    ) -> Iterator[PartRequest]:
        """Push bytes that a compiled codec has packed; they must not change until all is answered."""
        code, threshold = codec
        return self._cut_payload(
            key, as_bytes(words), cpu.coding_bits(code), head, take, None, code, threshold
        )

    def _cut_payload(
        self,
        key: DistKey,
        data: memoryview | None,
        bits: int,
        head: PushHeader,
        take: FillOuts | None,
        shared: SharedPayload | None,
        coding: int = 0,
        threshold: float = 0.0,
    ) -> Iterator[PartRequest]:
        """Cut a payload, of `bits` bits an element, at the key's slices, in frames or in shared memory."""
        nbytes = key.nbytes if data is None else len(data)
        last = len(key.parts) - 1
        lease = None if shared is None else shared.lease
        flag = _reply_flags(take, shared, coding)
        for index, part in enumerate(key.parts):
            start = part.start * bits // 8
            stop = nbytes if index == last else part.stop * bits // 8
            place, frame, offset = PayloadLocation.FRAME, 0, 0
            if shared is not None:
                place, frame, offset = PayloadLocation.SHARED, shared.segment, shared.offset + start
            record = Record(
                head.kind, part.id, 0, 0, head.version, head.clock, coding, threshold, -1,
                place, frame, offset, stop - start, flag,
            )  # fmt: skip
            payload = (lease,) if data is None else (data[start:stop],)
            back = 0 if take is None else (part.stop - part.start) * key.dtype.itemsize
            yield PartRequest(part.server, record, payload, take, part, back)

    def row_requests(
        self, key: DistKey, values: Sequence[RowSparseArray], head: PushHeader, take: FillOuts | None = None
    ) -> Iterator[PartRequest]:
        """Send the sum of row-sparse values; every slice gets a request, even without rows."""
        with self._memory.counters.during(SUMMING):
            total = values[0] if len(values) == 1 else sum_rows(list(values))
        ids, data = lines_of(key, total)
        for part, low, high in split_rows(key, ids):
            nbytes = (high - low) * (8 + key.line * key.dtype.itemsize)
            record = Record(
                head.kind, part.id, 0, 0, head.version, head.clock,
                rows=high - low, place=PayloadLocation.FRAME, nbytes=nbytes,
            )  # fmt: skip
            payload = (as_bytes(ids[low:high]), as_bytes(data[low:high]))
            yield PartRequest(part.server, record, payload, take, part)


def _reply_flags(take: FillOuts | None, shared: SharedPayload | None, coding: int) -> int:
    """Return the flags of a push: the kinds of reply that it allows."""
    if take is None:
        return 0
    if shared is not None:
        return IN_PLACE if shared.own and take.in_place else 0
    return PACKED if coding and coding != cpu.DIVIDED else 0


def lines_of(key: DistKey, rows: RowSparseArray) -> tuple[Array, Array]:
    """Return rows as lines of the key, with their ids: a row of a dense key may lie in several slices."""
    ids, lines = np.ascontiguousarray(rows.indices), key.row_size // max(key.line, 1)
    if lines > 1:
        ids = (ids[:, None] * lines + np.arange(lines)).reshape(-1)
    return ids, np.ascontiguousarray(rows.data).reshape(len(ids), key.line)


def split_rows(key: DistKey, ids: Array) -> Iterator[tuple[Slice, int, int]]:
    """Yield for each slice the range of its lines among sorted ids."""
    if len(key.parts) == 1:
        yield key.parts[0], 0, len(ids)
        return
    unit = 1 if key.sparse else key.line
    bounds = np.searchsorted(ids, [part.stop // unit for part in key.parts])
    low = 0
    for part, high in zip(key.parts, bounds.tolist(), strict=True):
        yield part, low, high
        low = high


def read_requests(key: DistKey, kind: RecordKind, take: Take) -> Iterator[PartRequest]:
    """Read every slice of a key, its value or its state, after the rounds that were pushed into."""
    flags = PACKED if isinstance(take, FillOuts) else 0
    for part in key.parts:
        back = (part.stop - part.start) * (key.row_size if key.sparse else 1) * key.dtype.itemsize
        yield PartRequest(part.server, Record(kind, part.id, 0, flags=flags), (), take, part, back)


def slice_requests(key: DistKey, kind: RecordKind) -> Iterator[PartRequest]:
    """Send every slice of a key a request without payload."""
    return (PartRequest(part.server, Record(kind, part.id, 0), (), None, part) for part in key.parts)


def state_requests(key: DistKey, states: Mapping[int, bytes], ordinal: int) -> Iterator[PartRequest]:
    """Write states of the optimizer with this ordinal to the slices of a key."""
    for part in key.parts:
        state = states[part.id]
        sent = Record(RecordKind.PUT_STATE, part.id, 0, version=ordinal)
        record = sent._replace(place=PayloadLocation.FRAME, nbytes=len(state))
        yield PartRequest(part.server, record, (state,), None, part)


def row_requests(key: DistKey, ids: Array, take: Take) -> Iterator[PartRequest]:
    """Read rows by their sorted ids; slices without any of them get no request."""
    for part, low, high in split_rows(key, ids):
        if high > low:
            record = Record(
                RecordKind.PULL_ROWS, part.id, 0,
                rows=high - low, place=PayloadLocation.FRAME, nbytes=(high - low) * 8,
            )  # fmt: skip
            back = (high - low) * key.row_size * key.dtype.itemsize
            yield PartRequest(part.server, record, (as_bytes(ids[low:high]),), take, part, back)
