"""The steps of a worker, and how much of its communication the backward pass does not hide."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from ...counters import CALLS
from ...events import BUCKET, CALL, STEP, Event
from ...intervals import Times, common, union
from .model import JobProcess, name_of_call

_LONG = 3  # times the median


class Steps(NamedTuple):
    """The steps of a worker: begin and end of each, in ns, in order; and the events that count them."""

    times: Times
    source: str

    @property
    def median(self) -> float:
        """The seconds of a step."""
        return median(end - begin for begin, end in self.times) * 1e-9

    @property
    def usual(self) -> Times:
        """The steps that are not much longer than the median."""
        most = _LONG * median(end - begin for begin, end in self.times)
        return [(begin, end) for begin, end in self.times if end - begin <= most]

    @property
    def longest(self) -> tuple[int, int]:
        """The longest step."""
        return max(self.times, key=lambda one: one[1] - one[0])


def steps_of(process: JobProcess) -> Steps | None:
    """Find the steps of a worker: from one mark of a trainer or a hook to the next, else by its calls.

    Return None if it has too few events.
    """
    marks: dict[int, list[int]] = defaultdict(list)
    for event in process.spans(frozenset((STEP,))):
        marks[event.store].append(event.end)
    most = max(marks.values(), key=len, default=[])
    if times := _between(most):
        return Steps(times, "steps of the trainer or hook")
    return _by_calls(process)


def _between(marks: list[int]) -> Times:
    return [(begin, end) for begin, end in pairwise(sorted(marks)) if end > begin]


def _by_calls(process: JobProcess) -> Steps | None:
    """Find the call, with its key, that is made most often; a step lasts from one to the next."""
    calls: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for event in process.spans(frozenset((CALL,))):
        if event.slice < len(CALLS):
            calls[event.slice, event.store, event.round].append(event.begin)
    if not calls:
        return None
    verb, store, label = best = max(calls, key=lambda one: len(calls[one]))
    times = _between(calls[best])
    one = Event(0, 0, verb, label, 0, 0, 0, CALL, store)
    key = process.key_of(one)
    return Steps(times, name_of_call(one) + (f" of {key}" if key else "")) if times else None


@dataclass(frozen=True)
class Overlap:
    """Communication of gradients in a step: medians, in seconds."""

    communication: float  # while any bucket was being sent or summed
    exposed: float  # the part of it for which the step waited after the backward pass


def overlap_of(process: JobProcess, steps: Steps) -> Overlap | None:
    """Compare buckets with the ends of the steps; return None if there are no buckets."""
    buckets = process.spans(frozenset((BUCKET,)))
    if not buckets:
        return None
    busy = union((event.begin, event.end) for event in buckets)
    ends = union((event.begin, event.end) for event in process.spans(frozenset((STEP,))))
    return Overlap(_in_a_step(steps, busy), _in_a_step(steps, common(busy, ends)))


def _in_a_step(steps: Steps, times: Times) -> float:
    """Return the median over the steps of the seconds of these times."""
    in_each = dict.fromkeys(steps.times, 0)
    at = 0
    for begin, end in common(steps.times, times):
        while steps.times[at][1] <= begin:
            at += 1
        in_each[steps.times[at]] += end - begin
    return median(in_each.values()) * 1e-9
