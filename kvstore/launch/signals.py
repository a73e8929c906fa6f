"""How the `kvstore` command ends on a signal: with the usual exit code, 128 and the number, and no traceback.

From its first line on: `kvstore` imports this before NumPy and all else. What starts processes
(`output_relay`) takes the signals over, without a gap.
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
#: What asks a launcher for the stacks of all processes, or for their timelines, and which signal asks each
#: process; the terminal sends SIGQUIT on Ctrl-\.
ASKING = {
    signal.SIGUSR2: signal.SIGUSR2,
    signal.SIGQUIT: signal.SIGUSR2,
    signal.SIGUSR1: signal.SIGUSR1,
}
_SHOW_CURSOR = b"\x1b[?25h"


def is_command(argv: Sequence[str], original: Sequence[str]) -> bool:
    """Whether these are the arguments of the `kvstore` command, or of a child that `multiprocessing` made.

    `original` is what the interpreter got: ``python -m`` has put nothing of it into `argv` yet.
    """
    if argv[:1] == ["-m"]:
        named = (word for before, word in pairwise(original) if before[:1] == "-" and before[-1] == "m")
        return next(named, "") in ("kvstore", "kvstore.launch")
    path, name = os.path.split(argv[0]) if argv else ("", "")
    return name == "kvstore" or (name == "__main__.py" and path.endswith(("/kvstore", "/kvstore/launch")))


def for_command() -> None:
    """End at once on a signal, from now on, where this is the command.

    Not by an exception, which whatever runs just then might swallow: an import, a destructor, a callback. And
    there is nothing to put in order: the kernel ends workers with us, and their memory has no names.
    """
    if not is_command(sys.argv, sys.orig_argv) or threading.current_thread() is not threading.main_thread():
        return
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as it is under nohup
            signal.signal(number, _exit)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Inside, a signal is only noted; what its handler does, which may be to raise, comes at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[int] = []
    before = {number: old for number in ENDING if callable(old := signal.getsignal(number))}
    for number in before:
        signal.signal(number, lambda number, frame: noted.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for came in noted:
            signal.raise_signal(came)


def write_timeline() -> None:
    """Before the end of a process that is not orderly: write what it has recorded, if anything."""
    recording = sys.modules.get("kvstore.observe.timeline.recording")
    if recording is not None:
        recording.write()


def _exit(number: int, frame: object) -> NoReturn:
    write_timeline()
    if os.isatty(2):
        os.write(2, _SHOW_CURSOR)  # which progress bars hide
    os._exit(128 + number)
