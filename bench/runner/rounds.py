"""Interleaved measurement: each peer has one turn in each round; ratios are taken within a round."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.peers.group.driver import Group
from bench.runner.machine import Others, Probe
from kvstore.observe.bench.rounds import PeerWay, best_ways, close_ways, in_turn, round_ratios

BUSY = 0.10  # a round in which other processes used more than this share of the processors is repeated
CLOSE = 1.25  # variants are kept if they are slower than the peer's best by at most this factor,
FIELD = 2  # and usually at most this number of them
_NOTED = ("seconds", "tails", "cpu", "moved")  # figures of a contender in each round


@dataclass(frozen=True)
class Plan:
    """How long to measure."""

    rounds: int = 7  # interleaved rounds; each gives one ratio for every peer
    spare: int = 3  # rounds that may be added to replace disturbed ones
    patience: float = 12.0  # seconds after which no round is added any more
    #: Seconds that a turn of one variant should take; at least `least` calls are made, at most `most`
    turn: float = 0.06
    least: int = 3
    most: int = 10_000
    field: int = FIELD  # the most variants that are kept in one column
    warm: int = 2  # calls before those from which the speed of a variant is estimated


class Contender(PeerWay):
    """One variant of one peer's process.

    It has, for each round, the median seconds, the 99th percentile, the processor seconds of a call, and the
    bytes of a call on the busiest link.
    """

    def __init__(self, process: Group, variant: str) -> None:
        super().__init__(process.column(variant), variant, partial(process.run, variant))
        self.process = process
        self.tails: list[float] = []
        self.cpu: list[float] = []
        self.moved: list[float] = []

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.process.setting.label, self.name)))

    def measure(self) -> None:
        """Measure a turn, after calls that fill the caches again."""
        times = self.measure_turn(max(1, self.calls // 10))
        self.tails.append(sorted(times)[int(0.99 * len(times))])
        self.cpu.append(self.process.cpu)
        self.moved.append(self.process.moved)


@dataclass
class Measured:
    """The results of a case: the best variant of each column, its seconds, and the state of the machine."""

    case: Any
    seconds: dict[str, list[float]]
    variants: dict[str, str]
    probes: list[Probe]
    others: list[float]
    wrong: list[str] = field(default_factory=list)
    tails: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    moved: dict[str, list[float]] = field(default_factory=dict)

    def ratios(self, peer: str) -> list[float]:
        """Return the time of `peer` ÷ that of kvstore, by round."""
        return round_ratios(self.seconds[peer], self.seconds["ours"])

    def ratio(self, peer: str) -> float:
        return statistics.median(self.ratios(peer))

    def median(self, peer: str) -> float:
        return statistics.median(self.seconds[peer])

    @property
    def disturbed(self) -> int:
        """Return the number of rounds in which other processes were busy."""
        return sum(share > BUSY for share in self.others)


def measure(case: Any, peers: Sequence[Group], plan: Plan, probe: Callable[[], Probe]) -> Measured | None:
    """Measure one case with all peers that support it; None if none does."""
    ready, wrong = _prepare(case, peers)
    contenders = [c for process, variants in ready for c in _contenders(process, variants, plan)]
    if not contenders:
        return None
    contenders = close_ways(contenders, CLOSE, plan.field)
    probes, shares = _race(contenders, plan, probe)
    found = best_ways(contenders)
    variants = {one.peer: one.label for one in found}
    noted = ({one.peer: getattr(one, name) for one in found} for name in _NOTED)
    seconds, *more = noted
    return Measured(case, seconds, variants, probes, shares, wrong, *more)


def _prepare(case: Any, peers: Sequence[Group]) -> tuple[list[tuple[Group, list[str]]], list[str]]:
    """Prepare all peers concurrently, and compare the results of their first calls."""
    for peer in peers:
        peer.start_prepare(case)
    ready, wrong = [], []
    expected: list[float] = []
    for peer in peers:
        reply = peer.finish_prepare()
        if isinstance(reply, str):
            continue
        variants, digest = reply
        ready.append((peer, variants))
        expected = expected or digest
        if digest and not _alike(expected, digest):
            wrong.append(peer.setting.name)
    return ready, wrong


def _alike(a: list[float], b: list[float]) -> bool:
    def close(x: float, y: float) -> bool:
        return math.isclose(x, y, rel_tol=1e-3, abs_tol=1e-5 if abs(x) > 1e-20 else 0.0)

    return len(a) == len(b) and all(map(close, a, b))


def _contenders(process: Group, variants: list[str], plan: Plan) -> list[Contender]:
    found = [Contender(process, variant) for variant in variants]
    for contender in found:
        if plan.warm:
            contender.run(plan.warm)
        contender.try_out(plan.turn, plan.least, plan.most)
    return found


def _race(
    contenders: list[Contender], plan: Plan, probe: Callable[[], Probe]
) -> tuple[list[Probe], list[float]]:
    probes, shares = [probe()], []
    start = time.monotonic()
    others = Others([os.getpid(), *{pid for c in contenders for pid in c.process.pids}])
    for number in range(plan.rounds + plan.spare):
        others.start()
        for contender in in_turn(contenders, number):
            contender.measure()
        shares.append(others.share())
        probes.append(probe())
        late = time.monotonic() - start > plan.patience
        enough = len(shares) if late else sum(not share > BUSY for share in shares)
        if enough >= plan.rounds:
            break
    _keep_quietest(contenders, shares, plan.rounds)
    return probes, sorted(shares)[: plan.rounds]


def _keep_quietest(contenders: list[Contender], shares: list[float], rounds: int) -> None:
    order = sorted(range(len(shares)), key=lambda i: shares[i])[:rounds]
    for contender in contenders:
        for name in _NOTED:
            noted = getattr(contender, name)
            setattr(contender, name, [noted[i] for i in sorted(order)])
