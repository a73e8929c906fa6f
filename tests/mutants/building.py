"""Copies of the tree, and the extension that has changed, built in seconds, without optimization."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]

FOLDERS = ["kvstore", "kernels", "tests", "build"]
FILES = ["setup.py", "pyproject.toml", "README.md", "LICENSE"]
INCLUDED = ["kvstore/observe/native", "kernels"]  # by each extension that is mutated, besides its own folder
#: Asked for here, for two threads must not ask first at the same time: one may be told None.
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


def copied(folder: Path) -> Path:
    """Copy the required files."""
    for name in FOLDERS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True)
    for name in FILES:
        shutil.copy2(ROOT / name, folder / name)
    return folder


def run(tree: Path, *arguments: str, seconds: float) -> tuple[int, str]:
    """Run Python in the copy; return its exit code, 124 if it hangs, and its output."""
    where = os.pathsep.join([str(tree), str(tree / "tests"), str(tree / "tests/support")])
    environment = {**os.environ, "PYTHONPATH": where, "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            told, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return 124, "it hangs"
    return process.returncode, told.strip()


def build(tree: Path) -> None:
    """Build the extensions of the copy anew, as they are installed."""
    code, told = run(tree, "setup.py", "build_ext", "--inplace", "-j2", seconds=600)
    if code:
        raise RuntimeError(told[-2000:])


class Extension:
    """The extension that includes a header; what Cython makes of it is the same for all their changes."""

    def __init__(self, tree: Path, header: Path) -> None:
        self._tree, self._folder = tree, header.parent
        self._source = next(header.parent.glob("*.pyx"))
        self._made = self._source.with_suffix(".made.c")
        self._module = self._source.with_suffix(SUFFIX)
        self._kept = self._module.with_suffix(".kept")

    def build(self) -> None:
        """Build it in place, without optimization; the earlier file is kept."""
        self._module.rename(self._kept)
        if not self._made.exists():
            include = ["-I", str(self._folder), "-I", str(self._tree / "kernels")]
            self._run(
                sys.executable, "-m", "cython", "-3", *include, str(self._source), "-o", str(self._made)
            )
        flags = ["-shared", "-fPIC", "-O0", "-std=gnu11", "-fwrapv", "-pthread", "-w", "-D_GNU_SOURCE"]
        folders = [self._folder, *(self._tree / one for one in INCLUDED), np.get_include()]
        include = [f"-I{one}" for one in [*folders, sysconfig.get_path("include")]]
        compiler = shlex.split(sysconfig.get_config_var("CC"))
        self._run(*compiler, *flags, *include, str(self._made), "-o", str(self._module))

    def restore(self) -> None:
        """Have the kept one back."""
        if self._kept.exists():
            self._kept.replace(self._module)

    def _run(self, *command: str) -> None:
        ended = subprocess.run(command, cwd=self._tree, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RuntimeError(ended.stderr[-2000:])
