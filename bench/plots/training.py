"""Steps beside one without exchange, in a panel for each place, and losses."""

from __future__ import annotations

import statistics
from itertools import groupby
from pathlib import Path
from typing import Any

from bench import plots
from bench.cases.training import CURVES, WAYS, Curves, all_cases

_KNOWN = {case.name: case for case in all_cases()}


def draw(results: dict[str, Any], target: Path) -> None:
    """Draw what there is.

    Raises
    ------
    SystemExit
        There is no matplotlib, or nothing to draw.
    """
    rows = [(_KNOWN[row["case"]], row) for row in results["cases"] if row["case"] in _KNOWN]
    steps = [pair for pair in rows if not isinstance(pair[0], Curves)]
    places = [list(some) for _, some in groupby(steps, key=lambda pair: pair[0].job)]
    learnt = [row for case, row in rows if isinstance(case, Curves)]
    if not rows:
        raise SystemExit("nothing to draw: no steps and no losses in these results")
    figure = plots.figure(5.5 * (len(places) + len(learnt)), 4.5)
    panels = figure.subplots(1, len(places) + len(learnt), squeeze=False)[0]
    for panel, some in zip(panels, places, strict=False):
        _draw_steps(panel, some)
    for panel, row in zip(panels[len(places) :], learnt, strict=True):
        _draw_losses(panel, row)
    figure.suptitle(f"{results['machine'].partition(',')[0]}, {results['versions']}", fontsize="small")
    figure.savefig(target, dpi=110)


def relative(row: dict[str, Any], way: str) -> list[float]:
    """Divide steps of a way by those without exchange, round by round."""
    times = row["seconds"]
    return [step / alone for step, alone in zip(times[way], times["alone"], strict=True)]


def _draw_steps(panel: Any, some: list[Any]) -> None:
    """Draw a group of bars for each model."""
    for number, (way, label) in enumerate(WAYS.items()):
        there = [(at, relative(row, way)) for at, (_, row) in enumerate(some) if way in row["seconds"]]
        if way == "alone" or not there:
            continue
        middle = [statistics.median(ratios) for _, ratios in there]
        spread = [[m - min(r) for m, (_, r) in zip(middle, there, strict=True)]]
        spread.append([max(r) - m for m, (_, r) in zip(middle, there, strict=True)])
        places = [at + 0.16 * (number - 3) for at, _ in there]
        panel.bar(places, middle, 0.15, yerr=spread, capsize=2, color=f"C{number}", label=label)
    panel.axhline(1, color="black", linewidth=0.8)
    panel.set_xticks(range(len(some)), [case.name.partition(": ")[2].partition(":")[0] for case, _ in some])
    panel.set(yscale="log", ylabel="step ÷ step without exchange", title=some[0][0].name.partition(":")[0])
    panel.legend(fontsize="x-small")


def _draw_losses(panel: Any, row: dict[str, Any]) -> None:
    for way in CURVES:
        runs = [run["loss"] for run in row["runs"] if run["way"] == way]
        steps = [row["every"] * (number + 1) for number in range(len(runs[0]))]
        colour = f"C{list(WAYS).index(way)}"  # as the bars
        panel.plot(
            steps, [statistics.mean(at) for at in zip(*runs, strict=True)], color=colour, label=WAYS[way]
        )
        low, high = ([pick(at) for at in zip(*runs, strict=True)] for pick in (min, max))
        panel.fill_between(steps, low, high, alpha=0.15, color=colour)
    panel.set(xlabel="steps", ylabel="loss", title=f"{row['seeds']} seeds, mean and all between")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="x-small")
