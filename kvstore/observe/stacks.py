"""Where a process is: the stacks of its threads, and for each store its method, its wait, and for whom.

SIGUSR2 asks for it. `faulthandler` writes the stacks, also while the main thread is in C; the lines about
stores follow once the main thread is back in Python. A wait that is about to end by its deadline asks too.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from .. import waiting
from ..waiting import WaitClock
from .log import name_of_process

_STDERR = 2
_SIGNAL = signal.SIGUSR2

_T = TypeVar("_T")

log = logging.getLogger("kvstore")


#: Stores, or the loop of a server or scheduler, each with what says what it is.
_sources: weakref.WeakKeyDictionary[Any, Callable[[Any], str]] = weakref.WeakKeyDictionary()


def watch(source: _T, describe: Callable[[_T], str]) -> None:
    """Tell of `source` as long as it is there; on SIGUSR2, unless the application has a handler of its own.

    Call it where a store is made, or a process begins to serve. `describe` takes no lock and waits for
    nothing: the signal may come at any line.
    """
    _sources[source] = describe
    waiting.before_end = warn_of_end
    if signal.getsignal(_SIGNAL) is not signal.SIG_DFL or catches(os.getpid(), _SIGNAL):
        return
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread:
        signal.signal(_SIGNAL, _on_signal)
    # To chain without a handler of Python's would be to do what the system does: end the process.
    faulthandler.register(_SIGNAL, file=_STDERR, all_threads=True, chain=in_main_thread)


def catches(process: int, number: int) -> bool:
    """Whether a process of this machine has a handler for a signal, of Python's or in C."""
    try:
        lines = Path(f"/proc/{process}/status").read_bytes().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(b"SigCgt:")]
    return any(mask >> (number - 1) & 1 for mask in masks)


def report() -> str:
    """Say for each store which method it is in, and for whom and what it waits; no stacks."""
    frames = sys._current_frames()
    waits = {wait.thread: wait for wait in waiting.open_waits()}
    lines = [f"kvstore: {name_of_process()}, process {os.getpid()}"]
    told: set[int] = set()
    for source, describe in list(_sources.items()):
        lines.append(f"  {_said(source, describe)}")
        for thread, method in _methods(source, frames).items():
            told.add(thread)
            lines.append(f"    in {method} of thread {_name(thread)}{_wait(waits.get(thread))}")
    lines += [f"  thread {_name(one)}{_wait(wait)}" for one, wait in waits.items() if one not in told]
    return "\n".join(lines) + "\n"


def warn_of_end(clock: WaitClock) -> None:
    """Write stacks and report to the log, for a wait that will soon be over."""
    stacks = [
        f"thread {_name(thread)}:\n{''.join(traceback.format_stack(frame))}"
        for thread, frame in sys._current_frames().items()
    ]
    log.warning(
        "a wait ends with an error in %.0f s unless it is over by then:\n%s%s",
        clock.left,
        report(),
        "".join(stacks).rstrip(),
    )


def _on_signal(number: int, frame: FrameType | None) -> None:
    data = report().encode(errors="replace")
    while data:  # not by sys.stderr: the signal may have come while that was being written to
        data = data[os.write(_STDERR, data) :]


def _said(source: Any, describe: Callable[[Any], str]) -> str:
    try:
        return describe(source)
    except Exception as error:  # a signal may have come at any line: it is said on the page
        return f"{type(source).__name__}: {error!r}"


def _wait(wait: WaitClock | None) -> str:
    if wait is None:
        return ""
    try:
        return f": {wait.description()}"
    except Exception as error:  # as above
        return f": a wait ({error!r})"


def _methods(source: Any, frames: Mapping[int, FrameType]) -> dict[int, str]:
    """Name the method of `source` that each thread has called, by thread."""
    file = sys.modules[type(source).__module__].__file__
    found: dict[int, str] = {}
    for thread, top in frames.items():
        frame: FrameType | None = top
        while frame is not None:
            code = frame.f_code
            public = not code.co_name.startswith(("_", "<"))
            if public and code.co_filename == file and frame.f_locals.get("self") is source:
                found[thread] = code.co_name  # the outermost comes last
            frame = frame.f_back
    return found


def _name(thread: int) -> str:
    names = {one.ident: one.name for one in threading.enumerate()}
    return names.get(thread, str(thread))
