"""Reads of one round."""

from __future__ import annotations

from .mutant import READS, Mutant

READS = [
    Mutant(
        "reads",
        READS,
        "        last = min(rounds[key])\n",
        "        last = max(rounds[key])\n",
        "the last round need not be whole",
        "tests/stores/parameter_server/worker/test_consistent_rounds.py",
    ),
    Mutant(
        "reads",
        READS,
        "            if all(min(rounds[one]) >= pushes",
        "            if all(max(rounds[one]) >= pushes",
        "a round is taken for whole that is not",
    ),
    Mutant(
        "reads",
        READS,
        "            if all(min(rounds[one]) >= pushes for",
        "            if any(min(rounds[one]) >= pushes for",
        "one key of a call is enough",
    ),
    Mutant("reads", READS, "if round < last]", "if False]", "no slice is behind"),
]
