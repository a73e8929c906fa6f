"""Accuracy over epochs, over bytes, and at the end over thresholds."""

from __future__ import annotations

from typing import Any

from bench import plots
from bench.cases.convergence import TASKS
from bench.claims.convergence import final, means

#: The multiple that has a curve.
SHOWN = 10.0


def draw(results: dict[str, Any], target: Any) -> None:
    """Draw a row for each task: accuracy over epochs, over bytes, and at the end over the multiple."""
    tasks = results["tasks"]
    figure = plots.figure(15, 4.2 * len(tasks))
    for panels, task in zip(figure.subplots(len(tasks), 3, squeeze=False), tasks, strict=True):
        epochs, moved, ends = panels
        for colour, recipe in enumerate(shown(task)):
            middle, each = means(recipe), recipe["bytes_each_epoch"]
            spread = [(min(at), max(at)) for at in zip(*recipe["accuracy"], strict=True)]
            points = [(at, m, *s) for at, (m, s) in enumerate(zip(middle, spread, strict=True), 1)]
            plots.band(epochs, points, colour, recipe["label"], "")
            places = [at * each / 1e6 for at, *_ in points]
            moved.plot(places, middle, color=f"C{colour}", label=recipe["label"])
        _draw_ends(ends, task)
        epochs.set(xlabel="epochs", ylabel="test accuracy", title=TASKS[task["task"]].name, ylim=(0.5, 1))
        moved.set(xlabel="MB pushed by all workers", xscale="log", ylim=(0.5, 1))
        for panel in panels:
            panel.grid(alpha=0.3)
            panel.legend(fontsize="small")
    figure.savefig(target, dpi=110)


def shown(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the recipes with a curve: each codec, 2bit and 1bit with the same multiple in each task."""
    return [recipe for recipe in task["recipes"] if recipe["multiple"] in (0, SHOWN)]


def _draw_ends(panel: Any, task: dict[str, Any]) -> None:
    for codec, colour in (("2bit", "C3"), ("1bit", "C4")):
        tried = [recipe for recipe in task["recipes"] if recipe["codec"] == codec]
        middle = [final(recipe) for recipe in tried]
        ends = [[run[-1] for run in recipe["accuracy"]] for recipe in tried]
        pairs = list(zip(middle, ends, strict=True))
        spread = [[a - min(e) for a, e in pairs], [max(e) - a for a, e in pairs]]
        multiples = [recipe["multiple"] for recipe in tried]
        panel.errorbar(multiples, middle, spread, marker="o", capsize=3, color=colour, label=codec)
    panel.axhline(final(task["recipes"][0]), color="C0", linestyle="--", label="none")
    label = "threshold (2bit) or unit (1bit) ÷ RMS of the gradients"
    panel.set(xlabel=label, ylabel="test accuracy at the end", xscale="log")
