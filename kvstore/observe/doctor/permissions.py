"""Checks of the limits of this process, and of permissions between processes."""

from __future__ import annotations

import resource
from pathlib import Path

from .checks import CheckFinding, ok, warning
from .system_files import ROOT, field, number, size

_INFINITE = resource.RLIM_INFINITY
_SMALL_LOCK = 1 << 20
_FEW_FILES = 1024
_CAP_SYS_PTRACE = 19


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
