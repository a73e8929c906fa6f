"""What both ways to start workers share: their variables, how they die with us, how an end is told."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.settings.environment import text_of

#: Seconds between asking a process to end and killing it, so that all are gone within two.
GRACE = 1.5
_GRACE_OF_TIMELINES = 10.0
#: Exit code of a scheduler that a launcher has asked to end, and to which no worker ever came.
DESERTED = 69

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class HostLoss:
    """What ended the way to processes: a sentence, and the last words on stderr of what led there."""

    text: str
    tail: Sequence[bytes]


def new_job() -> str:
    """Name a job: 128 random bits."""
    return secrets.token_hex(16)


def variables(
    job: str, rank: int, size: int, restart: int = 0, local: tuple[int, int] | None = None
) -> dict[str, str]:
    """Make the variables by which `kvstore.settings.launchers.detect` knows a worker.

    `local` is its rank and their number on its machine, where there are several machines.
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


def told(code: int) -> str:
    """Say how a process ended; negative codes are signals, as in `subprocess`."""
    if code == 0:
        return "ended too early"
    return f"failed with exit code {code}" if code > 0 else f"was ended by {signal_name(-code)}"


def exit_code(code: int) -> int:
    """Exit code that tells how a failed process ended, as shells have it for signals."""
    return code if code > 0 else 128 - code


def unstartable(command: Sequence[str], error: OSError) -> ConfigError:
    """Make the error for a program that cannot be started."""
    return ConfigError(
        f"cannot start {command[0]!r}: {error.strerror}; give an executable program, or a Python script "
        "whose name ends with .py"
    )


def signal_name(number: int) -> str:
    """Give the name of a signal, or its number where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def grace() -> float:
    """Return the seconds between asking a process to end and killing it; more, if it writes a timeline."""
    return _GRACE_OF_TIMELINES if text_of("timeline").strip() else GRACE


def stopped(process: int) -> bool:
    """Whether a process of this machine stands still, as after SIGSTOP."""
    try:
        return b") T " in Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return False


def tied_to(parent: int) -> Callable[[], None]:
    """Make a function that has the kernel kill the calling process when its parent ends.

    It is bound to the thread that started the process, so that thread must outlive it. A parent that ended
    before the call is noticed too.
    """
    prctl = _prctl()  # found now: between fork and exec there should be little to do

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return tie


def adopt_orphans() -> None:
    """Become the parent of what workers leave running, to reap it also where no init does."""
    _prctl()(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl() -> Callable[[int, int], object]:
    import ctypes

    function: Callable[[int, int], object] = ctypes.CDLL(None).prctl
    return function
