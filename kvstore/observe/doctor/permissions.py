"""Limits of this process and permissions between processes."""

from __future__ import annotations

import resource
from pathlib import Path

from .findings import Finding
from .system_files import ROOT, number, size
from .system_files import text as content

_INFINITE = resource.RLIM_INFINITY
_SMALL_LOCK = 1 << 20
_FEW_FILES = 1024
_CAP_SYS_PTRACE = 19


def locked_memory(root: Path = ROOT) -> Finding:
    """Look how much memory may be locked, as drivers of InfiniBand do."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_rdma = any((root / "sys/class/infiniband").glob("*"))
    said = "unlimited" if soft == _INFINITE else size(soft)
    if soft != _INFINITE and (has_rdma or soft < _SMALL_LOCK):
        said += " (RLIMIT_MEMLOCK): NCCL, MPI and Horovod over InfiniBand need more; kvstore locks none"
        cure = "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in a systemd unit"
        return Finding("locked memory", "warning", said, cure)
    return Finding("locked memory", "ok", said)


def open_files() -> Finding:
    """Look how many descriptors this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != _INFINITE and soft < _FEW_FILES:
        found = f"{soft} (RLIMIT_NOFILE): servers and schedulers need several for each worker"
        most = _FEW_FILES * 4 if hard == _INFINITE else min(hard, _FEW_FILES * 4)
        return Finding("open files", "warning", found, f"ulimit -n {most}")
    return Finding("open files", "ok", "unlimited" if soft == _INFINITE else str(soft))


def address_space() -> Finding:
    """Look whether `shared` can map addresses for a region that grows, and its file can grow."""
    limits = {"RLIMIT_AS": resource.RLIMIT_AS, "RLIMIT_FSIZE": resource.RLIMIT_FSIZE}
    found = {name: resource.getrlimit(limit)[0] for name, limit in limits.items()}
    tight = [f"{name} {size(soft)}" for name, soft in found.items() if soft != _INFINITE]
    if tight:
        said = f"limited ({', '.join(tight)}): `shared` maps more addresses than it uses, and a large file"
        return Finding("address space", "warning", said, "ulimit -v unlimited -f unlimited")
    return Finding("address space", "ok", "unlimited")


def ptrace(root: Path = ROOT) -> Finding:
    """Look whether workers of `shared` may read each other's arrays (process_vm_readv)."""
    scope = number(root / "proc/sys/kernel/yama/ptrace_scope")
    if not scope:
        return Finding("ptrace", "ok", "processes of a user may read each other (no ptrace_scope of Yama)")
    if scope < 3 and _may_trace(root):
        return Finding("ptrace", "ok", f"ptrace_scope is {scope}, but this process has CAP_SYS_PTRACE")
    said = f"ptrace_scope is {scope}: workers of `shared` cannot read each other's arrays, and copy once more"
    cure = "push arrays from store.empty(key), which are not copied"
    if scope < 3:  # 3 stays until the next boot
        cure = f"sudo sysctl kernel.yama.ptrace_scope=0; or {cure}"
    return Finding("ptrace", "warning", said, cure)


def _may_trace(root: Path) -> bool:
    """Whether this process may trace any other."""
    for line in (content(root / "proc/self/status") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> _CAP_SYS_PTRACE & 1)
    return False
