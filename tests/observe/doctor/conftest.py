"""A tree of files that stands for /proc and /sys, and the command in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pace
import pytest


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[Mapping[str, str]], Path]:
    """Write files below a folder that takes the place of the root: `tree({"proc/meminfo": "..."})`."""

    def make(files: Mapping[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "root"

    return make


class Report(NamedTuple):
    """The output of the command with --json: its exit code, and its findings by subject."""

    code: int
    found: dict[str, dict[str, str]]


@pytest.fixture
def doctor(tmp_path: Path) -> Callable[..., Report]:
    """Run `kvstore doctor --json` in a new process, which runs the lines of `before` first."""

    def run(*arguments: str, before: str = "") -> Report:
        code = f"{before}\nfrom kvstore.launch.cli import main; main()"
        command = [sys.executable, "-c", code, "doctor", "--json", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=pace.seconds(100), check=False
        )
        assert not done.stderr, done.stderr
        found = {one["subject"]: one for one in json.loads(done.stdout)}
        return Report(done.returncode, found)

    return run
