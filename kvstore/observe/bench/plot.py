"""A picture of the times: one row for each peer, with a dot for each round and a line at the median."""

from __future__ import annotations

import importlib
import os
from typing import Any

from kvstore.errors import MissingBackendError
from kvstore.files import replacing

from .report import Result


def check() -> None:
    """Look for matplotlib, before anything is measured.

    Raises
    ------
    MissingBackendError
        It is not installed.
    """
    _module("figure")


def draw(result: Result, path: str) -> None:
    """Write the picture, in the format that the name of the file says.

    Raises
    ------
    StateFileError
        The file cannot be written.
    """
    figure = _module("figure").Figure(figsize=(8, 1.5 + 0.5 * len(result.ways)), layout="constrained")
    _module("backends.backend_agg").FigureCanvasAgg(figure)  # needs no screen
    _fill(figure.subplots(), result)
    keys, settings = result.keys, result.settings
    figure.suptitle(f"{keys.name}, store {settings.store}, workers: {settings.workers}", fontsize="medium")
    with replacing(path) as beside:
        figure.savefig(beside, dpi=120, format=os.path.splitext(path)[1][1:].lower() or "png")


def _fill(axes: Any, result: Result) -> None:
    for row, way in enumerate(result.ways):
        times = [1e3 * seconds for seconds in way.seconds]
        axes.plot(times, [row] * len(times), "o", alpha=0.5, color=f"C{row}")
        axes.plot([1e3 * way.median] * 2, [row - 0.3, row + 0.3], color=f"C{row}", linewidth=2)
    names = [f"{way.peer}\n({way.name})" if way.name else way.peer for way in result.ways]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("ms for one call with all keys")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"matplotlib.{name}")
    except ImportError as error:
        raise MissingBackendError(f"--plot needs matplotlib: pip install matplotlib ({error})") from error
