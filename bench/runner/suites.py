"""Code of all suites of pytest-benchmark: the choice of cases, turns for the ratios, times of kvstore."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from bench.peers.base import Peer
from bench.peers.group.driver import Group
from bench.runner import machine, run
from bench.runner.claim import Claim
from bench.runner.rounds import Measured, Plan

PLAN = Plan(rounds=5, spare=0, turn=0.03)
EVERYTHING = os.environ.get("KVSTORE_BENCH_ALL", "") not in ("", "0")


def chosen(cases: Iterable[Any]) -> list[Any]:
    """Return the cases that have a goal, or all."""
    return [case for case in cases if EVERYTHING or run.has_goal(case)]


class Turns:
    """Measures peers in turn, and keeps the results."""

    def __init__(self, found: list[Measured], benchmark: Any, prober: machine.Prober) -> None:
        self._found, self._benchmark, self._prober = found, benchmark, prober

    def take(self, claim: Claim, case: Any, peers: Sequence[Group], plan: Plan = PLAN) -> Measured:
        """Measure a case with all peers."""
        result = run.one(claim, case, peers, plan, self._prober)
        assert result is not None
        assert not result.wrong
        self._found.append(result)
        self._benchmark.extra_info["seconds"] = {peer: result.median(peer) for peer in result.seconds}
        return result

    def time_peer(self, ours: Peer, case: Any, seconds: float) -> None:
        """Time calls of kvstore in this process by pytest-benchmark."""
        ours.prepare(case)
        (call,) = ours.variants.values()
        self._benchmark.pedantic(call, rounds=max(5, min(1000, int(0.1 / seconds))), warmup_rounds=2)
        ours.release()

    def time_group(self, ours: Group, case: Any, calls: int) -> None:
        """Time turns of kvstore by pytest-benchmark; these times include the requests of the bench."""
        ours.start_prepare(case)
        reply = ours.finish_prepare()
        assert not isinstance(reply, str), reply
        self._benchmark.pedantic(ours.run, args=(reply[0][0], calls), rounds=5, warmup_rounds=1)
        ours.rest()
