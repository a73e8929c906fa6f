"""Limits of a process, set for a real one; ptrace, from trees of files."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from observation.checks import finding

from kvstore.observe.doctor import machine

Tree = Callable[[Mapping[str, str]], Path]

LIMIT = (
    "import resource; resource.setrlimit(resource.{name}, ({soft}, resource.getrlimit(resource.{name})[1]))"
)


@pytest.mark.parametrize(
    "limits",
    [
        [
            ("RLIMIT_MEMLOCK", 64 << 10, "locked memory", "64 KB", "ulimit -l"),
            ("RLIMIT_NOFILE", 200, "open files", "200", "ulimit -n"),
            ("RLIMIT_AS", 64 << 30, "address space", "RLIMIT_AS 64 GB", "ulimit -v"),
        ],
        [("RLIMIT_FSIZE", 1 << 30, "address space", "RLIMIT_FSIZE 1 GB", "-f unlimited")],
    ],
)
def test_a_limit_is_a_warning(
    doctor: Callable[..., Any], limits: list[tuple[str, int, str, str, str]]
) -> None:
    before = "\n".join(LIMIT.format(name=name, soft=soft) for name, soft, *_ in limits)
    found = doctor("--no-tests", before=before).found
    for _, _, subject, text, cure in limits:
        assert found[subject]["level"] == "warning"
        assert text in found[subject]["text"]
        assert cure in found[subject]["cure"]


def limits(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int = resource.RLIM_INFINITY) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (soft, hard))


def test_no_limits_are_fine(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch, resource.RLIM_INFINITY)
    found = [
        finding(machine.locked_memory, tree({})),
        finding(machine.open_files),
        finding(machine.address_space),
    ]
    assert [(one.level, one.text) for one in found] == [("ok", "unlimited")] * 3


def test_8_mb_of_locked_memory_are_little_where_there_is_infiniband(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits(monkeypatch, 8 << 20)
    assert finding(machine.locked_memory, tree({})).level == "ok"
    assert (
        finding(machine.locked_memory, tree({"sys/class/infiniband/mlx5_0/fw_ver": "1"})).level == "warning"
    )


def test_the_command_for_files_is_one_that_the_hard_limit_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch, 256, 512)
    assert finding(machine.open_files).cure == "ulimit -n 512"
    limits(monkeypatch, 256)
    assert finding(machine.open_files).cure == "ulimit -n 4096"


NONE, TRACES = "Name:\tpython\nCapEff:\t0000000000000000\n", "CapEff:\t0000000000080000\n"


@pytest.mark.parametrize(
    ("scope", "status", "level", "cure"),
    [
        (None, NONE, "ok", ""),
        ("0", NONE, "ok", ""),
        ("1", NONE, "warning", "sysctl kernel.yama.ptrace_scope=0"),
        ("1", TRACES, "ok", ""),
        ("2", NONE, "warning", "sysctl kernel.yama.ptrace_scope=0"),
        ("2", TRACES, "ok", ""),
        ("3", NONE, "warning", "store.empty"),
        ("3", TRACES, "warning", "store.empty"),
    ],
)
def test_ptrace(tree: Tree, scope: str | None, status: str, level: str, cure: str) -> None:
    files = {"proc/self/status": status}
    if scope is not None:
        files["proc/sys/kernel/yama/ptrace_scope"] = f"{scope}\n"
    found = finding(machine.ptrace, tree(files))
    assert found.level == level
    assert cure in found.cure
    assert "sysctl" not in found.cure or scope != "3"  # nothing can change it then
