"""Pictures of results: ``python -m bench CLAIM --draw NAME`` after ``--write NAME``."""

from __future__ import annotations

from typing import Any


def figure(width: float, height: float) -> Any:
    """Make an empty figure, which needs no screen.

    Raises
    ------
    SystemExit
        There is no matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("plots need matplotlib: pip install matplotlib") from None
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made
