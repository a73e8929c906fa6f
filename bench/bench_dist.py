"""The parameter server: pytest-benchmark times it, and its rivals take turns with it for the ratios.

``pytest bench/bench_dist.py`` does the cases that have a goal, and with ``KVSTORE_BENCH_ALL=1`` all. Rivals
need the variables that README.md in this folder names. For figures to publish, run ``python -m bench dist``:
it has more rounds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.cases.dist import all_cases
from bench.claims.dist import CLAIM, FULL
from bench.runner import compiled, suites

CASES = suites.chosen(all_cases())

pytestmark = pytest.mark.skipif(compiled.compiler() is None, reason="needs a C compiler")


@pytest.mark.timeout(900)
def test_case(case: Any, peers: Any, turns: suites.Turns) -> None:
    turns.take(CLAIM, case, peers, replace(FULL, spare=0, turn=0.03))
    turns.time_group(peers[0], case, 10)
