"""Time of a call over the number of workers, divided by it."""

from __future__ import annotations

import statistics
from typing import Any

from bench import plots
from bench.cases.dist import ENTRIES
from bench.claims.dist_workers import PEERS, SIZES

#: Place on the axis, and median, lowest and highest microseconds.
Point = tuple[int, float, float, float]


def draw(results: dict[str, Any], target: Any) -> None:
    """One panel for each size; where the cost is linear in the workers, lines are level."""
    figure = plots.figure(5.5 * len(SIZES), 4.5)
    axes = figure.subplots(1, len(SIZES), squeeze=False)[0]
    for axis, (size, nbytes) in zip(axes, SIZES.items(), strict=True):
        for colour, peer in enumerate(PEERS):
            if points := curve(results["cases"], nbytes, peer):
                places, middle, low, high = zip(*points, strict=True)
                axis.plot(places, middle, marker="o", color=f"C{colour}", label=ENTRIES[peer].label)
                axis.fill_between(places, low, high, alpha=0.15, color=f"C{colour}")
                axis.set_xticks(places, [str(place) for place in places])
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_title(f"one key of {size}", fontsize="medium")
        axis.set_xlabel("workers")
    axes[0].set_ylabel("pushpull ÷ workers, microseconds")
    axes[0].legend(fontsize="x-small")
    figure.suptitle(f"dist_sync, 1 server, {results['machine'].partition(',')[0]}", fontsize="small")
    figure.savefig(target, dpi=120)


def curve(cases: list[dict[str, Any]], nbytes: int, peer: str) -> list[Point]:
    """Return the points of one peer."""
    found = []
    for case in cases:
        if case["bytes"] == nbytes and (times := case["seconds"].get(peer)):
            each = [1e6 * seconds / case["workers"] for seconds in times]
            found.append((case["workers"], statistics.median(each), min(each), max(each)))
    return sorted(found)
