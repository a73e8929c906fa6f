"""The growth of the cost: time over bytes, keys, workers and servers."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench import plots
from bench.cases.dist import APART, ENTRIES, KEY, RESNET

#: Entries that are drawn, always in the same colour.
DRAWN = ("ours", "ours shm", "mxnet", "gloo", "floor", "memcpy", "sum", "memcpy-sum")

Case = dict[str, Any]
Lines = dict[str, list[plots.Point]]


def draw(results: dict[str, Any], target: Path) -> None:
    """Draw four panels: time over bytes, over keys, over workers and over servers.

    Raises
    ------
    SystemExit
        There is no matplotlib, or nothing to draw.
    """
    panels = [panel for panel in _panels(results["cases"]) if panel[2]]
    figure, axes = plots.panels(len(panels))
    figure.set_size_inches(5 * len(panels), 4.5)
    for axis, (title, label, lines, log) in zip(axes, panels, strict=True):
        for entry, points in lines.items():
            plots.band(axis, points, DRAWN.index(entry), ENTRIES[entry].label)
        axis.set_yscale("log")
        if log:
            axis.set_xscale("log", base=2)
        else:
            axis.set_xticks(sorted({int(at) for points in lines.values() for at, *_ in points}))
        axis.set_title(title, fontsize="medium")
        axis.set_xlabel(label)
    axes[0].set_ylabel("push and pull of all keys, milliseconds")
    axes[0].legend(fontsize="x-small")
    plots.save(figure, target, f"dist_sync, float32, {results['machine'].partition(',')[0]}")


def _panels(cases: list[Case]) -> list[tuple[str, str, Lines, bool]]:
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


def curves(cases: list[Case], over: str) -> Lines:
    """Return, for each entry and its faster way of calling, the places and the times."""
    found: Lines = {}
    for case in cases:
        for entry in DRAWN:
            if ways := [times for name in (entry, entry + APART) if (times := case["seconds"].get(name))]:
                best = [1000 * seconds for seconds in min(ways, key=statistics.median)]
                found.setdefault(entry, []).append(plots.point(case[over], best))
    return {entry: sorted(points) for entry, points in found.items()}
