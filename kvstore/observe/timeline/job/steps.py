"""The steps of a worker, and how much of its communication the backward pass does not hide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from ...counters import CALLS
from ...events import BUCKET, CALL, STEP
from .activity import common, union
from .model import JobEvent, JobProcess, name_of_call


class Steps(NamedTuple):
    """The steps of a worker.

    Attributes
    ----------
    times : list of tuple
        Begin and end of each, in ns.
    source : str
        What they are counted by.
    """

    times: list[tuple[int, int]]
    source: str

    @property
    def begin(self) -> int:
        """Of the first one."""
        return self.times[0][0]

    @property
    def end(self) -> int:
        """Of the last one."""
        return self.times[-1][1]

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return median(end - begin for begin, end in self.times) * 1e-9


def steps_of(process: JobProcess) -> Steps | None:
    """Find the steps of a worker: from one mark of a trainer or a hook to the next, else by its calls.

    None: there are too few events to tell.
    """
    marks: dict[int, list[int]] = defaultdict(list)
    for event in process.spans(frozenset((STEP,))):
        marks[event.store].append(event.end)
    most = max(marks.values(), key=len, default=[])
    if times := _between(most):
        return Steps(times, "steps of the trainer or hook")
    return _by_calls(process)


def _between(marks: list[int]) -> list[tuple[int, int]]:
    return [(begin, end) for begin, end in pairwise(sorted(marks)) if end > begin]


def _by_calls(process: JobProcess) -> Steps | None:
    """Take the call, with its key, that is made most often; from one to the next is a step."""
    calls: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for event in process.spans(frozenset((CALL,))):
        if event.slice < len(CALLS):
            calls[event.slice, event.store, event.round].append(event.begin)
    if not calls:
        return None
    verb, store, label = best = max(calls, key=lambda one: len(calls[one]))
    times = _between(calls[best])
    one = JobEvent(0, 0, verb, label, 0, 0, 0, CALL, store)
    key = process.key_of(one)
    return Steps(times, name_of_call(one) + (f" of {key}" if key else "")) if times else None


class Overlap(NamedTuple):
    """Communication of gradients of a step: medians, in seconds.

    Attributes
    ----------
    communication : float
        While any bucket was under way.
    exposed : float
        Of this, the time for which the step waited after the backward pass.
    """

    communication: float
    exposed: float


def overlap_of(process: JobProcess, steps: Steps) -> Overlap | None:
    """Compare buckets with the ends of the steps; None: there are no buckets."""
    buckets = process.spans(frozenset((BUCKET,)))
    ends = union((event.begin, event.end) for event in process.spans(frozenset((STEP,))))
    if not buckets or not ends:
        return None
    busy = union((event.begin, event.end) for event in buckets)
    whole = [common([step], busy) for step in steps.times]
    open_ = [common([step], union(_within(step, busy, ends))) for step in steps.times]
    return Overlap(median(whole) * 1e-9, median(open_) * 1e-9)


def _within(
    step: tuple[int, int], busy: list[tuple[int, int]], ends: list[tuple[int, int]]
) -> Iterable[tuple[int, int]]:
    """Yield the times of one step in which a bucket is under way and the step waits."""
    for begin, end in ends:
        if end > step[0] and begin < step[1]:
            for b, e in busy:
                if e > begin and b < end:
                    yield max(b, begin), min(e, end)
