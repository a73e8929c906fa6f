"""Checks whether the limits of this process are sufficient for its role in a job.

Without descriptors a server would refuse workers, which would wait until their deadline; without threads
ZeroMQ would abort the process. So a role checks first, and reports the limit. Later, strangers could use up
descriptors: `DescriptorReserve` shows when they do.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import sys
import threading
import time

from ....errors import ConfigError
from ....settings import addresses
from ....settings.roles import Roles

# Counted on Linux with libzmq 4.3: descriptors of a role for itself, and for each process of the other roles.
_OWN = {"scheduler": 21, "server": 32, "worker": 20}
_EACH = {"scheduler": 3, "server": 2, "worker": 3}
_SHARED = 2  # and for the shared memory of each of them on this machine: its first page, and one segment
_USUAL = 1024
_SPACE = "addresses (ulimit -v), or that of the container (memory), where it is started"
_UNMAPPED = ("failed to map segment", "cannot allocate memory", "Cannot allocate memory")
_COUNTED_FOR = 0.1  # seconds that a count is used: where there are thousands, a count needs a millisecond


def check_open_files(roles: Roles) -> None:
    """Raise ConfigError where this process may open too few files for its role."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    there, wanted = _open_files(), _wanted_files(roles)
    if limit == resource.RLIM_INFINITY or there + wanted <= limit:
        return
    raise ConfigError(
        f"{_role_name(roles)} may have {limit} open files and has {there}; it needs at least {wanted} more, "
        f"for {_peer_text(roles)}. Raise the limit where the job is started: ulimit -n "
        f"{max(_USUAL, 2 * (there + wanted))} (the hard limit is {most} here)"
    )


def _wanted_files(roles: Roles) -> int:
    """Return the number of descriptors that a role needs at least."""
    each = _EACH[roles.role]
    if roles.role != "scheduler" and (roles.ipc or addresses.is_loopback(roles.host)):
        each += _SHARED
    return _OWN[roles.role] + each * sum(_peer_counts(roles).values())


def _peer_counts(roles: Roles) -> dict[str, int]:
    """Count the processes that this process connects to; 1 of a role, where the number is unknown."""
    found = {"worker": max(1, roles.num_workers), "server": max(1, roles.num_servers)}
    return {role: count for role, count in found.items() if role != roles.role}


def _peer_text(roles: Roles) -> str:
    return " and ".join(f"{count} {role}{'s'[: count != 1]}" for role, count in _peer_counts(roles).items())


def _role_name(roles: Roles) -> str:
    known = roles.rank >= 0 and roles.role != "scheduler"
    return f"{roles.role} {roles.rank}" if known else f"the {roles.role}"


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # without the descriptor of the list itself
    except FileNotFoundError:  # no /proc: the number is unknown, so nothing is refused
        return 0
    except OSError:  # no descriptor is left
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def resource_shortage(error: BaseException | None) -> str | None:
    """Return the resource that this process lacks, as an error or its cause shows; None: unknown.

    The system's own messages name no limit.
    """
    while error is not None:
        number, text = getattr(error, "errno", None), str(error)
        if isinstance(error, RuntimeError) and "start new thread" in text:
            return f"too few threads ({text}): raise the limit on processes (ulimit -u, pids), or on {_SPACE}"
        if number in (errno.EMFILE, errno.ENFILE):
            return f"too few open files ({text}): raise the limit where it is started (ulimit -n)"
        unmapped = isinstance(error, ImportError) and any(word in text for word in _UNMAPPED)
        if isinstance(error, MemoryError) or number == errno.ENOMEM or unmapped:
            return f"too little memory ({text or type(error).__name__}): raise the limit on {_SPACE}"
        error = error.__cause__ or error.__context__
    return None


class DescriptorReserve:
    """An eighth of this process's descriptors, which it needs for itself: strangers must leave it free.

    Counting is slow where there are thousands, so it is done rarely; `note_opened` adjusts the number in
    between.
    """

    def __init__(self) -> None:
        self._size = self._free = self._taken = 0
        self._counted = -math.inf

    def note_opened(self, count: int) -> None:
        """Record that `count` descriptors were opened, or closed if it is negative."""
        self._taken += count

    @property
    def missing_descriptors(self) -> int:
        """The number of descriptors to close until the whole reserve is free."""
        now = time.monotonic()
        if now - self._counted > _COUNTED_FOR or self._taken > self._size // 2:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            limit = sys.maxsize if limit == resource.RLIM_INFINITY else limit
            self._size, self._free = limit // 8, limit - _open_files()
            self._counted, self._taken = now, 0
        return max(0, self._size - self._free + self._taken)


def check_threads(wanted: int) -> None:
    """Raise ConfigError where this process cannot start `wanted` more threads."""
    done = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(wanted):
            thread = threading.Thread(target=done.wait, daemon=True)
            thread.start()
            started.append(thread)
    except (RuntimeError, MemoryError):
        raise ConfigError(
            f"this process can start {len(started)} of the {wanted} threads that its connections need: raise "
            "the limit on addresses (ulimit -v), on processes (ulimit -u), or that of the container (memory, "
            "pids), where the job is started"
        ) from None
    finally:
        done.set()
        for thread in started:
            thread.join()
