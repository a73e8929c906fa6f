"""Files of /proc and /sys, below a folder that tests choose; the limits of control groups.

Groups are those of this process, of version 1 and of version 2. A limit of a group is a limit of the groups
in it, too. In a container /proc/self/cgroup can have a path of the host that does not exist: then the group
of the container is at the mount point.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")

_MOUNT = Path("sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 has a number near the largest for no limit


def text(path: Path) -> str | None:
    """Return the content of a file without the blanks around it; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def number(path: Path) -> int | None:
    """Return the integer in a file; None if it holds anything else."""
    found = text(path)
    return int(found) if found and re.fullmatch(r"-?[0-9]+", found) else None


def chosen(path: Path) -> str | None:
    """Return the word that the kernel writes in brackets: ``always [madvise] never``."""
    match = re.search(r"\[(\w+)\]", text(path) or "")
    return match[1] if match else None


def field(path: Path, name: str) -> str | None:
    """Return the value in a line such as ``CapEff: 0000000000080000``."""
    match = re.search(rf"^{name}:\s+(.*)$", text(path) or "", re.MULTILINE)
    return match[1] if match else None


def kilobytes(path: Path, name: str) -> int | None:
    """Return the bytes of a line such as ``MemTotal:  123 kB``."""
    value = (field(path, name) or "").removesuffix(" kB")
    return int(value) << 10 if value.isdecimal() else None


def size(nbytes: int) -> str:
    """Return a number of bytes with its binary unit."""
    for unit, shift in (("GB", 30), ("MB", 20), ("KB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.1f}".removesuffix(".0") + f" {unit}"
    return f"{nbytes} bytes"


class MemoryLimit(NamedTuple):
    """The bytes that a control group may use, those that are left, and the version of its hierarchy."""

    limit: int
    left: int
    version: int


def cgroup_processors(root: Path = ROOT) -> float | None:
    """Return the number of processors that the control groups allow; None without a limit."""
    quotas = [(text(folder / "cpu.max") or "").split() for folder in _cgroup_folders(root, "")]
    quotas += [
        [text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        for folder in _cgroup_folders(root, "cpu")
    ]
    limits = [list(map(int, quota)) for quota in quotas if quota and all(map(str.isdecimal, quota))]
    return min((allowed / period for allowed, period in limits if period), default=None)


def cgroup_memory(root: Path = ROOT) -> MemoryLimit | None:
    """Find the control group with the least memory left; None without a limit."""
    found = []
    for version, controller, most, used in (
        (2, "", "memory.max", "memory.current"),
        (1, "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for folder in _cgroup_folders(root, controller):
            limit = number(folder / most)
            if limit is not None and limit < _UNLIMITED:
                left = max(0, limit - (number(folder / used) or 0))
                found.append(MemoryLimit(limit, left, version))
    return min(found, key=lambda one: one.left, default=None)


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the group of this process and of its parents; controller "" is version 2."""
    bases = (root / _MOUNT / controller,) if controller else (root / _MOUNT, root / _MOUNT / "unified")
    for line in (text(root / "proc/self/cgroup") or "").splitlines():
        names, _, path = line.partition(":")[2].partition(":")
        if controller in names.split(","):
            parts = PurePosixPath("/" if ".." in path else path).parts[1:]
            yield from (base.joinpath(*parts[:depth]) for base in bases for depth in range(len(parts) + 1))
            return
