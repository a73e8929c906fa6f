"""The check that processes of this machine live: an MPI can complete a sum although one of them was killed.

MPICH 5.0 does so occasionally, without an error, and the sum is wrong. A result is valid if all processes
still live after its completion. The kernel sets the flag PF_EXITING of a killed process before it releases
its sockets and its memory. So if the end of a process can affect a sum, this check finds the flag.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

_EXITING = 0x4  # PF_EXITING of linux/sched.h, among the flags in proc(5)'s stat
_STATE, _FLAGS, _STARTED = 0, 6, 19  # indices of that file's fields after the name, from 0


class ProcessIdentity(NamedTuple):
    """The permanent identity of a process; numbers of processes are used again."""

    rank: int
    pid: int
    started: int


class LocalPeers:
    """The other processes of this machine; those that this process cannot see are left out."""

    def __init__(self, others: list[ProcessIdentity]) -> None:
        self._files: dict[int, int] = {}
        for other in others:
            with contextlib.suppress(OSError):
                file = self._files[other.rank] = _open_stat(other.pid)
                if _start_time(file) != other.started:  # of another namespace of processes
                    os.close(self._files.pop(other.rank))

    def lost_rank(self) -> int | None:
        """Return the rank of a process that has ended, or is exiting; None if all live."""
        for rank, file in self._files.items():
            if _has_ended(file):
                return rank
        return None

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])


def process_identity(rank: int) -> ProcessIdentity:
    """Return the identity of this process."""
    pid = os.getpid()
    file = _open_stat(pid)
    try:
        return ProcessIdentity(rank, pid, _start_time(file))
    finally:
        os.close(file)


def _open_stat(pid: int) -> int:
    """Open the kernel's file on the first thread; the file on the process would sum over all threads."""
    return os.open(f"/proc/{pid}/task/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)


def _start_time(file: int) -> int:
    return int(_stat_field(file, _STARTED)[_STARTED])


def _stat_field(file: int, last: int) -> list[bytes]:
    text = os.pread(file, 1024, 0)
    return text[text.rindex(b")") + 2 :].split(None, last + 1)  # the name can contain brackets


def _has_ended(file: int) -> bool:
    try:
        fields = _stat_field(file, _FLAGS)
    except OSError:  # ESRCH: the process has ended and its parent has waited for it
        return True
    return fields[_STATE] in (b"Z", b"X") or bool(int(fields[_FLAGS]) & _EXITING)
