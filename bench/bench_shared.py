"""The store between processes: pytest-benchmark times it, and its rivals take turns with it for the ratios.

``pytest bench/bench_shared.py`` does the cases of two processes that have a goal, and with
``KVSTORE_BENCH_ALL=1`` all. Rivals need the variables that README.md in this folder names. For figures to
publish, run ``python -m bench shared``: it has more rounds.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench.cases.shared import all_cases
from bench.claims.shared import CLAIM
from bench.runner import compiled, suites

CASES = suites.chosen(all_cases((2, 4) if suites.EVERYTHING else (2,)))

pytestmark = pytest.mark.skipif(compiled.compiler() is None, reason="needs a C compiler")


@pytest.mark.timeout(900)
def test_case(case: Any, peers: Any, turns: suites.Turns) -> None:
    turns.take(CLAIM, case, peers)
    turns.time_group(peers[0], case, 10 * case.links)
