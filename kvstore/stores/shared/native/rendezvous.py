"""How the processes of a job find their region: by an abstract Unix socket, which leaves no file.

Rank 0 creates the region, a memfd without a name. Every worker then listens on a socket with a name that
follows from the user, the job and the store; no process ever accepts a connection. A worker that starts later
connects, asks the kernel for the process of that socket, and opens the memfd of that process: the kernel
admits the same user only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ....errors import AuthError, TimeoutError
from ....settings.descriptors import above_standard, new_memory
from ....source_tree import package_version
from ....waiting import WaitClock
from .namespaces import check_network, check_proc, check_same_namespace, unreadable_error

log = logging.getLogger("kvstore.shared")

_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK = 1033, 1, 2  # in fcntl since Python 3.8 on some builds only
_BACKLOG = 4096
#: The tries for a name that a killed process may still hold, and the seconds between them. Tries are counted,
#: not timed: on a busy machine they take longer, and the process that holds the name does too.
_TRIES, _PAUSE = 200, 0.01
_SOON = 1.0  # seconds of waiting before the other network namespaces are checked, repeatedly
#: Another possible cause of a wait without an end.
_APART = (
    "If it has created its store, the two are in different containers (network, PID or user namespaces) or "
    "on different machines, and 'shared' needs one: create 'dist_sync'"
)


class RegionRendezvous:
    """The socket and the memory of one store of a job: the `number`-th of its group in this process."""

    def __init__(self, job: str, group: str, number: int, rank: int, size: int) -> None:
        text = "\0".join((str(os.getuid()), job, group, str(number)))
        self.name = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        self.rank, self.size = rank, size
        #: Version of kvstore in the process that created the region, once that is found.
        self.version = package_version()
        self._memory = f"/memfd:kvstore-{self.name}-"
        self._fd = -1

    def check(self) -> None:
        """Raise ConfigError if this process cannot find other processes."""
        if self.size > 1:
            check_proc()

    def listen(self) -> bool:
        """Listen, so that other workers find this process; False: a living process of the job has this rank.

        A killed process of the rank may hold its name a moment longer: the kernel has not yet closed its
        socket, or a child that it has just forked has inherited it.
        """
        for left in reversed(range(_TRIES)):
            try:
                self._fd = self._bound_socket()
                return True
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            if left:
                time.sleep(_PAUSE)
        return False

    def _bound_socket(self) -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.bind(self._rank_address(self.rank))
            sock.listen(_BACKLOG)
            return sock.detach()

    def close(self) -> None:
        """Stop listening."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    def create(self) -> int:
        """Create the region; return the descriptor of its memory."""
        fd = new_memory(f"kvstore-{self.name}-{package_version()}")
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_SEAL)  # no process can shrink the memory
        return fd

    def find_region(self, ranks: Iterable[int]) -> int | None:
        """Return the descriptor of the region, if a process with one of `ranks` has it."""
        for rank in ranks:
            if rank != self.rank and (fd := self._descriptor_from(rank)) is not None:
                return fd
        return None

    def wait(self, timeout: float, founds: Callable[[], bool] = lambda: False) -> int | None:
        """Wait until a process has the region, and return its descriptor.

        None: this process must create it, because the ranks before it are lost. TimeoutError: no process has
        created it.
        """
        clock, pause, look = WaitClock(timeout), 0.0005, _SOON
        while True:
            waited = clock.read()
            if waited > look:
                look = waited + 5 * _SOON
                check_network(self._memory)
            if (fd := self.find_region(range(self.size))) is not None:
                return fd
            if founds():
                return None
            if clock.is_over:
                raise TimeoutError(
                    f"worker {self.rank} of {self.size} waited {waited:.0f} s for worker 0 of its job to "
                    "create its store; did it start, with the same KVSTORE_JOB, and create as many stores? "
                    f"{_APART}"
                )
            if clock.notice_due():
                log.warning("worker %d waits for worker 0 to create its store. %s", self.rank, _APART)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _rank_address(self, rank: int) -> bytes:
        return f"\0kvstore/{self.name}/{rank}".encode()

    def _descriptor_from(self, rank: int) -> int | None:
        """Return the descriptor of the region from the process that listens as `rank`."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(1.0)
            try:
                sock.connect(self._rank_address(rank))
            except OSError:
                return None
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        if uid != os.geteuid():
            raise AuthError(
                f"a process of user {uid} (pid {pid}) holds the name of worker {rank} of this job; "
                "set KVSTORE_JOB to something that others cannot guess"
            )
        check_same_namespace(pid, rank)
        try:
            return self._memory_of(pid)
        except PermissionError as error:
            raise unreadable_error(pid, rank) from error

    def _memory_of(self, pid: int) -> int | None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if (name := os.readlink(link)).startswith(self._memory):
                        self.version = name.removeprefix(self._memory).removesuffix(" (deleted)")
                        return above_standard(os.open(link, os.O_RDWR | os.O_CLOEXEC))
        return None
