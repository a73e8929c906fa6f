"""Whole jobs with the points on: small delays everywhere, late timers and clocks that jump change nothing."""

from __future__ import annotations

import pytest
from buggify import simulated

NIGHT, PORTION = 4000, 20


def portions() -> list[object]:
    """Return first seeds: one portion every time, many at night."""
    more = (pytest.param(first, marks=pytest.mark.nightly) for first in range(PORTION, NIGHT, PORTION * 9))
    return [0, *more]


@pytest.mark.parametrize("first", portions())
@pytest.mark.parametrize("kind", simulated.KINDS)
def test_jobs(kind: str, first: int) -> None:
    for seed in range(first, first + (PORTION if not first else PORTION * 9)):
        simulated.run(kind, seed)
