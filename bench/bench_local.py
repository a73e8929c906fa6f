"""The store in one process: pytest-benchmark times it, and its rivals take turns with it for the ratios.

``pytest bench/bench_local.py`` does the cases that have a goal; with ``KVSTORE_BENCH_ALL=1`` it does all.
Name the interpreters of other environments in ``KVSTORE_BENCH_MXNET`` and ``KVSTORE_BENCH_TORCH`` to have
those peers too. For figures to publish, run ``python -m bench.local``: it takes more rounds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from bench.cases import local as cases
from bench.cases.local import Case
from bench.claims import local
from bench.peers.local.ours import Ours
from bench.peers.process import PeerProcess
from bench.runner import machine, table
from bench.runner.rounds import Measured, Plan, measure

PLAN = Plan(rounds=5, spare=0, turn=0.03)
EVERYTHING = os.environ.get("KVSTORE_BENCH_ALL", "") not in ("", "0")
CASES = [case for case in cases.all_cases() if EVERYTHING or case.goals or case.most_us]


@pytest.fixture(scope="module")
def peers() -> Iterator[list[PeerProcess]]:
    mxnet, torch = (os.environ.get(f"KVSTORE_BENCH_{name}", "") for name in ("MXNET", "TORCH"))
    with local.running(local.settings(mxnet, torch)) as processes:
        yield processes


def tables(found: list[Measured]) -> Iterator[str]:
    yield table.markdown(table.GOALS_HEAD, table.goals(found))
    yield table.markdown(table.everything_head(), table.everything(found))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(
    benchmark: Any,
    case: Case,
    peers: list[PeerProcess],
    prober: machine.Prober,
    measured: list[Measured],
) -> None:
    result = measure(case, peers, PLAN, prober)
    assert result is not None
    assert not result.wrong
    measured.append(result)
    benchmark.extra_info["peer over ours"] = {peer: result.ratio(peer) for peer in result.seconds}
    ours = Ours()
    ours.prepare(case)
    (call,) = ours.variants.values()
    rounds = max(5, min(1000, int(0.1 / result.median("ours"))))
    benchmark.pedantic(call, rounds=rounds, warmup_rounds=2)
    ours.release()
