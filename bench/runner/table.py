"""Tables of ratios, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from bench.runner.rounds import Measured

PEERS = {"limit": "compiled limit", "numpy": "NumPy", "mxnet": "MXNet 1.9.1", "torch": "torch fused"}


def time(seconds: float) -> str:
    """Three digits with a unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1 or unit == "µs":
            return f"{seconds * scale:.3g} {unit}"
    raise AssertionError


def spread(ratios: Sequence[float]) -> str:
    """Median [lowest-highest]."""
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]"


def goals(measured: Iterable[Measured]) -> list[list[str]]:
    """One row for every goal."""
    rows = []
    for m in measured:
        for peer, least in m.case.goals.items():
            if peer in m.seconds:
                holds = _mark(m.ratio(peer) >= least)
                rows.append([m.case.name, PEERS[peer], time(m.median("ours")), time(m.median(peer))])
                rows[-1] += [spread(m.ratios(peer)), f"≥ {least:g}", holds]
        if m.case.most_us:
            mine = m.median("ours") * 1e6
            goal = [f"≤ {m.case.most_us:g} µs", _mark(mine <= m.case.most_us)]
            rows.append([m.case.name, "itself", time(m.median("ours")), "", "", *goal])
    return rows


def _mark(holds: bool) -> str:
    return "yes" if holds else "**no**"


GOALS_HEAD = ["case", "beside", "kvstore", "peer", "peer ÷ kvstore", "goal", "holds"]


def everything(measured: Iterable[Measured], peers: Iterable[str] = tuple(PEERS)) -> list[list[str]]:
    """One row for every case, a column for every peer: its median, and its time over ours."""
    rows = []
    for m in measured:
        cells = [_cell(m, peer) for peer in peers]
        rows.append([m.case.name + (" *" if m.disturbed else ""), time(m.median("ours")), *cells])
    return rows


def everything_head(peers: Iterable[str] = tuple(PEERS)) -> list[str]:
    return ["case", "kvstore", *(PEERS[peer] for peer in peers)]


def _cell(m: Measured, peer: str) -> str:
    if peer not in m.seconds:
        return ""
    warning = " wrong result!" if peer in m.wrong else ""
    return f"{time(m.median(peer))}: {spread(m.ratios(peer))}{warning}"


def bandwidth(measured: Iterable[Measured]) -> list[list[str]]:
    """Bytes that bare passes move each second."""
    rows = []
    for m in measured:
        moved = m.case.nbytes * {"read": 1, "write": 1, "copy": 2, "scale": 2}[m.case.verb] / 1e9
        rates = [moved / seconds for seconds in m.seconds["limit"]]
        rows.append([m.case.verb, spread(rates), m.variants["limit"] or "ordinary stores"])
    return rows


BANDWIDTH_HEAD = ["pass over 64 MB", "GB/s moved", "best with"]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
