"""Gradient compression on the CPU: pytest-benchmark times it, and its rivals take turns with it.

``pytest bench/bench_compression.py`` does the cases that have a goal; with ``KVSTORE_BENCH_ALL=1`` all. Name
the interpreter of MXNet's environment in ``KVSTORE_BENCH_MXNET`` to have that peer too. For figures to
publish, run ``python -m bench.compression``: it takes more rounds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from bench.cases import compression as compression_cases
from bench.cases.compression import CompressionCase
from bench.claims import compression, local
from bench.peers.compression.ours import Ours
from bench.peers.process import PeerProcess
from bench.runner import machine, table
from bench.runner.rounds import Measured, Plan, measure

PLAN = Plan(rounds=5, spare=0, turn=0.03)
EVERYTHING = os.environ.get("KVSTORE_BENCH_ALL", "") not in ("", "0")
CASES = [case for case in compression_cases.all_cases() if EVERYTHING or case.goals]


@pytest.fixture(scope="module")
def peers() -> Iterator[list[PeerProcess]]:
    with local.running(compression.settings(os.environ.get("KVSTORE_BENCH_MXNET", ""))) as processes:
        yield processes


def tables(found: list[Measured]) -> Iterator[str]:
    yield table.markdown(table.GOALS_HEAD, table.goals(found))
    yield table.markdown(table.everything_head(compression.PEERS), table.everything(found, compression.PEERS))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@pytest.mark.timeout(600)
def test_case(
    benchmark: Any,
    case: CompressionCase,
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
