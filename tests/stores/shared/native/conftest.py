"""Programs in C that the tests here bring along."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pace
import paths
import pytest

FOLDERS = ("kvstore/stores/shared/native", "kvstore/observe/native", "kernels")

BuildC = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def build_c(tmp_path_factory: pytest.TempPathFactory) -> BuildC:
    """Build a program of this name from its text, with the headers of the region."""

    def build(name: str, text: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        (folder / f"{name}.c").write_text(text)
        where = [f"-I{paths.ROOT / one}" for one in FOLDERS]
        command = [
            *paths.c_compiler(),
            "-std=gnu11",
            "-O1",
            "-w",
            *where,
            f"{name}.c",
            "-o",
            name,
            "-pthread",
        ]
        subprocess.run(command, cwd=folder, check=True, timeout=pace.seconds(60))
        return folder / name

    return build
