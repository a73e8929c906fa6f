"""Functions for each way to start processes: their variables, their end with the launcher, texts of ends."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.settings.environment import text_of

#: Seconds between the request to a process to end and SIGKILL, so that all processes are gone within two.
GRACE = 1.5
_GRACE_OF_TIMELINES = 10.0
#: Exit code of a scheduler that a launcher has ended, and to which no worker has connected.
DESERTED = 69

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def new_job() -> str:
    """Return a name for a job: 128 random bits."""
    return secrets.token_hex(16)


def worker_variables(
    job: str, rank: int, size: int, restart: int = 0, local: tuple[int, int] | None = None
) -> dict[str, str]:
    """Return the variables of a worker that `kvstore.settings.launchers.detect_placement` reads.

    `local` is its rank and the number of workers on its host; None: all workers are on one host.
    """
    local_rank, local_size = local or (rank, size)
    return {
        "KVSTORE_JOB": job,
        "KVSTORE_RANK": str(rank),
        "KVSTORE_SIZE": str(size),
        "KVSTORE_LOCAL_RANK": str(local_rank),
        "KVSTORE_LOCAL_SIZE": str(local_size),
        "KVSTORE_RESTART": str(restart),
    }


def describe_end(code: int) -> str:
    """Describe how a process has ended; negative codes are signals, as in `subprocess`."""
    if code == 0:
        return "ended too early"
    return f"failed with exit code {code}" if code > 0 else f"was ended by {signal_name(-code)}"


def exit_code(code: int) -> int:
    """Return the exit code of a launcher for that of a failed process: 128 + n for signal n, as in shells."""
    return code if code > 0 else 128 - code


def signal_name(number: int) -> str:
    """Return the name of a signal, or its number if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def grace() -> float:
    """Return the seconds between the request to end and SIGKILL; more for processes that write timelines."""
    return _GRACE_OF_TIMELINES if text_of("timeline").strip() else GRACE


def is_stopped(process: int) -> bool:
    """Return whether a process of this host is stopped, as after SIGSTOP."""
    try:
        return b") T " in Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return False


def started(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own that the kernel kills when this process ends.

    ConfigError is raised if the program cannot be started.
    """
    try:
        return subprocess.Popen(command, start_new_session=True, preexec_fn=tied_to(os.getpid()), **options)
    except OSError as error:
        raise unstartable(command, error) from error


def unstartable(command: Sequence[str], error: OSError) -> ConfigError:
    """Return the error for a program that cannot be started."""
    return ConfigError(
        f"cannot start {command[0]!r}: {error.strerror}; give an executable program, or a Python script "
        "whose name ends with .py"
    )


def tied_to(parent: int) -> Callable[[], None]:
    """Return a function with which the kernel kills the calling process when its parent ends.

    The kernel observes the thread that has started the process, so that thread must outlive the process. A
    parent that has ended before the call is detected too.
    """
    prctl = _prctl()  # loaded now: between fork and exec there should be little to do

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return tie


def adopt_orphans() -> None:
    """Make this process the parent of orphans of its children, to reap them also where there is no init."""
    _prctl()(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl() -> Callable[[int, int], object]:
    import ctypes

    function: Callable[[int, int], object] = ctypes.CDLL(None).prctl
    return function
