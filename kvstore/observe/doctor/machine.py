"""Checks of the processors, memory and pages of this machine, and of the limits of this process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
from collections.abc import Callable
from pathlib import Path

from kvstore.observe.processes import memfds
from kvstore.settings.environment import text_of

from .checks import CheckFinding, error, ok, warning
from .system_files import ROOT, cgroup_memory, cgroup_processors, chosen, field, kilobytes, number, size

_LITTLE_MEMORY = 1 << 30
_LITTLE_SHARED_MEMORY = 64 << 20  # the size in a container of Docker
_NEED = "kvstore does not use it, but NCCL, MPI and PyTorch's data loaders fail without room there"
_F_ADD_SEALS, _F_SEAL_SHRINK = 1033, 2
_INFINITE = resource.RLIM_INFINITY
_SMALL_LOCK = 1 << 20
_FEW_FILES = 1024
_CAP_SYS_PTRACE = 19
_REGION = "kvstore-[0-9a-f]{32}-"  # the name that rendezvous.py gives


def processors(root: Path = ROOT, cores: int | None = None, usable: int | None = None) -> CheckFinding:
    """Compare the threads that kvstore starts with the processors that this process may use."""
    cores = cores or os.cpu_count() or 1
    usable = usable or len(os.sched_getaffinity(0))
    quota = cgroup_processors(root)
    threads = _wanted_threads() or usable  # the default, 0, stands for all usable processors
    text = f"{usable} of {cores} cores usable, {threads} threads for large arrays"
    if quota is not None and quota < min(threads, usable):
        text += f", but a cgroup allows the time of {quota:g}: threads are stopped in the middle of a sum"
        cure = f"export KVSTORE_NUM_THREADS={max(1, int(quota))}, or raise the limit (docker run --cpus)"
        return warning(text, cure)
    if usable == 1 < cores:
        return warning(f"{text}: the affinity of this process leaves one core")
    return ok(text)


def _wanted_threads() -> int:
    with contextlib.suppress(ValueError):  # the check of settings reports it
        return int(text_of("threads"))
    return 0


def memory(root: Path = ROOT) -> CheckFinding:
    """Find the memory that the machine and the cgroups have left."""
    meminfo = root / "proc/meminfo"
    total, left = (kilobytes(meminfo, name) for name in ("MemTotal", "MemAvailable"))
    if total is None or left is None:
        return warning("/proc/meminfo says nothing of it", "mount /proc")
    text = f"{size(left)} of {size(total)} available"
    limit = cgroup_memory(root)
    if limit is not None:
        text += f"; a cgroup (version {limit.version}) has {size(limit.left)} of {size(limit.limit)} left"
        left = min(left, limit.left)
    if left < _LITTLE_MEMORY:
        return warning(f"{text}: `shared` needs the memory of its values twice")
    if limit is not None and limit.version == 1 and limit.limit < total:
        text += ", which kvstore does not read: the kernel ends a process that needs more"
        return warning(text, "use version 2 of cgroups, or keep below this limit")
    return ok(text)


def memfd(create: Callable[[str, int], int] | None = None) -> CheckFinding:
    """Try the memory that `shared` and servers of this machine use."""
    try:
        create = create or os.memfd_create
        descriptor = create("kvstore-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, os.sysconf("SC_PAGE_SIZE"))
            fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK)
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as refused:
        return error(f"memfd_create does not work ({refused}): `shared` and jobs with keys cannot start")
    return ok("works; `shared` and servers on this machine use it, and no named memory")


def shared_regions(root: Path = ROOT) -> CheckFinding:
    """Check that the shared memory of this user's running jobs is as the workers wrote it."""
    from kvstore.stores.shared.native import _shared

    found: dict[int, str | None] = {}
    for _, link in memfds(_REGION, root):
        with contextlib.suppress(OSError), link.open("rb") as region:
            place = os.fstat(region.fileno()).st_ino
            found[place] = found.get(place) or _shared.damage_of(region.fileno())
    harm = next(filter(None, found.values()), "")
    if harm:
        text = f"in the memory that the workers of a running job share, {harm}: its values may be wrong"
        return error(text)
    return ok(f"{len(found)} of running jobs: nothing is overwritten")


def shared_memory_folder(path: str = "/dev/shm") -> CheckFinding:  # noqa: S108 - only looked at
    """Check the room in /dev/shm, which NCCL, MPI and other libraries need, and kvstore does not."""
    try:
        found = os.statvfs(path)
    except OSError as refused:
        return warning(f"{path}: {refused.strerror}: {_NEED}")
    if not os.access(path, os.W_OK | os.X_OK):
        return warning(f"{path} cannot be written by this user: {_NEED}")
    return shared_memory_room(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def shared_memory_room(total: int, left: int) -> CheckFinding:
    """Compare the size of /dev/shm and the room in it, in bytes, with what those libraries need."""
    text = f"/dev/shm has {size(left)} of {size(total)} left"  # noqa: S108 - a sentence
    if left < _LITTLE_SHARED_MEMORY or total <= _LITTLE_SHARED_MEMORY:
        return warning(f"{text}: {_NEED}")
    return ok(f"{text}; kvstore does not use it")


def huge_pages(root: Path = ROOT) -> CheckFinding:
    """Check whether values and states get the huge pages that kvstore asks for (madvise)."""
    folder = root / "sys/kernel/mm/transparent_hugepage"
    values, region = (chosen(folder / name) for name in ("enabled", "shmem_enabled"))
    text = f"{values or 'not available'} for values and states, {region or 'not available'} for shared memory"
    return (
        ok(text) if values in ("always", "madvise") else warning(f"{text}: sums of large arrays are slower")
    )


def locked_memory(root: Path = ROOT) -> CheckFinding:
    """Check how much memory a process may lock, as drivers of InfiniBand do."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == _INFINITE:
        return ok("unlimited")
    if soft < _SMALL_LOCK or any((root / "sys/class/infiniband").glob("*")):
        need = "NCCL, MPI and Horovod over InfiniBand need more; kvstore locks none"
        return warning(f"{size(soft)} (RLIMIT_MEMLOCK): {need}")
    return ok(size(soft))


def open_files() -> CheckFinding:
    """Check how many descriptors this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == _INFINITE:
        return ok("unlimited")
    if soft < _FEW_FILES:
        most = _FEW_FILES * 4 if hard == _INFINITE else min(hard, _FEW_FILES * 4)
        need = "servers and schedulers need several for each worker"
        return warning(f"{soft} (RLIMIT_NOFILE): {need}", f"ulimit -n {most}")
    return ok(str(soft))


def address_space() -> CheckFinding:
    """Check that `shared` can map addresses for a region that grows, and its file can grow."""
    limits = {"RLIMIT_AS": resource.RLIMIT_AS, "RLIMIT_FSIZE": resource.RLIMIT_FSIZE}
    found = {name: resource.getrlimit(limit)[0] for name, limit in limits.items()}
    tight = [f"{name} {size(soft)}" for name, soft in found.items() if soft != _INFINITE]
    if tight:
        need = "`shared` maps more addresses than it uses, and a large file"
        return warning(f"limited ({', '.join(tight)}): {need}")
    return ok("unlimited")


def ptrace(root: Path = ROOT) -> CheckFinding:
    """Check whether workers of `shared` may read each other's arrays (process_vm_readv)."""
    scope = number(root / "proc/sys/kernel/yama/ptrace_scope")
    if not scope:
        return ok("processes of a user may read each other (no ptrace_scope of Yama)")
    capabilities = int(field(root / "proc/self/status", "CapEff") or "0", 16)
    if scope < 3 and capabilities >> _CAP_SYS_PTRACE & 1:
        return ok(f"ptrace_scope is {scope}, but this process has CAP_SYS_PTRACE")
    cure = "push arrays from store.empty(key), which are not copied"
    if scope < 3:  # 3 stays until the next boot
        cure = f"sudo sysctl kernel.yama.ptrace_scope=0; or {cure}"
    text = f"ptrace_scope is {scope}: workers of `shared` cannot read each other's arrays, and copy once more"
    return warning(text, cure)
