"""Ratios of the store between processes to its rivals, measured in turn."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from bench.cases import shared as cases
from bench.cases.shared import SharedCase
from bench.peers.setting import Setting
from bench.peers.shared.launch import SharedGroup, redis_server
from bench.runner import rivals, table
from bench.runner.claim import Claim
from bench.runner.rounds import Measured, Plan

PEERS = {
    "limit": "compiled limit",
    "bare": "limit, no sum kept",
    "cma": "limit, process_vm_readv",
    "memcpy": "memcpy",
    "line": "ping-pong of a line",
    "futex": "ping-pong of a futex",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "deepspeed": "DeepSpeed",
    "gloo": "torch gloo",
    "mxnet": "MXNet dist_sync",
    "queue": "Queue",
    "manager": "Manager",
    "redis": "Redis",
    "ray": "Ray",
}
#: The same peers in the order of memory: if it does not suffice, the last peers are omitted.
ORDER = (
    *("ours", "limit", "bare", "cma", "memcpy", "line", "futex", "queue", "manager"),
    *("openmpi", "mpich", "deepspeed", "gloo", "mxnet", "redis", "ray"),
)
#: Memory of a peer, in arrays of each worker, where it is not two.
COPIES = {"mxnet": 5}
CHAIN_TURN = 0.3  # seconds: a tail needs many calls
LATENCY_HEAD = ["case", "who", "p50", "p99", "processor seconds for a call"]


class Shared(Claim):
    name, title = "shared", "The store between processes of one machine, compared with its rivals"
    times = ", of the process that took longest"
    common = (*Claim.common, "workers")
    workers = (2, 4)
    picture = ""
    process = SharedGroup
    timed = ("seconds", "tails", "cpu")

    def cases(self, options: argparse.Namespace) -> Iterable[Any]:
        return cases.all_cases(tuple(options.workers))

    def plan_of(self, case: SharedCase, plan: Plan) -> Plan:
        return replace(plan, turn=max(plan.turn, CHAIN_TURN)) if case.wait else plan

    def settings(self, cases: Sequence[SharedCase]) -> list[Setting]:
        found = rivals.settings("shared", ORDER, processes=cases[0].processes)
        return [setting for setting in found if setting.name != "redis" or redis_server(setting.python)]

    def job(self, case: SharedCase) -> int:
        return case.processes

    def takes(self, case: SharedCase, peer: str) -> bool:
        return peer in ("ours", *case.peers)

    def memory(self, case: SharedCase, setting: Setting) -> float:
        share = case.nbytes * case.processes * (2 if case.update else 1)
        return share * COPIES.get(setting.name, 2)

    def fields(self, case: SharedCase) -> dict[str, Any]:
        names = ("verb", "processes", "home", "pages", "update", "wait", "goals", "tail")
        row = {"bytes": case.nbytes, "keys": len(case.shapes)}
        return row | {name: getattr(case, name) for name in names}

    def sections(self, found: list[Measured]) -> Iterator[str]:
        yield from table.section("Goals", table.GOALS_HEAD, table.goals(found, PEERS))
        yield from table.section("Round trips of 4 KB", LATENCY_HEAD, latency(found))
        yield from ("## All cases\n", everything(found), *table.disturbed(found))
        yield from (
            "## The way of calling that was best\n",
            table.markdown(["case", "ways"], variants(found)),
        )


def everything(measured: list[Measured]) -> str:
    """Format one table for each kind of case, with a column for each peer."""
    kinds: dict[tuple[str, ...], list[Measured]] = {}
    for m in measured:
        kinds.setdefault(tuple(peer for peer in PEERS if peer in m.case.peers), []).append(m)
    return "\n".join(
        table.everything(
            found, {peer: PEERS[peer] for peer in peers if any(peer in m.seconds for m in found)}
        )
        for peers, found in kinds.items()
    )


def latency(measured: Iterable[Measured]) -> list[list[str]]:
    """Return the median, tail and processor seconds of the chains."""
    rows = []
    for m in measured:
        for peer in m.seconds if m.case.wait else ():
            cells = [table.time(statistics.median(numbers[peer])) for numbers in (m.seconds, m.tails, m.cpu)]
            rows.append([m.case.name, PEERS.get(peer, "kvstore"), *cells])
    return rows


def variants(measured: Iterable[Measured]) -> list[list[str]]:
    """Return the fastest way of calling of each case."""
    rows = []
    for m in measured:
        cells = [f"{PEERS.get(p, 'kvstore')}: {way.strip()}" for p, way in m.variants.items() if way.strip()]
        if cells:
            rows.append([m.case.name, "; ".join(cells)])
    return rows


CLAIM = Shared()
