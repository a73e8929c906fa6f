"""Detection of the reasons why workers of one machine cannot meet.

A worker finds a region by a socket, and the name of that belongs to a network namespace. It opens the region
by /proc, which may be absent, shows one PID namespace, and refuses processes of another user namespace.
Containers have namespaces of their own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ....errors import ConfigError

#: The remedy in each case.
CURE = (
    "start all workers of this machine in one container (Kubernetes: one pod with shareProcessNamespace; "
    "Docker: --network and --pid of the first container), or create 'dist_sync', which needs no "
    "common namespace"
)


def check_proc() -> None:
    """Raise ConfigError if this process cannot find other processes by /proc."""
    try:
        shown = os.readlink("/proc/self")
    except OSError as error:
        raise ConfigError(
            f"'shared' opens the memory of other workers by /proc, which is not there ({error.strerror}): "
            "mount it (mount -t proc proc /proc), or create 'dist_sync'"
        ) from error
    if shown != str(os.getpid()):
        raise ConfigError(
            f"'shared' opens the memory of other workers by /proc, which shows another PID namespace (this "
            f"process is {os.getpid()}, and {shown} there): mount the /proc of this namespace (unshare "
            f"--mount-proc), and {CURE}"
        )


def check_same_namespace(process: int, rank: int) -> None:
    """Raise ConfigError if the process that holds the name of worker `rank` is in another PID namespace.

    `process` is its id as this process sees it; 0 if it does not see it at all.
    """
    if process <= 0 or _process_namespace(process, "pid") not in (None, _process_namespace("self", "pid")):
        raise ConfigError(
            f"worker {rank} of this job is in another PID namespace than this process, so 'shared' cannot "
            f"open its memory: {CURE}"
        )


def unreadable_error(process: int, rank: int) -> ConfigError:
    """Return the error for a worker with descriptors that this process may not open."""
    return ConfigError(
        f"the system does not let this process open the memory of worker {rank} (process {process}): it is "
        f"in another user namespace, or has other rights: {CURE}"
    )


def check_network(prefix: str) -> None:
    """Raise ConfigError if the memory that this process waits for exists in another network namespace.

    `prefix` is the beginning of the name of that memory.
    """
    here = _process_namespace("self", "net")
    for process in _with_memory(prefix):
        there = _process_namespace(process, "net")
        if there not in (None, here):
            raise ConfigError(
                f"process {process} has created the store of this job in another network namespace than this "
                f"process, so the workers cannot meet: {CURE}"
            )


def _with_memory(prefix: str) -> Iterator[int]:
    """Yield the visible processes that have opened memory with a given prefix of its name."""
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if any(os.readlink(link).startswith(prefix) for link in Path(f"/proc/{name}/fd").iterdir()):
                    yield int(name)


def _process_namespace(process: int | str, kind: str) -> str | None:
    """Return the namespace of a process; None if it has ended or is hidden."""
    try:
        return os.readlink(f"/proc/{process}/ns/{kind}")
    except OSError:
        return None
