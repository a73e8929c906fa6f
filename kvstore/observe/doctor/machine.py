"""Processors, memory and pages of this machine, as this process may use them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable
from pathlib import Path

from kvstore.settings.variables import text_of

from . import cgroups
from .findings import Finding
from .system_files import ROOT, chosen, kilobytes, size

_LITTLE_MEMORY = 1 << 30
_LITTLE_SHARED_MEMORY = 64 << 20  # what Docker gives a container
_F_ADD_SEALS, _F_SEAL_SHRINK = 1033, 2
_REGION = re.compile(r"/memfd:kvstore-[0-9a-f]{32}-")  # as rendezvous.py names it


def processors(root: Path = ROOT, cores: int | None = None, usable: int | None = None) -> Finding:
    """Compare the threads that kvstore starts with the processors that this process may use."""
    cores = cores or os.cpu_count() or 1
    usable = usable or len(os.sched_getaffinity(0))
    quota = cgroups.processors(root)
    threads = _threads() or usable  # 0, the default, is as many as are usable
    text = f"{usable} of {cores} cores usable, {threads} threads for large arrays"
    if quota is not None and quota < min(threads, usable):
        text += f", but a cgroup allows the time of {quota:g}: threads are stopped in the middle of a sum"
        cure = f"export KVSTORE_NUM_THREADS={max(1, int(quota))}, or raise the limit (docker run --cpus)"
        return Finding("processors", "warning", text, cure)
    if usable == 1 < cores:
        text += ": the affinity of this process leaves one core"
        cure = "start it without binding (mpirun --bind-to none, srun --cpu-bind=none, taskset -c 0-N)"
        return Finding("processors", "warning", text, cure)
    return Finding("processors", "ok", text)


def _threads() -> int:
    with contextlib.suppress(ValueError):  # the line of settings says so
        return int(text_of("threads"))
    return 0


def memory(root: Path = ROOT) -> Finding:
    """Find the memory that the machine and the cgroups have left."""
    meminfo = root / "proc/meminfo"
    total, left = (kilobytes(meminfo, name) for name in ("MemTotal", "MemAvailable"))
    if total is None or left is None:
        return Finding("memory", "warning", "/proc/meminfo says nothing of it", "mount /proc")
    text = f"{size(left)} of {size(total)} available"
    limit = cgroups.memory(root)
    if limit is not None:
        text += f"; a cgroup (version {limit.version}) has {size(limit.left)} of {size(limit.limit)} left"
        left = min(left, limit.left)
    if left < _LITTLE_MEMORY:
        cure = "end other processes, or raise the limit of the container (docker run --memory)"
        return Finding("memory", "warning", f"{text}: `shared` needs the memory of its values twice", cure)
    if limit is not None and limit.version == 1 and limit.limit < total:
        text += ", which kvstore does not read: the kernel ends a process that needs more"
        return Finding("memory", "warning", text, "use version 2 of cgroups, or keep below this limit")
    return Finding("memory", "ok", text)


def memfd(create: Callable[[str, int], int] | None = None) -> Finding:
    """Try the memory that `shared` and servers of this machine use."""
    try:
        create = create or os.memfd_create
        descriptor = create("kvstore-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, os.sysconf("SC_PAGE_SIZE"))
            fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK)
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as error:
        text = f"memfd_create does not work ({error}): `shared` and jobs with keys cannot start"
        cure = "allow memfd_create and sealing in the seccomp profile; it needs Linux 3.17 or newer"
        return Finding("memfd", "error", text, cure)
    return Finding("memfd", "ok", "works; `shared` and servers on this machine use it, and no named memory")


def shared_regions(root: Path = ROOT) -> Finding:
    """Look whether the memory of the jobs of this user that run here is as its workers wrote it."""
    from kvstore.stores.shared.native import _shared

    found = {}
    for link in root.glob("proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # of another user, or closed meanwhile
            if _REGION.search(os.readlink(link)) and (place := link.stat().st_ino) not in found:
                with link.open("rb") as region:
                    found[place] = _shared.harm_of(region.fileno())
    harm = next(filter(None, found.values()), "")
    if harm:
        text = f"in the memory that the workers of a running job share, {harm}: its values may be wrong"
        cure = "end the job, start it again from what it has saved last, and report this as a bug of kvstore"
        return Finding("shared regions", "error", text, cure)
    return Finding("shared regions", "ok", f"{len(found)} of running jobs: nothing is overwritten")


def shared_memory_folder(path: str = "/dev/shm") -> Finding:  # noqa: S108 - only looked at
    """Look at /dev/shm, which kvstore does not use, but NCCL, MPI and others in the same process do."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        return _without_room(f"{path}: {error.strerror}")
    if not os.access(path, os.W_OK | os.X_OK):
        return _without_room(f"{path} cannot be written by this user")
    return shared_memory_room(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def shared_memory_room(total: int, left: int) -> Finding:
    """Judge the size of /dev/shm and the room in it, in bytes."""
    text = f"/dev/shm has {size(left)} of {size(total)} left"  # noqa: S108 - a sentence
    if left < _LITTLE_SHARED_MEMORY or total <= _LITTLE_SHARED_MEMORY:
        return _without_room(text)
    return Finding("shared memory folder", "ok", f"{text}; kvstore does not use it")


def _without_room(text: str) -> Finding:
    text += ": kvstore does not use it, but NCCL, MPI and PyTorch's data loaders fail without room there"
    cure = (
        "remove what dead processes have left (ls -l /dev/shm), or make it larger "
        "(mount -o remount,size=8G /dev/shm; docker run --shm-size=8g)"
    )
    return Finding("shared memory folder", "warning", text, cure)


def huge_pages(root: Path = ROOT) -> Finding:
    """Look whether values and states get huge pages, for which kvstore asks (madvise)."""
    folder = root / "sys/kernel/mm/transparent_hugepage"
    values, region = (chosen(folder / name) for name in ("enabled", "shmem_enabled"))
    text = f"{values or 'not available'} for values and states, {region or 'not available'} for shared memory"
    if values not in ("always", "madvise"):
        cure = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        return Finding("huge pages", "warning", f"{text}: sums of large arrays are slower", cure)
    return Finding("huge pages", "ok", text)
