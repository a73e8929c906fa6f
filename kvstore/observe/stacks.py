"""The stacks of the threads of a process, and for each store its method and its wait.

They are written at SIGUSR2: the stack of the main thread at once, also while it runs C code, other threads
and the lines about stores after it has returned to Python. They are logged
before a wait ends by its deadline.
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


#: Stores, or the loop of a server or scheduler, each with the function that describes it.
_sources: weakref.WeakKeyDictionary[Any, Callable[[Any], str]] = weakref.WeakKeyDictionary()


def watch(source: _T, describe: Callable[[_T], str]) -> None:
    """Describe `source` at SIGUSR2 as long as it exists, unless the application has a handler.

    Call it when a store is made, or a process begins to serve. `describe` acquires no lock and does not wait:
    a signal may interrupt any line.
    """
    _sources[source] = describe
    waiting.before_end = warn_of_end
    call_on_signal(signal.SIGUSR2, _write_stacks, show_stack=True)


def report() -> str:
    """Return for each store its method and its wait, without stacks."""
    frames = sys._current_frames()
    waits = {wait.thread: wait for wait in waiting.open_waits()}
    lines = [f"kvstore: {name_of_process()}, process {os.getpid()}"]
    shown: set[int] = set()
    for source, describe in list(_sources.items()):
        lines.append(f"  {_described_source(source, describe)}")
        for thread, method in _store_methods(source, frames).items():
            shown.add(thread)
            lines.append(f"    in {method} of thread {_thread_name(thread)}{_wait_text(waits.get(thread))}")
    lines += [
        f"  thread {_thread_name(one)}{_wait_text(wait)}" for one, wait in waits.items() if one not in shown
    ]
    return "\n".join(lines) + "\n"


def warn_of_end(clock: WaitClock) -> None:
    """Log stacks and report: the deadline of a wait is near."""
    log.warning(
        "a wait ends with an error in %.0f s unless it is over by then:\n%s%s",
        clock.seconds_left,
        report(),
        _stack_texts(sys._current_frames()).rstrip(),
    )


def _write_stacks() -> None:
    """Write to stderr; `faulthandler` has written the stack of this thread, or it only waits for signals."""
    others = {one: frame for one, frame in sys._current_frames().items() if one != threading.get_ident()}
    data = f"{_stack_texts(others)}{report()}".encode(errors="replace")
    while data:  # not by sys.stderr: the signal may have interrupted a write to it
        data = data[os.write(_STDERR, data) :]


def _stack_texts(frames: Mapping[int, FrameType]) -> str:
    """Return stacks in the order of `faulthandler`."""
    return "".join(
        f"Thread {_thread_name(thread)} (most recent call first):\n"
        + "".join(StackSummary.extract(walk_stack(frame)).format())
        for thread, frame in frames.items()
    )


def _described_source(source: Any, describe: Callable[[Any], str]) -> str:
    try:
        return describe(source)
    except Exception as error:  # the signal may have interrupted any line
        return f"{type(source).__name__}: {error!r}"


def _wait_text(wait: WaitClock | None) -> str:
    return "" if wait is None else f": {_described_source(wait, WaitClock.description)}"


def _store_methods(source: Any, frames: Mapping[int, FrameType]) -> dict[int, str]:
    """Name the method of `source` that each thread has called, by thread."""
    file = sys.modules[type(source).__module__].__file__
    found: dict[int, str] = {}
    for thread, top in frames.items():
        frame: FrameType | None = top
        while frame is not None:
            code = frame.f_code
            public = not code.co_name.startswith(("_", "<"))
            if public and code.co_filename == file and frame.f_locals.get("self") is source:
                found[thread] = code.co_name  # the outermost is last
            frame = frame.f_back
    return found


def _thread_name(thread: int) -> str:
    names = {one.ident: one.name for one in threading.enumerate()}
    return names.get(thread, str(thread))
