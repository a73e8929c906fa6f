"""A job that must be gone after the test, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pace
import pytest
from launched import Job, gone_after


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with gone_after(tmp_path) as made:
        yield made


class Shown(NamedTuple):
    """The output of the command: its exit code, one view for each line, and its last line on stderr."""

    code: int
    views: list[dict[str, Any]]
    error: str

    @property
    def stores(self) -> list[dict[str, Any]]:
        """Rows of all jobs of the last view."""
        return [row for one in self.views[-1]["jobs"] for row in one["stores"]]


@pytest.fixture
def top() -> Callable[..., Shown]:
    """Run `kvstore top --json` in a process of its own."""

    def run(*arguments: str) -> Shown:
        command = [sys.executable, "-m", "kvstore", "top", "--json", "--interval", "0.1", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=pace.seconds(100), check=False)
        return Shown(
            done.returncode, [json.loads(one) for one in done.stdout.splitlines()], done.stderr.strip()
        )

    return run
