"""Names of the counters of `native.Counters`, and their numbers as a caller reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .native._observe import BUCKETS

#: In the order of the enumerations of native/counters.h.
CALLS = ("init", "push", "pull", "pushpull", "row_sparse_pull", "barrier")
WAYS = ("memory", "shared", "stream", "frame")
PHASES = ("waiting", "moving", "summing", "updating", "converting")

WAITING, MOVING, SUMMING, UPDATING, CONVERTING = range(len(PHASES))
MEMORY, SHARED, STREAM, FRAME = range(len(WAYS))


class Seconds(NamedTuple):
    """Seconds that a store has spent in each of its phases, while they were measured.

    Attributes
    ----------
    waiting : float
        For other processes, or for memory of a round that other workers still read.
    moving : float
        In copies of values, and in calls that send and receive them.
    summing : float
        In sums, and in copies that are part of them.
    updating : float
        In updates of weights, with the sums of the same pass over memory.
    converting : float
        In encoding and decoding of compressed gradients.
    """

    waiting: float
    moving: float
    summing: float
    updating: float
    converting: float


class Transferred(NamedTuple):
    """Bytes of values by the way on which they were sent or received.

    Attributes
    ----------
    memory : int
        Inside of this process.
    shared : int
        In memory that processes of this machine share.
    stream : int
        Over connections for data.
    frame : int
        In messages of ZeroMQ, or by the engine of a collective store.
    """

    memory: int
    shared: int
    stream: int
    frame: int


class Waits(NamedTuple):
    """Distribution of the lengths of waits, while they were measured.

    Attributes
    ----------
    waits : int
        Their number.
    median, p90, p99 : float
        Seconds, within 25 %; 0 if there were none.
    """

    waits: int
    median: float
    p90: float
    p99: float


def seconds_of(numbers: dict[str, Any]) -> Seconds:
    """Return the times in the numbers that `Counters.read` or `read_page` returned."""
    return Seconds(*(one * 1e-9 for one in numbers["ns"]))


def waits_of(numbers: dict[str, Any]) -> Waits:
    """Return the waits in the numbers that `Counters.read` or `read_page` returned."""
    counts = numbers["waits"]
    return Waits(sum(counts), *(quantile(counts, part) for part in (0.5, 0.9, 0.99)))


def quantile(counts: Sequence[int], part: float) -> float:
    """Return the seconds that `part` of all waits did not exceed, from the counts of the buckets."""
    wanted, seen = part * sum(counts), 0
    for bucket, count in enumerate(counts):
        seen += count
        if count and seen >= wanted:
            return end_of(bucket)
    return 0.0


def end_of(bucket: int) -> float:
    """Return the seconds at which a bucket of waits ends: four for each power of two, from 256 ns on."""
    if not 0 <= bucket < BUCKETS:
        raise ValueError(f"there are {BUCKETS} buckets, and no bucket {bucket}")
    if bucket < 4:
        return (bucket + 1) * 256e-9
    power, quarter = divmod(bucket, 4)
    return (5 + quarter) * 2.0 ** (power - 1) * 256e-9
