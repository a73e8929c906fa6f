"""Where kvstore cannot be built or run, one message names the missing part and how to get it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pace
import pytest

ROOT = Path(__file__).parents[2]

BUILD = """
import sys, sysconfig
from setuptools.build_meta import build_wheel
{before}
build_wheel("out")
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Copy the files that a build needs, without built files."""
    built = shutil.ignore_patterns("__pycache__", "*.so", "_cpu.c", "_shared.c")
    for folder in ("kernels", "kvstore"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=built)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def failed_build(tree: Path, before: str = "", **environment: str) -> str:
    """Build a wheel that cannot be built, and return the last message."""
    command = [sys.executable, "-c", BUILD.format(before=before)]
    done = subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=pace.seconds(120),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert list(tree.rglob("*.so")) == []
    return done.stderr


def says_what_to_install(text: str) -> bool:
    packages = ("build-essential python3-dev", "gcc python3-devel", "conda-forge c-compiler")
    return all(words in text for words in (*packages, "Wheels need no compiler"))


def test_a_path_without_a_compiler(tree: Path) -> None:
    (tree / "empty").mkdir()
    said = failed_build(tree, PATH=str(tree / "empty"))
    assert "there is no C compiler here" in said
    assert says_what_to_install(said)


def test_a_compiler_that_is_not_where_the_environment_says(tree: Path) -> None:
    said = failed_build(tree, CC="/nowhere/cc")
    assert "'/nowhere/cc' is not found" in said
    assert says_what_to_install(said)


def test_a_python_without_its_headers(tree: Path) -> None:
    said = failed_build(tree, before="sysconfig.get_path = lambda name: f'/nowhere/{name}'")
    assert "/nowhere/include/Python.h is missing" in said
    assert says_what_to_install(said)


def test_a_build_on_another_system(tree: Path) -> None:
    said = failed_build(tree, before="sysconfig.get_config_vars(); sys.platform = 'darwin'")
    assert "kvstore runs on Linux only, and this is darwin" in said


def test_an_import_on_another_system(tree: Path) -> None:
    paths = [str(tree), str(Path(numpy.__file__).parents[1])]
    program = f"import sys; sys.path[:0] = {paths}; import numpy; sys.platform = 'darwin'; import kvstore"
    # -S: the kernels of this environment's own kvstore are not seen.
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=pace.seconds(60))
    assert "ImportError: kvstore runs on Linux only, and this is darwin" in done.stderr
