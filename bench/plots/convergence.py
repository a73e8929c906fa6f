"""Accuracy over epochs, over bytes, and at the end over thresholds."""

from __future__ import annotations

from typing import Any

from bench import plots
from bench.cases.convergence import TASKS
from bench.claims.convergence import final, means

#: The multiple that gets a curve.
SHOWN = 10.0


def draw(results: dict[str, Any], target: Any) -> None:
    """Draw a row for each task: accuracy over epochs, over bytes, and at the end over the multiple."""
    tasks = results["tasks"]
    figure = plots.figure(15, 4.2 * len(tasks))
    for (epochs, moved, ends), task in zip(figure.subplots(len(tasks), 3, squeeze=False), tasks, strict=True):
        _draw_curves(epochs, moved, task)
        _draw_ends(ends, task)
    figure.savefig(target, dpi=110)


def _draw_curves(epochs: Any, moved: Any, task: dict[str, Any]) -> None:
    for colour, recipe in enumerate(shown(task)):
        middle, runs = means(recipe), recipe["accuracy"]
        numbers = range(1, len(middle) + 1)
        low, high = ([pick(at) for at in zip(*runs, strict=True)] for pick in (min, max))
        style = {"color": f"C{colour}", "label": recipe["label"]}
        epochs.plot(numbers, middle, **style)
        epochs.fill_between(numbers, low, high, alpha=0.15, color=f"C{colour}")
        moved.plot([number * recipe["bytes_each_epoch"] / 1e6 for number in numbers], middle, **style)
    epochs.set(xlabel="epochs", ylabel="test accuracy", title=TASKS[task["task"]].name)
    moved.set(xlabel="MB pushed by all workers", xscale="log")
    for panel in (epochs, moved):
        panel.set_ylim(0.5, 1)
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")


def shown(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Pick what gets a curve: each codec, the coarse ones with the same multiple in every task."""
    return [recipe for recipe in task["recipes"] if recipe["multiple"] in (0, SHOWN)]


def _draw_ends(panel: Any, task: dict[str, Any]) -> None:
    for codec, colour in (("2bit", "C3"), ("1bit", "C4")):
        tried = [recipe for recipe in task["recipes"] if recipe["codec"] == codec]
        middle = [final(recipe) for recipe in tried]
        ends = [[run[-1] for run in recipe["accuracy"]] for recipe in tried]
        spread = [
            [a - min(e) for a, e in zip(middle, ends, strict=True)],
            [max(e) - a for a, e in zip(middle, ends, strict=True)],
        ]
        multiples = [recipe["multiple"] for recipe in tried]
        panel.errorbar(multiples, middle, spread, marker="o", capsize=3, color=colour, label=codec)
    panel.axhline(final(task["recipes"][0]), color="C0", linestyle="--", label="none")
    panel.set(
        xlabel="threshold (2bit) or unit (1bit) ÷ RMS of the gradients", ylabel="test accuracy at the end"
    )
    panel.set_xscale("log")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
