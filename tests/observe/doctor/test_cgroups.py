"""Limits of control groups, from trees of files like those of several systems."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from kvstore.observe.doctor import system_files

Tree = Callable[[Mapping[str, str]], Path]

V2 = {
    "proc/self/cgroup": "0::/user/job\n",
    "sys/fs/cgroup/user/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/user/job/cpu.max": "max 100000\n",
    "sys/fs/cgroup/user/memory.max": "2000000000\n",
    "sys/fs/cgroup/user/memory.current": "500000000\n",
    "sys/fs/cgroup/user/job/memory.max": "1800000000\n",
    "sys/fs/cgroup/user/job/memory.current": "100000000\n",
}
V1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",  # the path of the host is not in the container
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "73741824\n",
}
NO_LIMITS = {
    "proc/self/cgroup": "2:cpu:/\n4:memory:/group\n0::/\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/group/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/cpu.max": "max 100000\n",
    "sys/fs/cgroup/memory.max": "max\n",
}


def test_version_2_counts_the_groups_around(tree: Tree) -> None:
    root = tree(V2)
    assert system_files.cgroup_processors(root) == 1.5
    limit = system_files.cgroup_memory(root)
    assert limit == system_files.MemoryLimit(2_000_000_000, 1_500_000_000, 2)  # the least that is left


def test_version_1_in_a_container(tree: Tree) -> None:
    root = tree(V1)
    assert system_files.cgroup_processors(root) == 0.5
    assert system_files.cgroup_memory(root) == system_files.MemoryLimit(1 << 30, (1 << 30) - 73741824, 1)


def test_no_limits(tree: Tree) -> None:
    root = tree(NO_LIMITS)
    assert system_files.cgroup_processors(root) is None
    assert system_files.cgroup_memory(root) is None


def test_a_system_without_groups(tree: Tree) -> None:
    root = tree({})
    assert system_files.cgroup_processors(root) is None
    assert system_files.cgroup_memory(root) is None


def test_a_path_out_of_the_namespace_stays_below_the_mount_point(tree: Tree) -> None:
    root = tree({**V2, "proc/self/cgroup": "0::/../../user\n", "sys/fs/cgroup/cpu.max": "300000 100000"})
    assert system_files.cgroup_processors(root) == 3
