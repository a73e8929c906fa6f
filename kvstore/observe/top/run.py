"""``kvstore top``: from the first view to the last."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import click

from .table import lines
from .watch import MachineView, Watch


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
        for view in _views(Watch(job, interval), interval, once):
            if as_json:
                write(json.dumps(asdict(view)))
                continue
            columns, rows = shutil.get_terminal_size()
            shown = list(lines(view, columns))
            if not live:
                write("\n".join(line.text for line in shown))
                continue
            shown = shown[: rows - 1]
            over = f"\x1b[{height}F\x1b[J" if height else ""  # replaces the view before
            write(over + "\n".join(click.style(line.text, fg=line.colour or None) for line in shown))
            height = len(shown)


def _views(watch: Watch, interval: float, once: bool) -> Iterator[MachineView]:
    """Yield views. The first has no rates: with `once` it is not shown."""
    view = watch.view()
    while view.jobs and not once:
        yield view
        time.sleep(interval)
        view = watch.view()
    if once:
        time.sleep(interval)
        view = watch.view()
    yield view
