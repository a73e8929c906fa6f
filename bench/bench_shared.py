"""The store between processes: pytest-benchmark times it, and its rivals take turns with it for the ratios.

``pytest bench/bench_shared.py`` does the cases of two processes that have a goal, and with
``KVSTORE_BENCH_ALL=1`` all. Rivals need the variables that README.md in this folder names. For figures to
publish, run ``python -m bench shared``: it takes more rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench.cases.shared import SharedCase, all_cases
from bench.claims.shared import CLAIM
from bench.runner import compiled, run, suites

WORKERS = (2, 4) if suites.EVERYTHING else (2,)
CASES = suites.chosen(all_cases(WORKERS))

pytestmark = pytest.mark.skipif(compiled.compiler() is None, reason="needs a C compiler")


@pytest.fixture(scope="module", params=WORKERS, ids=lambda n: f"{n} processes")
def peers(request: pytest.FixtureRequest) -> Iterator[Any]:
    together = [case for case in CASES if case.processes == request.param]
    with run.running(CLAIM, CLAIM.settings(together)) as found:
        yield found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(case: SharedCase, peers: Any, turns: Any) -> None:
    if peers[0].setting.processes != case.processes:
        pytest.skip("the other number of processes")
    turns.take(CLAIM, case, peers)
    turns.time_group(peers[0], case, 10 * case.links)
