"""Output of the demo: a progress bar on stderr during the training, a table on stdout at the end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .training import Outcome, TrainingSettings


@contextlib.contextmanager
def progress(settings: TrainingSettings, visible: bool) -> Iterator[Callable[[float], None]]:
    """Show a bar over the epochs; yields a function that advances it and gets the accuracy."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs, test accuracy {task.fields[accuracy]:.3f}"),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), disable=not visible)
    task = bar.add_task("training", total=settings.epochs, accuracy=0.0)

    def show(accuracy: float) -> None:
        bar.start()  # not before: so an error before the first epoch is the only line
        bar.update(task, advance=1, accuracy=accuracy)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


def report(settings: TrainingSettings, outcome: Outcome, workers: int, processes: int) -> None:
    """Print accuracy, speed, the digest of the weights, and the parts of the time."""
    console = Console(highlight=False)
    size = f"{settings.replicas} replicas" if workers == 1 else f"{workers} workers of {settings.replicas}"
    console.print(f"{settings.optimizer} on store {settings.store!r}, {size}")
    console.print(f"test accuracy      {outcome.accuracy:.4f}")
    console.print(f"epochs per second  {settings.epochs / outcome.seconds:.1f}")
    console.print(f"weights            {outcome.weights}")
    console.print(_times(outcome))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if processes > cores:
        these = "a core" if cores == 1 else f"{cores} cores"
        console.print(f"{processes} processes share {these}: while some compute, the others wait for a core")


def _times(outcome: Outcome) -> Table:
    """Return the table of times; the rest is the work of the loop itself, such as cutting batches."""
    rest = {"loop itself": outcome.seconds - sum(outcome.parts.values())}
    table = Table("time spent in", "seconds", "share")
    for name, seconds in {**outcome.parts, **rest, "total": outcome.seconds}.items():
        table.add_row(name, f"{seconds:.3f}", f"{seconds / outcome.seconds:.1%}", end_section=name in rest)
    return table
