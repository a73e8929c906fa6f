"""Where a process is: the stacks of its threads, and for each store its method, its wait, and for whom.

SIGUSR2 asks for it. The stack of the main thread is written at once, also while it is in C; other threads
and the lines about stores follow once it is back in Python. A wait that is about to end by its deadline asks
too.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from traceback import StackSummary, walk_stack
from types import FrameType
from typing import Any, TypeVar

from .. import waiting
from ..waiting import WaitClock
from .log import name_of_process
from .signals import call_on_signal

_STDERR = 2

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
    call_on_signal(signal.SIGUSR2, _write, show_stack=True)


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
    log.warning(
        "a wait ends with an error in %.0f s unless it is over by then:\n%s%s",
        clock.left,
        report(),
        _stacks(sys._current_frames()).rstrip(),
    )


def _write() -> None:
    """Write to stderr: of this thread `faulthandler` has written, or it waits for signals only."""
    others = {one: frame for one, frame in sys._current_frames().items() if one != threading.get_ident()}
    data = f"{_stacks(others)}{report()}".encode(errors="replace")
    while data:  # not by sys.stderr: the signal may have come while that was being written to
        data = data[os.write(_STDERR, data) :]


def _stacks(frames: Mapping[int, FrameType]) -> str:
    """Return stacks in the order of `faulthandler`."""
    return "".join(
        f"Thread {_name(thread)} (most recent call first):\n"
        + "".join(StackSummary.extract(walk_stack(frame)).format())
        for thread, frame in frames.items()
    )


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
