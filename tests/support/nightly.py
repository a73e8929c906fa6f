"""Which cases of a test run every time, and which are for the night."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def nightly_unless(every_time: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """Mark the cases that do not run every time; a case is a tuple of parameters, or the only one."""
    return [
        pytest.param(*case, marks=() if every_time(*case) else pytest.mark.nightly)
        for case in (one if type(one) is tuple else (one,) for one in cases)
    ]


def each_once(*parameters: Sequence[Any]) -> list[Any]:
    """Build the product of parameters: every time each value runs at least once, the rest at night."""
    longest = max(map(len, parameters))
    chosen = {tuple(i % len(values) for values in parameters) for i in range(longest)}
    cases = itertools.product(*(range(len(values)) for values in parameters))
    return [
        pytest.param(
            *(values[i] for values, i in zip(parameters, case, strict=True)),
            marks=() if case in chosen else pytest.mark.nightly,
        )
        for case in cases
    ]


def portions(count: int) -> pytest.MarkDecorator:
    """Repeat a test that draws its cases: every time one portion of them, at night so many."""
    return pytest.mark.parametrize("portion", nightly_unless(lambda portion: not portion, range(count)))
