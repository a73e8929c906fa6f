"""Sums and means of arrays over the workers of a store, in place and without a key."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..arrays.element_types import HALVES, name_of
from ..arrays.means import check_mean, quotient
from ..errors import PeerLostError
from .meeting import ALL_REDUCE, REDUCED, AllSaid, Meetings, Said, check_same, heard_end
from .places import Place, place_of

if TYPE_CHECKING:
    from ..engine import Work

Array = npt.NDArray[Any]

_DESCRIBED = 96  # bytes; a longer description is compared by its hash


class Reduction:
    """The sums of one worker; with `survives` the loss of another worker is not an error."""

    def __init__(self, meetings: Meetings, survives: bool) -> None:
        self._meetings, self._survives = meetings, survives
        self._queued: list[Work] = []

    def run(self, arrays: Sequence[Any], average: bool) -> None:
        """Replace arrays by their sums or means over the workers."""
        self._meetings.wait()
        places = places_of(arrays, average)
        self._reduce(places, average)

    def start(self, arrays: Sequence[Any], average: bool) -> Work:
        """Start `run` in the background; the arrays belong to the store until the handle is done."""
        places = places_of(arrays, average)
        said, values = _said(places, average), [place.value for place in places]
        self._queued = [work for work in self._queued if not work.done()]
        if not self._queued and self._meetings.fits(said):
            return self._meetings.start(said, values, partial(self._end, places, average))
        reduce = partial(self._reduce, places, average)
        if not self._meetings.are_concurrent:  # all operations are in call order
            return self._meetings.run_now(reduce, "all_reduce")
        self._queued.append(self._meetings.queue(reduce, "all_reduce"))
        return self._queued[-1]

    def _reduce(self, places: list[Place], average: bool) -> None:
        with self._meetings.lock:
            self._reduce_alone(places, average)

    def _reduce_alone(self, places: list[Place], average: bool) -> None:
        said, values = _said(places, average), [place.value for place in places]
        heard = self._meetings.meet(said, values)
        if self._meetings.fits(said):
            self._end(places, average, heard)
            return
        check_same(heard)
        totals = self._sums(values, len(heard.present) if average else 1)
        if self._survives:
            self._check_present(heard.present)
        for place, total in zip(places, totals, strict=True):
            place.put(total)

    def _sums(self, values: list[Array], divisor: int) -> list[Array]:
        """Return the sums of long arrays, one round after the other for each element type."""
        totals: dict[int, Array] = {}
        by_type: dict[np.dtype[Any], list[int]] = {}
        for at, value in enumerate(values):
            by_type.setdefault(value.dtype, []).append(at)
        for numbers in by_type.values():
            flat = np.concatenate([quotient(values[at], divisor).reshape(-1) for at in numbers])
            self._meetings.sum(flat)
            ends = np.cumsum([values[at].size for at in numbers])[:-1]
            parts = np.split(flat, ends)
            totals.update(
                {at: part.reshape(values[at].shape) for at, part in zip(numbers, parts, strict=True)}
            )
        return [totals[at] for at in range(len(values))]

    def _check_present(self, before: list[int]) -> None:
        """Raise if a worker was lost in between: some sums contain its part, and others do not."""
        heard = self._meetings.meet(Said(REDUCED, b"", 0))
        gone = sorted(set(before) - set(heard_end(heard)))
        if gone:
            raise PeerLostError(
                f"worker {gone[0]} was lost during an all_reduce, which has changed no array: call it "
                "again, on all workers",
                rank=gone[0],
            )

    @staticmethod
    def _end(places: list[Place], average: bool, heard: AllSaid) -> None:
        """Sum the contents of the slots in the order of the ranks."""
        check_same(heard)
        at = 0
        contents = [heard.content(rank) for rank in heard.present]
        for place in places:
            value = place.value
            parts = [np.frombuffer(one, value.dtype, value.size, at) for one in contents]
            at += value.nbytes
            place.put(_total(parts, len(parts) if average else 1).reshape(value.shape))


def places_of(arrays: Sequence[Any], average: bool) -> list[Place]:
    """Return the places of arrays that are summed or averaged."""
    places = [place_of(array, at, len(arrays)) for at, array in enumerate(arrays)]
    for place in places if average else ():
        check_mean(place.value.dtype, place.what)
    return places


def _said(places: Sequence[Place], average: bool) -> Said:
    kinds = [(place.value.dtype, place.value.shape) for place in places]
    return Said(ALL_REDUCE, _described(average, *kinds), sum([place.value.nbytes for place in places]))


@lru_cache(maxsize=256)
def _described(average: bool, *kinds: tuple[np.dtype[Any], tuple[int, ...]]) -> bytes:
    """Encode the element types and shapes of the arrays, in few bytes."""
    named = "; ".join(f"{dtype.name} {shape}" for dtype, shape in kinds)
    text = ((f"average of {named}") if average else named).encode()
    if len(text) > _DESCRIBED:
        text = text[: _DESCRIBED - 12] + b"... %08x" % zlib.crc32(text)
    return text


def _total(parts: list[Array], divisor: int) -> Array:
    """Sum flat arrays from left to right; those of 16-bit floats in float32."""
    if divisor > 1:
        parts = [quotient(part, divisor) for part in parts]
    dtype = parts[0].dtype
    total = parts[0].astype(np.float32 if name_of(dtype) in HALVES else dtype)
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            total += part
        return total.astype(dtype, copy=False)
