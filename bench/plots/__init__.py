"""Pictures of results: ``python -m bench CLAIM --draw NAME`` after ``--write NAME``."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

#: A place on the axis, and the median, the lowest and the highest figure there.
Point = tuple[float, float, float, float]


def figure(width: float, height: float) -> Any:
    """Make an empty figure, which needs no screen.

    Raises
    ------
    SystemExit
        There is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("plots need matplotlib: pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def panels(count: int, **options: Any) -> tuple[Any, Any]:
    """Make a figure with panels side by side; SystemExit where there are none."""
    if not count:
        raise SystemExit("nothing to draw: these results have none of the cases that are drawn")
    made = figure(5.5 * count, 4.5)
    return made, made.subplots(1, count, squeeze=False, **options)[0]


def point(place: float, figures: Sequence[float]) -> Point:
    """Return the point of the figures of one place."""
    return place, statistics.median(figures), min(figures), max(figures)


def band(axis: Any, points: Iterable[Point], colour: int, label: str, marker: str = "o") -> None:
    """Draw a line through the medians, and the area between the lowest and the highest figures."""
    places, middle, low, high = zip(*points, strict=True)
    axis.plot(places, middle, marker=marker, color=f"C{colour % 10}", label=label)
    axis.fill_between(places, low, high, alpha=0.15, color=f"C{colour % 10}")


def save(made: Any, target: Any, title: str, dpi: int = 120) -> None:
    """Write a figure with a title."""
    made.suptitle(title, fontsize="small")
    made.savefig(target, dpi=dpi)
