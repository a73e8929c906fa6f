"""Gradient compression on the CPU: pytest-benchmark times it, and its rivals take turns with it.

``pytest bench/bench_compression.py`` does the cases that have a goal; with ``KVSTORE_BENCH_ALL=1`` all.
Rivals need the variables that README.md in this folder names. For figures to publish, run ``python -m bench
compression``: it has more rounds.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench.cases.compression import all_cases
from bench.claims.compression import CLAIM
from bench.peers.compression.ours import Ours
from bench.runner import suites

CASES = suites.chosen(all_cases())


@pytest.mark.timeout(600)
def test_case(case: Any, peers: Any, turns: suites.Turns) -> None:
    result = turns.take(CLAIM, case, peers)
    turns.time_peer(Ours(), case, result.median("ours"))
