"""Spans of one thread are nested in a trace, for any spans."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvstore.observe.counters import MOVING, WAITING
from kvstore.observe.events import CALL, Event
from kvstore.observe.intervals import common, length, union
from kvstore.observe.timeline.job.spans import cut_segments, nested_lanes

_TIMES = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair)))


def span(begin: int, end: int, kind: int = WAITING) -> Event:
    return Event(begin, end, 0, 0, 0, 1, 0, kind, 0)


def sorted_spans(times: list[tuple[int, int]]) -> list[Event]:
    return sorted((span(*one) for one in times), key=lambda one: (one.begin, -one.end))


def are_nested(one: Event, other: Event) -> bool:
    beside = one.end <= other.begin or other.end <= one.begin
    within = (one.begin <= other.begin and other.end <= one.end) or (
        other.begin <= one.begin and one.end <= other.end
    )
    return beside or within


@given(st.lists(_TIMES, max_size=30))
def test_each_span_of_a_lane_lies_within_another_or_beside_it(times: list[tuple[int, int]]) -> None:
    spans = sorted_spans(times)
    found = nested_lanes(spans)
    assert sorted(one.event for lane in found for one in lane) == sorted(spans)
    for lane in found:
        assert all(are_nested(one.event, other.event) for one, other in combinations(lane, 2))


@given(st.lists(_TIMES, max_size=30))
def test_nested_spans_need_one_lane(times: list[tuple[int, int]]) -> None:
    kept: list[tuple[int, int]] = []
    for one in times:
        if all(are_nested(span(*one), span(*other)) for other in kept):
            kept.append(one)
    assert len(nested_lanes(sorted_spans(kept))) == bool(kept)


@given(st.lists(_TIMES, max_size=20))
def test_segments_are_disjoint_and_cover_all_spans(times: list[tuple[int, int]]) -> None:
    spans = sorted_spans(times)
    found = list(cut_segments(spans))
    for (begin, end, _), (after, _, _) in pairwise(found):
        assert begin < end <= after
    whole = union((one.begin, one.end) for one in spans)
    assert sum(end - begin for begin, end, _ in found) == sum(end - begin for begin, end in whole)
    for begin, end, event in found:
        assert event.begin <= begin and end <= event.end
        later = [other for other in spans if other.begin > event.begin and other.ns]
        assert not any(other.begin < end and begin < other.end for other in later)


@given(st.lists(_TIMES, max_size=10), st.lists(_TIMES, max_size=10))
def test_common_time(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    def moments(times: list[tuple[int, int]]) -> set[int]:
        return {at for begin, end in times for at in range(begin, end)}

    assert moments(common(union(one), union(other))) == moments(one) & moments(other)
    assert length(union(one)) == len(moments(one))


def test_a_span_knows_the_call_in_which_it_lies() -> None:
    (lane,) = nested_lanes(
        [span(0, 10, CALL), span(1, 4, MOVING), span(4, 9, WAITING), span(5, 6, MOVING), span(12, 13, CALL)]
    )
    assert [one.call and one.call.begin for one in lane] == [None, 0, 0, 0, None]
