"""The store between processes: pytest-benchmark times it, and its rivals take turns with it for the ratios.

``pytest bench/bench_shared.py`` does the cases of two processes that have a goal, and with
``KVSTORE_BENCH_ALL=1`` all. Rivals need the variables that README.md in this folder names. For figures to
publish, run ``python -m bench.shared``: it takes more rounds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from bench.cases import shared as shared_cases
from bench.cases.shared import SharedCase
from bench.claims import shared, shared_table
from bench.peers.group.driver import Group
from bench.runner import compiled, machine, table
from bench.runner.rounds import Measured, Plan

PLAN = Plan(rounds=5, spare=0, turn=0.03)
EVERYTHING = os.environ.get("KVSTORE_BENCH_ALL", "") not in ("", "0")
WORKERS = (2, 4) if EVERYTHING else (2,)
CASES = [c for c in shared_cases.all_cases(WORKERS) if EVERYTHING or c.goals or c.tail]

pytestmark = pytest.mark.skipif(compiled.compiler() is None, reason="needs a C compiler")


@pytest.fixture(scope="module", params=WORKERS, ids=lambda n: f"{n} processes")
def peers(request: pytest.FixtureRequest) -> Iterator[list[Group]]:
    with shared.groups(shared.settings(request.param)) as found:
        yield found


def tables(found: list[Measured]) -> Iterator[str]:
    yield table.markdown(shared_table.GOALS_HEAD, shared_table.goals(found))
    yield shared_table.everything(found)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(
    benchmark: Any,
    case: SharedCase,
    peers: list[Group],
    prober: machine.Prober,
    measured: list[Measured],
) -> None:
    if peers[0].setting.processes != case.processes:
        pytest.skip("the other number of processes")
    result = shared.one(case, peers, PLAN, prober)
    assert result is not None
    assert not result.wrong
    measured.append(result)
    benchmark.extra_info["peer over ours"] = {peer: result.ratio(peer) for peer in result.seconds}
    _time(benchmark, case, peers[0])


def _time(benchmark: Any, case: SharedCase, ours: Group) -> None:
    """Let pytest-benchmark time turns of our store; unlike in the tables, the orders are in it."""
    ours.start_prepare(case)
    reply = ours.finish_prepare()
    assert not isinstance(reply, str), reply
    variant = reply[0][0]
    benchmark.pedantic(ours.run, args=(variant, 10 * case.links), rounds=5, warmup_rounds=1)
    ours.rest()
