"""How cost grows: time over bytes, keys, workers and servers."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench import plots
from bench.cases.dist import APART, ENTRIES, KEY, RESNET

#: Entries that are drawn, always in the same colour.
DRAWN = ("ours", "ours shm", "mxnet", "gloo", "floor", "memcpy", "sum", "memcpy-sum")

#: Place on the axis, and median, lowest and highest milliseconds.
Point = tuple[float, float, float, float]
Case = dict[str, Any]


def draw(results: dict[str, Any], target: Path) -> None:
    """Four panels: time over bytes, over keys, over workers and over servers.

    Raises
    ------
    SystemExit
        There is no matplotlib, or nothing to draw.
    """
    panels = [panel for panel in _panels(results["cases"]) if panel[2]]
    if not panels:
        raise SystemExit("nothing to draw: no plain sums in these results")
    figure = plots.figure(5 * len(panels), 4.5)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, label, lines, log) in zip(axes, panels, strict=True):
        _fill(axis, lines, log)
        axis.set_title(title, fontsize="medium")
        axis.set_xlabel(label)
    axes[0].set_ylabel("push and pull of all keys, milliseconds")
    axes[0].legend(fontsize="x-small")
    figure.suptitle(f"dist_sync, float32, {results['machine'].partition(',')[0]}", fontsize="small")
    figure.savefig(target, dpi=120)


def _panels(cases: list[Case]) -> list[tuple[str, str, dict[str, list[Point]], bool]]:
    plain = [case for case in cases if _plain(case)]
    pair = [case for case in plain if (case["workers"], case["servers"]) == (2, 1)]
    resnet = [case for case in plain if case["case"].endswith(RESNET)]
    one, two = ([case for case in resnet if case[name] == n] for name, n in (("servers", 1), ("workers", 2)))
    sizes = [case for case in pair if case["keys"] == 1]
    many = [case for case in pair if case["bytes"] == KEY * case["keys"]]
    return [
        ("2 workers, 1 server, one key", "bytes", curves(sizes, "bytes"), True),
        (f"2 workers, 1 server, keys of {KEY // 1024} KB", "keys", curves(many, "keys"), True),
        (f"{RESNET}, 1 server", "workers", curves(one, "workers"), False),
        (f"{RESNET}, 2 workers", "servers", curves(two, "servers"), False),
    ]


def _plain(case: Case) -> bool:
    changed = case["mode"] != "sync" or case["update"] or case["rows"]
    return not changed and not any(ENTRIES[name.removesuffix(APART)].codec for name in case["seconds"])


def curves(cases: list[Case], over: str) -> dict[str, list[Point]]:
    """For each entry, and the better one of its ways of calling: where, and how long."""
    found: dict[str, list[Point]] = {}
    for case in cases:
        for entry in DRAWN:
            ways = [times for name in (entry, entry + APART) if (times := case["seconds"].get(name))]
            if ways:
                best = [1000 * seconds for seconds in min(ways, key=statistics.median)]
                point = (case[over], statistics.median(best), min(best), max(best))
                found.setdefault(entry, []).append(point)
    return {entry: sorted(points) for entry, points in found.items()}


def _fill(axis: Any, lines: dict[str, list[Point]], log: bool) -> None:
    for entry, points in lines.items():
        places, middle, low, high = zip(*points, strict=True)
        colour = f"C{DRAWN.index(entry)}"
        axis.plot(places, middle, marker="o", color=colour, label=ENTRIES[entry].label)
        axis.fill_between(places, low, high, alpha=0.15, color=colour)
    axis.set_yscale("log")
    if log:
        axis.set_xscale("log", base=2)
    else:
        axis.set_xticks(sorted({int(point[0]) for points in lines.values() for point in points}))
