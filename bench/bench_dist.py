"""The parameter server: pytest-benchmark times it, and its rivals take turns with it for the ratios.

``pytest bench/bench_dist.py`` does the cases that have a goal, and with ``KVSTORE_BENCH_ALL=1`` all. Rivals
need the variables that README.md in this folder names. For figures to publish, run ``python -m bench dist``:
it takes more rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bench.cases.dist import DistCase, all_cases
from bench.claims.dist import CLAIM, FULL
from bench.runner import compiled, run, suites

PLAN = replace(FULL, spare=0, turn=0.03)
CASES = suites.chosen(all_cases())
JOBS = list(dict.fromkeys(case.job for case in CASES))

pytestmark = pytest.mark.skipif(compiled.compiler() is None, reason="needs a C compiler")


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: "-".join(map(str, job)))
def peers(request: pytest.FixtureRequest) -> Iterator[Any]:
    together = [case for case in CASES if case.job == request.param]
    with run.running(CLAIM, CLAIM.settings(together)) as found:
        yield found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(case: DistCase, peers: Any, turns: Any, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["peers"] != case.job:
        pytest.skip("another job")
    turns.take(CLAIM, case, peers, PLAN)
    turns.time_group(peers[0], case, 10)
