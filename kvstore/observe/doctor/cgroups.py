"""Limits of the control groups of this process, of version 1 and of version 2.

A limit of a group is a limit of the groups in it, too. In a container /proc/self/cgroup can have a path of
the host that does not exist: then the group of the container is at the mount point.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from .system_files import ROOT, number, text

_MOUNT = Path("sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 has a number near the largest for no limit


class MemoryLimit(NamedTuple):
    """The bytes that a group may use, those that it uses, and the version of its hierarchy."""

    limit: int
    used: int
    version: int

    @property
    def left(self) -> int:
        """The bytes that are left."""
        return max(0, self.limit - self.used)


def processors(root: Path = ROOT) -> float | None:
    """Return the number of processors that the groups allow; None without a limit."""
    quotas = [(text(folder / "cpu.max") or "").split() for folder in _folders(root, "")]
    quotas += [
        [text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        for folder in _folders(root, "cpu")
    ]
    limits = [list(map(int, quota)) for quota in quotas if quota and all(map(str.isdecimal, quota))]
    return min((allowed / period for allowed, period in limits if period), default=None)


def memory(root: Path = ROOT) -> MemoryLimit | None:
    """Find the group with the least memory left; None without a limit."""
    found = []
    for version, controller, most, now in (
        (2, "", "memory.max", "memory.current"),
        (1, "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for folder in _folders(root, controller):
            limit = number(folder / most)
            if limit is not None and limit < _UNLIMITED:
                found.append(MemoryLimit(limit, number(folder / now) or 0, version))
    return min(found, key=lambda one: one.left, default=None)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the group of this process and of its parents; controller "" is version 2."""
    path = _path(root, controller)
    if path is None:
        return
    for base in (root / _MOUNT / controller,) if controller else (root / _MOUNT, root / _MOUNT / "unified"):
        yield base
        inner = base
        for part in path.parts[1:]:
            inner /= part
            yield inner


def _path(root: Path, controller: str) -> PurePosixPath | None:
    """Return the path of the group of this process below the mount point of its hierarchy."""
    for line in (text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller in names.split(","):
            return PurePosixPath("/" if ".." in path else path)
    return None
