"""Time of a call over the number of workers, divided by it."""

from __future__ import annotations

from typing import Any

from bench import plots
from bench.cases.dist import ENTRIES
from bench.claims.dist_workers import PEERS, SIZES


def draw(results: dict[str, Any], target: Any) -> None:
    """Draw one panel for each size; where the cost is linear in the workers, lines are level."""
    figure, axes = plots.panels(len(SIZES))
    for axis, (size, nbytes) in zip(axes, SIZES.items(), strict=True):
        for colour, peer in enumerate(PEERS):
            if points := curve(results["cases"], nbytes, peer):
                plots.band(axis, points, colour, ENTRIES[peer].label)
                axis.set_xticks([at for at, *_ in points], [str(at) for at, *_ in points])
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_title(f"one key of {size}", fontsize="medium")
        axis.set_xlabel("workers")
    axes[0].set_ylabel("pushpull ÷ workers, microseconds")
    axes[0].legend(fontsize="x-small")
    plots.save(figure, target, f"dist_sync, 1 server, {results['machine'].partition(',')[0]}")


def curve(cases: list[dict[str, Any]], nbytes: int, peer: str) -> list[plots.Point]:
    """Return the points of one peer."""
    return sorted(
        plots.point(case["workers"], [1e6 * seconds / case["workers"] for seconds in times])
        for case in cases
        if case["bytes"] == nbytes and (times := case["seconds"].get(peer))
    )
