"""Ratios over size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import plots
from bench.claims.shared import PEERS
from kvstore.observe.bench.rounds import round_ratios

LEGEND = {**PEERS, "limit": "compiled limit", "cma": "process_vm_readv limit"}


def draw(results: dict[str, Any], target: Path) -> None:
    """Draw one panel for each number of processes and home of the arrays; a line for each peer.

    Raises
    ------
    SystemExit
        There is no matplotlib, or nothing to draw.
    """
    cases = results["cases"]
    kinds = dict.fromkeys((case["processes"], case["home"]) for case in cases)
    panels = {kind: lines for kind in kinds if (lines := curves(cases, *kind))}
    figure, axes = plots.panels(len(panels), sharey=True)
    for panel, ((processes, home), lines) in zip(axes, panels.items(), strict=True):
        for peer, points in lines.items():
            plots.band(panel, sorted(points), list(PEERS).index(peer), LEGEND[peer])
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("bytes of one array")
        where = "arrays in the store" if home == "store" else "private arrays"
        panel.set_title(f"{processes} processes, {where}")
        panel.legend(fontsize="x-small")
    axes[0].set_ylabel("time of the peer ÷ time of kvstore")
    plots.save(figure, target, f"all-reduce, float32, {results['machine'].partition(',')[0]}")


def curves(cases: list[dict[str, Any]], processes: int, home: str) -> dict[str, list[plots.Point]]:
    """Return, for each peer, bytes, and median, lowest and highest ratio, of sums of one array."""
    found: dict[str, list[plots.Point]] = {}
    for case in cases:
        kind = case["processes"], case["home"], case["verb"], case["keys"], case["pages"], case["wait"]
        if kind == (processes, home, "allreduce", 1, "huge", "") and "ours" in case["seconds"]:
            for peer in PEERS:
                if times := case["seconds"].get(peer):
                    ratios = round_ratios(times, case["seconds"]["ours"])
                    found.setdefault(peer, []).append(plots.point(case["bytes"], ratios))
    return found
