"""The parameter server: pytest-benchmark times it, and its rivals take turns with it for the ratios.

``pytest bench/bench_dist.py`` does the cases that have a goal, and with ``KVSTORE_BENCH_ALL=1`` all. Rivals
need the variables that README.md in this folder names. For figures to publish, run ``python -m bench.dist``:
it takes more rounds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bench.cases import dist as dist_cases
from bench.cases.dist import DistCase
from bench.claims import dist, dist_table
from bench.peers.dist.group import DistGroup
from bench.runner import compiled, machine, table
from bench.runner.rounds import Measured

PLAN = replace(dist.FULL, spare=0, turn=0.03)
EVERYTHING = os.environ.get("KVSTORE_BENCH_ALL", "") not in ("", "0")
CASES = [case for case in dist_cases.all_cases() if EVERYTHING or case.goals]
JOBS = list(dict.fromkeys(case.job for case in CASES))

pytestmark = [
    pytest.mark.skipif(compiled.compiler() is None, reason="needs a C compiler"),
    pytest.mark.skipif(not dist.exists(), reason="kvstore has no parameter server here"),
]


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: "-".join(map(str, job)))
def peers(request: pytest.FixtureRequest) -> Iterator[list[DistGroup]]:
    together = [case for case in CASES if case.job == request.param]
    with dist.groups(dist.wanted(together)) as found:
        yield found


def tables(found: list[Measured]) -> Iterator[str]:
    yield table.markdown(dist_table.GOALS_HEAD, dist_table.goals(found))
    yield dist_table.everything(found)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(
    benchmark: Any,
    case: DistCase,
    peers: list[DistGroup],
    prober: machine.Prober,
    measured: list[Measured],
    request: pytest.FixtureRequest,
) -> None:
    if request.node.callspec.params["peers"] != case.job:
        pytest.skip("another job")
    result = dist.one(case, peers, PLAN, prober)
    assert result is not None
    assert not result.wrong
    measured.append(result)
    benchmark.extra_info["seconds"] = {column: result.median(column) for column in result.seconds}
    _time(benchmark, case, peers[0])


def _time(benchmark: Any, case: DistCase, ours: DistGroup) -> None:
    """Let pytest-benchmark time turns of our store; unlike in the tables, the orders are in it."""
    ours.start_prepare(case)
    reply = ours.finish_prepare()
    assert not isinstance(reply, str), reply
    benchmark.pedantic(ours.run, args=(reply[0][0], 10), rounds=5, warmup_rounds=1)
    ours.rest()
