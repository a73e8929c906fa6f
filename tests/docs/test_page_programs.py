"""The programs that a page shows are files, which run as the comment before the program says."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pace
import pytest

ROOT = Path(__file__).parents[2]
SHOWN = re.compile(
    r"^<!-- not run: here\. Tests run (programs/\S+) with: (.+) -->\n```python\n((?:(?!^```).*\n)*)^```$",
    re.MULTILINE,
)
LAUNCHERS = {
    "kvstore": ["-m", "kvstore.launch"],
    "torchrun": ["-m", "torch.distributed.run"],
    "python": [],
}


class Program(NamedTuple):
    """A program of a page, the command that runs it, and its text on the page."""

    path: Path
    command: str
    text: str


def find_programs() -> list[Program]:
    return [
        Program(page.parent / name, command, text)
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for name, command, text in SHOWN.findall(page.read_text())
    ]


def python_for(program: Path) -> str:
    """Return a Python that has the framework of a program."""
    framework, _, _ = program.stem.partition("_")
    variable, module = {
        "pytorch": ("KVSTORE_TEST_TORCH", "torch"),
        "jax": ("KVSTORE_TEST_JAX", "jax"),
    }[framework]
    named = os.environ.get(variable, "")
    if not named and importlib.util.find_spec(module) is None:
        pytest.skip(f"install {module}, or name a python that has it in {variable}")
    return named or sys.executable


PROGRAMS = find_programs()


def test_each_file_is_on_a_page() -> None:
    assert {program.path for program in PROGRAMS} == set((ROOT / "docs").rglob("programs/*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.path.stem)
def test_the_page_shows_the_file(program: Program) -> None:
    assert program.path.read_text() == program.text


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.path.stem)
def test_the_program_runs(program: Program, tmp_path: Path) -> None:
    launcher, *words = shlex.split(program.command)
    command = [python_for(program.path), *LAUNCHERS[launcher], *words, str(program.path)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=pace.seconds(300), check=False
    )
    assert done.returncode == 0, done.stderr
    assert "worker 1 of 2" in done.stdout
