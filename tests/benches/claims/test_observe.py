"""The interval of a median."""

from __future__ import annotations

import pytest

from bench.claims.observe import interval_of_median


@pytest.mark.parametrize(("n", "rank"), [(1, 1), (5, 1), (6, 1), (9, 2), (12, 3), (20, 6), (40, 14)])
def test_ranks_are_those_of_the_sign_test(n: int, rank: int) -> None:
    """As tables of the sign test at 5 % have them; below six values there are none."""
    low, high = interval_of_median([float(value) for value in reversed(range(1, n + 1))])
    assert (low, high) == (rank, n + 1 - rank)
