"""Which other processes of this machine live: an MPI can complete a sum in which one of them was killed.

MPICH 5.0 does so now and then, without an error, and the sum is wrong. A result counts if, after it was
complete, all were still there. A process that is killed has the kernel's flag PF_EXITING from before its
sockets and its memory are let go: there is no instant at which others see its end in a sum, and not here.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

_EXITING = 0x4  # PF_EXITING of linux/sched.h, among the flags in proc(5)'s stat
_STATE, _FLAGS, _STARTED = 0, 6, 19  # fields of that file behind the name, from 0


class Identity(NamedTuple):
    """What names a process for good: numbers are used again."""

    rank: int
    pid: int
    started: int


class LocalPeers:
    """The other processes of this machine; those that this one cannot see are left out."""

    def __init__(self, others: list[Identity]) -> None:
        self._files: dict[int, int] = {}
        for other in others:
            with contextlib.suppress(OSError):
                file = self._files[other.rank] = _opened(other.pid)
                if _started(file) != other.started:  # of another namespace of processes
                    os.close(self._files.pop(other.rank))

    def lost(self) -> int | None:
        """Return the rank of one that has ended, or is about to."""
        for rank, file in self._files.items():
            if _has_ended(file):
                return rank
        return None

    def close(self) -> None:
        """Watch nobody any more."""
        while self._files:
            os.close(self._files.popitem()[1])


def identity(rank: int) -> Identity:
    """Return what names this process."""
    pid = os.getpid()
    file = _opened(pid)
    try:
        return Identity(rank, pid, _started(file))
    finally:
        os.close(file)


def _opened(pid: int) -> int:
    """Open what the kernel says of the first thread; of the process, it would sum up all threads."""
    return os.open(f"/proc/{pid}/task/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)


def _started(file: int) -> int:
    return int(_stat(file, _STARTED)[_STARTED])


def _stat(file: int, last: int) -> list[bytes]:
    text = os.pread(file, 1024, 0)
    return text[text.rindex(b")") + 2 :].split(None, last + 1)  # the name may hold anything, as brackets


def _has_ended(file: int) -> bool:
    try:
        fields = _stat(file, _FLAGS)
    except OSError:  # ESRCH: it is gone, and was waited for
        return True
    return fields[_STATE] in (b"Z", b"X") or bool(int(fields[_FLAGS]) & _EXITING)
