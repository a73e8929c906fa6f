"""A window takes each number once, however they come, and stays small."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.stores.parameter_server.protocol.duplicate_filter import SPAN, DuplicateFilter


@given(st.lists(st.integers(1, 40), max_size=200))
def test_each_number_is_taken_once(numbers: list[int]) -> None:
    window = DuplicateFilter()
    taken = [number for number in numbers if window.take(number)]
    assert sorted(taken) == sorted(set(numbers))
    assert all(number in window for number in numbers)
    assert {one for one in range(1, 41) if one in window} == set(numbers)


@given(st.permutations(range(1, 60)))
def test_nothing_is_kept_once_the_gaps_are_filled(numbers: list[int]) -> None:
    window = DuplicateFilter()
    for number in numbers:
        assert window.take(number)
    assert (window.low, window.above) == (59, set())


def test_far_ahead_does_not_fit() -> None:
    window = DuplicateFilter()
    assert window.fits(SPAN)
    assert not window.fits(SPAN + 1)
    assert window.take(1)
    assert window.fits(SPAN + 1)


@given(st.sets(st.integers(1, 30)), st.sets(st.integers(1, 30)))
def test_without_forgets_exactly_those(come: set[int], waiting: set[int]) -> None:
    window = DuplicateFilter()
    for number in come:
        window.take(number)
    low, above = window.without(waiting & come)
    again = DuplicateFilter(low, above)
    assert {one for one in range(1, 31) if one in again} == come - waiting
