"""Sizes that are too large are refused before the start, with the needed and the available memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import ConfigError
from kvstore.observe.bench.key_lists import BenchKey, load_keys
from kvstore.observe.bench.settings import (
    BenchSettings,
    available_memory,
    check_memory,
    chosen_settings,
    needed_memory,
)

GB = 1 << 30
KEYS = [BenchKey("w", (GB // 4,), "float32")]


def settings(store: str = "shared", workers: int = 2, **changes: str) -> BenchSettings:
    options = {"method": "pushpull", "compression": None, "optimizer": None, **changes}
    return chosen_settings(store, workers, None, rounds=1, **options)  # type: ignore[arg-type]


def machine(folder: Path, left: int) -> Path:
    (folder / "proc").mkdir(parents=True)
    (folder / "proc/meminfo").write_text(f"MemTotal: {64 * GB >> 10} kB\nMemAvailable: {left >> 10} kB\n")
    return folder


def test_the_error_says_how_much_is_needed_and_there(tmp_path: Path) -> None:
    root = machine(tmp_path, 2 * GB)
    with pytest.raises(ConfigError, match=r"about 6\.\d GB .* 1 GB of gradients in 2 workers, and 2 GB are"):
        check_memory(settings(), KEYS, [], root)
    with pytest.raises(ConfigError, match=r"--peers none needs 6\.\d GB"):
        check_memory(settings(), KEYS, ["gloo"], root)
    check_memory(settings(), load_keys("resnet50"), ["gloo", "mpi"], root)


def test_enough(tmp_path: Path) -> None:
    check_memory(settings(), KEYS, [], machine(tmp_path, 8 * GB))


def test_what_the_system_does_not_say_is_not_checked(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None
    check_memory(settings(), KEYS, [], tmp_path)


def test_a_limit_of_a_container_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, 32 * GB)
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory.max").write_text(f"{3 * GB}\n")
    (root / "sys/fs/cgroup/memory.current").write_text(f"{GB}\n")
    assert available_memory(root) == 2 * GB


def test_more_of_anything_needs_more() -> None:
    least = needed_memory(settings("local", 1), KEYS, [])
    plain = needed_memory(settings(), KEYS, [])
    assert 2 * GB < least < plain
    for more in (
        settings(workers=3),
        settings(method="push-pull"),
        settings(optimizer="adam"),
        settings(compression="2bit"),
        settings("dist_sync"),
    ):
        assert needed_memory(more, KEYS, []) > plain
    assert needed_memory(settings(), KEYS, ["gloo"]) > plain + 2 * GB
