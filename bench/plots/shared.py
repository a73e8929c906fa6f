"""Ratios over size."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench import plots
from bench.claims.shared import PEERS
from kvstore.observe.bench.rounds import round_ratios

Points = list[tuple[int, float, float, float]]
LEGEND = {"limit": "compiled limit", "cma": "process_vm_readv limit"}


def draw(results: dict[str, Any], target: Path) -> None:
    """One panel for each number of processes and home of the arrays; a line for each peer.

    Raises
    ------
    SystemExit
        There is no matplotlib, or nothing to draw.
    """
    panels = {key: lines for key in _panels(results["cases"]) if (lines := curves(results["cases"], *key))}
    if not panels:
        raise SystemExit("nothing to draw: no sums of one array in these results")
    figure = plots.figure(5.5 * len(panels), 4.5)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for panel, ((processes, home), lines) in zip(axes, panels.items(), strict=True):
        _fill(panel, lines)
        where = "arrays in the store" if home == "store" else "private arrays"
        panel.set_title(f"{processes} processes, {where}")
        panel.legend(fontsize="x-small")
    axes[0].set_ylabel("time of the peer ÷ time of kvstore")
    figure.suptitle(f"all-reduce, float32, {results['machine'].partition(',')[0]}", fontsize="small")
    figure.savefig(target, dpi=120)


def _panels(cases: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return list(dict.fromkeys((case["processes"], case["home"]) for case in cases))


def curves(cases: list[dict[str, Any]], processes: int, home: str) -> dict[str, Points]:
    """For each peer: bytes, and median, lowest and highest ratio."""
    found: dict[str, Points] = {}
    for case in cases:
        if (case["processes"], case["home"]) != (processes, home) or not _plain(case):
            continue
        ours = case["seconds"]["ours"]
        for peer in PEERS:
            if times := case["seconds"].get(peer):
                ratios = round_ratios(times, ours)
                point = (case["bytes"], statistics.median(ratios), min(ratios), max(ratios))
                found.setdefault(peer, []).append(point)
    return found


def _plain(case: dict[str, Any]) -> bool:
    one = case["verb"] == "allreduce" and case["keys"] == 1 and case["pages"] == "huge"
    return one and not case["wait"] and "ours" in case["seconds"]


def _fill(panel: Any, lines: dict[str, Points]) -> None:
    for peer, points in lines.items():
        sizes, middle, low, high = zip(*sorted(points), strict=True)
        colour = f"C{list(PEERS).index(peer) % 10}"  # the same in every panel
        panel.plot(sizes, middle, marker="o", color=colour, label=LEGEND.get(peer, PEERS[peer]))
        panel.fill_between(sizes, low, high, alpha=0.15, color=colour)
    panel.axhline(1, color="black", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("bytes of one array")
