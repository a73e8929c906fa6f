"""Step time of simulated jobs over workers, servers, keys, bytes, links and slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench import plots

Case = dict[str, Any]

#: Group, label of the axis, and the place of a case on it.
PANELS: tuple[tuple[str, str, Callable[[Case], float]], ...] = (
    ("workers", "workers, 64 servers", lambda one: one["about"]["workers"]),
    ("servers", "servers, 1,024 workers", lambda one: one["about"]["servers"]),
    ("links", "Gbit/s, 1,024 workers, 64 servers", lambda one: one["about"]["gbits"]),
    ("keys", "keys of 4 KB, 128 workers", lambda one: one["figures"]["keys"]),
    ("bytes", "MB, 128 workers", lambda one: one["figures"]["bytes"] / 2**20),
    ("slices", "KB of a slice, by host", lambda one: one["about"]["slice_bytes"] / 1000),
)
_MARKS = {"server link": "s", "worker link": "o", "server core": "^", "worker core": "v"}


def draw(results: dict[str, Any], target: Any) -> None:
    """Draw one panel for each axis; the mark shows the bottleneck of the step."""
    figure = plots.figure(15, 8)
    axes = figure.subplots(2, 3).flat
    for axis, (group, label, place) in zip(axes, PANELS, strict=True):
        cases = [one for one in results["cases"] if one["group"] == group]
        for by_host, colour in ((False, "C0"), (True, "C1")):
            _line(axis, [one for one in cases if one["about"]["by_host"] == by_host], place, colour, by_host)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel(label)
        axis.set_ylabel("seconds of a step")
    handles = [_handle(mark, name) for name, mark in _MARKS.items()]
    figure.axes[0].legend(handles=[*figure.axes[0].get_lines()[:2], *handles], fontsize="x-small")
    figure.suptitle("pushpull of all keys, simulated; 10 Gbit/s where nothing else is said", fontsize="small")
    figure.savefig(target, dpi=100)


def _line(axis: Any, cases: list[Case], place: Callable[[Case], float], colour: str, by_host: bool) -> None:
    points = sorted((place(one), one["figures"]["seconds"], one["figures"]["bound"]) for one in cases)
    if not points:
        return
    label = "a host sums first" if by_host else "flat"
    axis.plot([x for x, _, _ in points], [y for _, y, _ in points], color=colour, label=label)
    for x, y, bound in points:
        axis.plot(x, y, marker=_MARKS[bound], color=colour)


def _handle(mark: str, name: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], marker=mark, color="grey", linestyle="", label=f"bound by: {name}")
