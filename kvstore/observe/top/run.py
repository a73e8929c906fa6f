"""``kvstore top``: from the first view to the last."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from .table import view_lines
from .watch import JobWatch


def run(job: str | None, interval: float, once: bool, as_json: bool, write: Callable[[str], None]) -> None:
    """Show jobs until none is left, or until Ctrl-C; `write` prints a text and ends the line.

    Raises
    ------
    ConfigError
        There is no such job.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    live = not once and not as_json and sys.stdout.isatty()
    height = 0
    with contextlib.suppress(KeyboardInterrupt):
        for view in _job_views(JobWatch(job, interval), interval, once):
            if as_json:
                write(json.dumps(view))
                continue
            columns, rows = shutil.get_terminal_size()
            shown = list(view_lines(view, columns))[: rows - 1 if live else None]
            over = f"\x1b[{height}F\x1b[J" if height else ""  # replaces the view before
            texts = (click.style(text, fg=colour or None) if live else text for text, colour in shown)
            write(over + "\n".join(texts))
            height = len(shown) if live else 0


def _job_views(watch: JobWatch, interval: float, once: bool) -> Iterator[dict[str, Any]]:
    """Yield views. The first has no rates: with `once` it is not shown."""
    view = watch.next_view()
    while view["jobs"] and not once:
        yield view
        time.sleep(interval)
        view = watch.next_view()
    if once:
        time.sleep(interval)
        view = watch.next_view()
    yield view
