"""Signals of the `kvstore` command: it exits with 128 and the number, without a traceback.

`kvstore` imports this module before NumPy, so that the handlers are set early. The commands that start
processes replace the handlers (`output_relay.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Signals that ask a launcher for the stacks or the timelines of all processes, and the signal that each
#: process gets. The terminal sends SIGQUIT on Ctrl-\.
ASKING = {
    signal.SIGUSR2: signal.SIGUSR2,
    signal.SIGQUIT: signal.SIGUSR2,
    signal.SIGUSR1: signal.SIGUSR1,
}
_SHOW_CURSOR = b"\x1b[?25h"


def is_command(argv: Sequence[str], original: Sequence[str]) -> bool:
    """Return whether these are the arguments of the `kvstore` command, or of a child of `multiprocessing`.

    `original` has the arguments of the interpreter: ``python -m`` has not yet put its module into `argv`.
    """
    if argv[:1] == ["-m"]:
        named = (word for before, word in pairwise(original) if before[:1] == "-" and before[-1] == "m")
        return next(named, "") in ("kvstore", "kvstore.launch")
    path, name = os.path.split(argv[0]) if argv else ("", "")
    return name == "kvstore" or (name == "__main__.py" and path.endswith(("/kvstore", "/kvstore/launch")))


def for_command() -> None:
    """Set handlers that end this process at once, if it is the command.

    An exception would not do: an import, a destructor or a callback could catch it. Nothing needs cleaning
    up: the kernel ends the workers with this process, and their memory has no names.
    """
    if not is_command(sys.argv, sys.orig_argv) or threading.current_thread() is not threading.main_thread():
        return
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _exit)


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Defer signals inside the block; their handlers, which can raise, are called at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    before = {number: old for number in ENDING if callable(old := signal.getsignal(number))}
    for number in before:
        signal.signal(number, lambda number, frame: pending.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for received in pending:
            signal.raise_signal(received)


def write_timeline() -> None:
    """Write the timeline of this process, if it records one; for ends without `atexit`."""
    recording = sys.modules.get("kvstore.observe.timeline.recording")
    if recording is not None:
        recording.write()


def _exit(number: int, frame: object) -> NoReturn:
    write_timeline()
    if os.isatty(2):
        os.write(2, _SHOW_CURSOR)  # progress bars hide it
    os._exit(128 + number)
