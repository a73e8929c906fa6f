"""Signals that call a function of kvstore, unless the application has a handler."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

_STDERR = 2

#: Functions that a thread calls: only the main thread can set a handler of Python.
_relayed: dict[int, tuple[Callable[[], object], bool]] = {}


def call_on_signal(number: int, function: Callable[[], object], *, show_stack: bool = False) -> None:
    """Call `function` at each signal, unless the application has a handler.

    Parameters
    ----------
    number : int
        The signal's.
    function : callable
        The main thread calls it at any line, after C code has returned: it acquires no lock. If this function
        is called by another thread, a new thread calls `function`.
    show_stack : bool
        Write the stack of the main thread to stderr at once, also while it runs C code, before `function`
        is called. Stacks of other threads cannot be read at that time: they may run.
    """
    if signal.getsignal(number) is not signal.SIG_DFL or catches(os.getpid(), number):
        return
    if threading.current_thread() is not threading.main_thread():
        _relay_signal(number, function, show_stack)
        return
    signal.signal(number, lambda *_: function())
    if show_stack:
        faulthandler.register(number, file=_STDERR, all_threads=False, chain=True)


def catches(process: int, number: int) -> bool:
    """Whether a process of this machine has a handler for a signal, of Python's or in C."""
    try:
        lines = Path(f"/proc/{process}/status").read_bytes().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(b"SigCgt:")]
    return any(mask >> (number - 1) & 1 for mask in masks)


def _relay_signal(number: int, function: Callable[[], object], show_stack: bool) -> None:
    """Have the handler of `faulthandler` wake a thread through a pipe."""
    if not _relayed:
        os.register_at_fork(after_in_child=_after_fork)
    _relayed[number] = function, show_stack
    asked, ask = os.pipe()
    os.set_blocking(ask, False)
    threading.Thread(
        target=_call_repeatedly, args=(asked, function), name="kvstore-signals", daemon=True
    ).start()
    faulthandler.register(number, file=ask, all_threads=False)


def _call_repeatedly(asked: int, function: Callable[[], object]) -> None:
    while os.read(asked, 1 << 16):
        function()


def _after_fork() -> None:
    """Register again in a child: the thread that reads the pipe is the parent's."""
    for number, (function, show_stack) in list(_relayed.items()):
        del _relayed[number]
        if signal.getsignal(number) is signal.SIG_DFL:
            faulthandler.unregister(number)
            call_on_signal(number, function, show_stack=show_stack)
