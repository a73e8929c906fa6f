"""The store in one process: pytest-benchmark times it, and its rivals take turns with it for the ratios.

``pytest bench/bench_local.py`` does the cases that have a goal; with ``KVSTORE_BENCH_ALL=1`` it does all.
Rivals need the variables that README.md in this folder names. For figures to publish, run ``python -m bench
local``: it has more rounds.
"""

from __future__ import annotations

from typing import Any

from bench.cases.local import all_cases
from bench.claims.local import CLAIM
from bench.peers.local.ours import Ours
from bench.runner import suites

CASES = suites.chosen(all_cases())


def test_case(case: Any, peers: Any, turns: suites.Turns) -> None:
    result = turns.take(CLAIM, case, peers)
    turns.time_peer(Ours(), case, result.median("ours"))
