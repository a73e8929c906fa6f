"""``kvstore top``: from the first look to the last."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

from .table import lines
from .watch import MachineView, Watch


def run(job: str | None, interval: float, once: bool, as_json: bool, write: Callable[[str], None]) -> None:
    """Look at jobs until there is none any more, or until Ctrl-C; `write` gets a line each time.

    Raises
    ------
    ConfigError
        There is no such job.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.closing(Watch(job, interval)) as watch, contextlib.suppress(KeyboardInterrupt):
        views = _views(watch, interval, once)
        if not once and not as_json and sys.stdout.isatty() and importlib.util.find_spec("rich"):
            from .live import show

            show(views)
            return
        for view in views:
            write(json.dumps(asdict(view)) if as_json else "\n".join(lines(view, _width())))


def _views(watch: Watch, interval: float, once: bool) -> Iterator[MachineView]:
    """Look again and again. The first look has no rates: it is shown only where more follow."""
    view = watch.look()
    while view.jobs and not once:
        yield view
        time.sleep(interval)
        view = watch.look()
    if once:
        time.sleep(interval)
        view = watch.look()
    yield view


def _width() -> int:
    return shutil.get_terminal_size().columns
