"""Steps compared with a step without exchange, in a panel for each place, and losses."""

from __future__ import annotations

import statistics
from itertools import groupby
from pathlib import Path
from typing import Any

from bench import plots
from bench.cases.training import CURVES, WAYS, Curves, all_cases
from kvstore.observe.bench.rounds import round_ratios

_KNOWN = {case.name: case for case in all_cases()}


def draw(results: dict[str, Any], target: Path) -> None:
    """Draw all results.

    Raises
    ------
    SystemExit
        There is no matplotlib, or nothing to draw.
    """
    rows = [(_KNOWN[row["case"]], row) for row in results["cases"] if row["case"] in _KNOWN]
    steps = [pair for pair in rows if not isinstance(pair[0], Curves)]
    places = [list(some) for _, some in groupby(steps, key=lambda pair: pair[0].job)]
    learnt = [row for case, row in rows if isinstance(case, Curves)]
    figure, axes = plots.panels(len(places) + len(learnt))
    for panel, some in zip(axes, places, strict=False):
        _draw_steps(panel, some)
    for panel, row in zip(axes[len(places) :], learnt, strict=True):
        _draw_losses(panel, row)
    plots.save(figure, target, f"{results['machine'].partition(',')[0]}, {results['versions']}", 110)


def _draw_steps(panel: Any, some: list[Any]) -> None:
    """Draw a group of bars for each model."""
    for number, (way, label) in enumerate(WAYS.items()):
        there = {at: row["seconds"] for at, (_, row) in enumerate(some) if way in row["seconds"]}
        if way != "alone" and there:
            points = [
                plots.point(at + 0.16 * (number - 3), round_ratios(times[way], times["alone"]))
                for at, times in there.items()
            ]
            places, middle, _, _ = zip(*points, strict=True)
            spread = [[m - low for _, m, low, _ in points], [high - m for _, m, _, high in points]]
            panel.bar(places, middle, 0.15, yerr=spread, capsize=2, color=f"C{number}", label=label)
    panel.axhline(1, color="black", linewidth=0.8)
    panel.set_xticks(range(len(some)), [case.name.partition(": ")[2].partition(":")[0] for case, _ in some])
    panel.set(yscale="log", ylabel="step ÷ step without exchange", title=some[0][0].name.partition(":")[0])
    panel.legend(fontsize="x-small")


def _draw_losses(panel: Any, row: dict[str, Any]) -> None:
    for way in CURVES:
        runs = [run["loss"] for run in row["runs"] if run["way"] == way]
        points = [
            (row["every"] * number, statistics.mean(at), min(at), max(at))
            for number, at in enumerate(zip(*runs, strict=True), 1)
        ]
        plots.band(panel, points, list(WAYS).index(way), WAYS[way], "")  # in the colour of the bars
    panel.set(xlabel="steps", ylabel="loss", title=f"{row['seeds']} seeds, mean and all between")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="x-small")
