"""Seconds over the keys of one call."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from bench import plots


def draw(results: dict[str, Any], target: Any) -> None:
    """Draw seconds over keys, and the straight line through the origin and the last point."""
    figure = plots.figure(6, 4.5)
    axis = figure.subplots()
    keys = [case["keys"] for case in results["cases"]]
    for what in ("init", "pushpull"):
        seconds = [statistics.median(np.atleast_1d(case[what])) for case in results["cases"]]
        (line,) = axis.plot(keys, seconds, "o-", label=what)
        axis.plot([0, keys[-1]], [0, seconds[-1]], ":", color=line.get_color())
    axis.set(xlabel="keys in one call", ylabel="seconds")
    axis.set_title(f"dist_sync, {results['machine'].partition(',')[0]}", fontsize="small")
    axis.legend()
    figure.savefig(target, dpi=120)
