"""Gradient compression on the CPU: pytest-benchmark times it, and its rivals take turns with it.

``pytest bench/bench_compression.py`` does the cases that have a goal; with ``KVSTORE_BENCH_ALL=1`` all.
Rivals need the variables that README.md in this folder names. For figures to publish, run ``python -m bench
compression``: it takes more rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench.cases.compression import CompressionCase, all_cases
from bench.claims.compression import CLAIM
from bench.peers.compression.ours import Ours
from bench.peers.process import Process
from bench.runner import run, suites

CASES = suites.chosen(all_cases())


@pytest.fixture(scope="module")
def peers() -> Iterator[list[Process]]:
    with run.running(CLAIM, CLAIM.settings()) as processes:
        yield processes


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@pytest.mark.timeout(600)
def test_case(case: CompressionCase, peers: list[Process], turns: Any) -> None:
    result = turns.take(CLAIM, case, peers)
    turns.time_peer(Ours(), case, result.median("ours"))
