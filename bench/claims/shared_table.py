"""Tables of the bench between processes, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from bench.runner.rounds import Measured
from bench.runner.table import markdown, spread, time

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
GOALS_HEAD = ["case", "beside", "kvstore", "peer", "peer ÷ kvstore", "goal", "holds"]
LATENCY_HEAD = ["case", "who", "p50", "p99", "processor seconds for a call"]


def goals(measured: Iterable[Measured]) -> list[list[str]]:
    """One row for every goal; where none of its peers ran, it says so."""
    rows = []
    for m in measured:
        rows += [_goal(m, names.split("|"), least) for names, least in m.case.goals.items()]
        if m.case.tail and "ours" in m.tails:
            rows.append(_tail(m))
    return rows


def _goal(m: Measured, names: list[str], least: float) -> list[str]:
    there = [name for name in names if name in m.seconds]
    label = ("best of " if len(names) > 1 else "") + ", ".join(PEERS[name] for name in there or names)
    goal = f"≥ {least:.3g}"
    if not there or "ours" not in m.seconds:
        return [m.case.name, label, "", "", "", goal, "not run"]
    best = [min(times) for times in zip(*(m.seconds[name] for name in there), strict=True)]
    ratios = [peer / mine for peer, mine in zip(best, m.seconds["ours"], strict=True)]
    holds = _mark(statistics.median(ratios) >= least)
    times = [time(m.median("ours")), time(statistics.median(best))]
    return [m.case.name, label, *times, spread(ratios), goal, holds]


def _tail(m: Measured) -> list[str]:
    ratios = [tail / middle for tail, middle in zip(m.tails["ours"], m.seconds["ours"], strict=True)]
    holds = _mark(statistics.median(ratios) <= m.case.tail)
    times = [time(m.median("ours")), time(statistics.median(m.tails["ours"]))]
    return [m.case.name, "its own p99", *times, spread(ratios), f"≤ {m.case.tail:g}", holds]


def _mark(holds: bool) -> str:
    return "yes" if holds else "**no**"


def everything(measured: list[Measured]) -> str:
    """One table for each kind of case: who took part gets a column."""
    kinds: dict[tuple[str, ...], list[Measured]] = {}
    for m in measured:
        kinds.setdefault(tuple(peer for peer in PEERS if peer in m.case.peers), []).append(m)
    return "\n".join(_table(peers, found) for peers, found in kinds.items())


def _table(peers: tuple[str, ...], measured: list[Measured]) -> str:
    there = [peer for peer in peers if any(peer in m.seconds for m in measured)]
    rows = [
        [m.case.name + (" *" if m.disturbed else ""), _own(m), *(_cell(m, peer) for peer in there)]
        for m in measured
    ]
    return markdown(["case", "kvstore", *(PEERS[peer] for peer in there)], rows)


def _own(m: Measured) -> str:
    return (
        time(m.median("ours")) + (" wrong result!" if "ours" in m.wrong else "")
        if "ours" in m.seconds
        else ""
    )


def _cell(m: Measured, peer: str) -> str:
    if peer not in m.seconds:
        return ""
    ratios = f": {spread(m.ratios(peer))}" if "ours" in m.seconds else ""
    warning = " wrong result!" if peer in m.wrong else ""
    return time(m.median(peer)) + ratios + warning


def latency(measured: Iterable[Measured]) -> list[list[str]]:
    """Middle, tail and cost of the chains."""
    rows = []
    for m in measured:
        for peer in m.seconds if m.case.wait else ():
            cells = [time(statistics.median(numbers[peer])) for numbers in (m.seconds, m.tails, m.cpu)]
            rows.append([m.case.name, PEERS.get(peer, "kvstore"), *cells])
    return rows


def variants(measured: Iterable[Measured]) -> list[list[str]]:
    """Which way of calling was the best one."""
    rows = []
    for m in measured:
        cells = [f"{PEERS.get(p, 'kvstore')}: {way.strip()}" for p, way in m.variants.items() if way.strip()]
        if cells:
            rows.append([m.case.name, "; ".join(cells)])
    return rows
