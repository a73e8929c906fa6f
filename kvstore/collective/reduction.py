"""Sums and means of arrays over the workers of a store, in place and without a key."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..arrays.element_types import HALVES, name_of
from ..arrays.means import check_mean, divided_array
from ..errors import PeerLostError
from .meeting import (
    ALL_REDUCE,
    REDUCED,
    MeetingMessage,
    MeetingMessages,
    WorkerMeetings,
    check_same,
    ranks_at_end,
)
from .operands import ReductionOperand, operand_of

if TYPE_CHECKING:
    from ..engine import Work

Array = npt.NDArray[Any]

_DESCRIBED = 96  # bytes; a longer description is compared by its hash


class ArrayReduction:
    """The sums of one worker; with `survives` the loss of another worker is not an error."""

    def __init__(self, meetings: WorkerMeetings, survives: bool) -> None:
        self._meetings, self._survives = meetings, survives
        self._queued: list[Work] = []

    def run(self, arrays: Sequence[Any], average: bool) -> None:
        """Replace arrays by their sums or means over the workers."""
        self._meetings.wait()
        operands = operands_of(arrays, average)
        self._reduce_operands(operands, average)

    def start(self, arrays: Sequence[Any], average: bool) -> Work:
        """Start `run` in the background; the arrays belong to the store until the handle is done."""
        operands = operands_of(arrays, average)
        said, values = _message_of(operands, average), [operand.value for operand in operands]
        self._queued = [work for work in self._queued if not work.done()]
        if not self._queued and self._meetings.fits_slot(said):
            return self._meetings.start_meeting(said, values, partial(self._sum_slots, operands, average))
        reduce = partial(self._reduce_operands, operands, average)
        if not self._meetings.are_concurrent:  # all operations are in call order
            return self._meetings.run_now(reduce, "all_reduce")
        self._queued.append(self._meetings.queue_run(reduce, "all_reduce"))
        return self._queued[-1]

    def _reduce_operands(self, operands: list[ReductionOperand], average: bool) -> None:
        with self._meetings.lock:
            self._reduce_alone(operands, average)

    def _reduce_alone(self, operands: list[ReductionOperand], average: bool) -> None:
        said, values = _message_of(operands, average), [operand.value for operand in operands]
        heard = self._meetings.exchange_messages(said, values)
        if self._meetings.fits_slot(said):
            self._sum_slots(operands, average, heard)
            return
        check_same(heard)
        totals = self._sum_long(values, len(heard.present) if average else 1)
        if self._survives:
            self._check_present(heard.present)
        for operand, total in zip(operands, totals, strict=True):
            operand.put(total)

    def _sum_long(self, values: list[Array], divisor: int) -> list[Array]:
        """Return the sums of long arrays, one round after the other for each element type."""
        totals: dict[int, Array] = {}
        by_type: dict[np.dtype[Any], list[int]] = {}
        for at, value in enumerate(values):
            by_type.setdefault(value.dtype, []).append(at)
        for numbers in by_type.values():
            flat = np.concatenate([divided_array(values[at], divisor).reshape(-1) for at in numbers])
            self._meetings.sum_flat(flat)
            ends = np.cumsum([values[at].size for at in numbers])[:-1]
            parts = np.split(flat, ends)
            totals.update(
                {at: part.reshape(values[at].shape) for at, part in zip(numbers, parts, strict=True)}
            )
        return [totals[at] for at in range(len(values))]

    def _check_present(self, before: list[int]) -> None:
        """Raise if a worker was lost in between: some sums contain its part, and others do not."""
        heard = self._meetings.exchange_messages(MeetingMessage(REDUCED, b"", 0))
        gone = sorted(set(before) - set(ranks_at_end(heard)))
        if gone:
            raise PeerLostError(
                f"worker {gone[0]} was lost during an all_reduce, which has changed no array: call it "
                "again, on all workers",
                rank=gone[0],
            )

    @staticmethod
    def _sum_slots(operands: list[ReductionOperand], average: bool, heard: MeetingMessages) -> None:
        """Sum the contents of the slots in the order of the ranks."""
        check_same(heard)
        at = 0
        contents = [heard.content(rank) for rank in heard.present]
        for operand in operands:
            value = operand.value
            parts = [np.frombuffer(one, value.dtype, value.size, at) for one in contents]
            at += value.nbytes
            operand.put(_flat_total(parts, len(parts) if average else 1).reshape(value.shape))


def operands_of(arrays: Sequence[Any], average: bool) -> list[ReductionOperand]:
    """Return the operands of arrays that are summed or averaged."""
    operands = [operand_of(array, at, len(arrays)) for at, array in enumerate(arrays)]
    for operand in operands if average else ():
        check_mean(operand.value.dtype, operand.what)
    return operands


def _message_of(operands: Sequence[ReductionOperand], average: bool) -> MeetingMessage:
    kinds = [(operand.value.dtype, operand.value.shape) for operand in operands]
    return MeetingMessage(
        ALL_REDUCE, _encoded_types(average, *kinds), sum([operand.value.nbytes for operand in operands])
    )


@lru_cache(maxsize=256)
def _encoded_types(average: bool, *kinds: tuple[np.dtype[Any], tuple[int, ...]]) -> bytes:
    """Encode the element types and shapes of the arrays, in few bytes."""
    named = "; ".join(f"{dtype.name} {shape}" for dtype, shape in kinds)
    text = ((f"average of {named}") if average else named).encode()
    if len(text) > _DESCRIBED:
        text = text[: _DESCRIBED - 12] + b"... %08x" % zlib.crc32(text)
    return text


def _flat_total(parts: list[Array], divisor: int) -> Array:
    """Sum flat arrays from left to right; those of 16-bit floats in float32."""
    if divisor > 1:
        parts = [divided_array(part, divisor) for part in parts]
    dtype = parts[0].dtype
    total = parts[0].astype(np.float32 if name_of(dtype) in HALVES else dtype)
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            total += part
        return total.astype(dtype, copy=False)
