"""Intervals of time."""

from __future__ import annotations

from collections.abc import Iterable

#: Pairs of begin and end, in order and disjoint.
Times = list[tuple[int, int]]


def union(spans: Iterable[tuple[int, int]]) -> Times:
    """Return the times that at least one of the spans covers."""
    found: Times = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def common(one: Times, other: Times) -> Times:
    """Return the times that are in both."""
    found: Times = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(times: Times) -> int:
    """Return the sum of their lengths."""
    return sum(end - begin for begin, end in times)
