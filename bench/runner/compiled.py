"""C helpers of the bench, built when they are needed, in a folder that is removed with the process."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path


def compiler() -> str | None:
    """Find the C compiler: ``$CC``, or ``cc``."""
    return shutil.which(shlex.split(os.environ.get("CC", "") or "cc")[0])


@functools.cache
def load(source: Path, *flags: str) -> ctypes.CDLL:
    """Compile a C file for this processor and load it; once."""
    return ctypes.CDLL(str(build(source, *flags)))


@functools.cache
def build(source: Path, *flags: str) -> Path:
    """Compile a C file for this processor.

    Raises
    ------
    RuntimeError
        There is no compiler, or it fails.
    """
    if compiler() is None:
        raise RuntimeError("no C compiler: set CC or install cc")
    target = _folder() / f"{source.parent.name}-{source.stem}.so"
    command = [*shlex.split(os.environ.get("CC", "") or "cc"), "-O3", "-march=native", "-fno-math-errno"]
    command += ["-fno-trapping-math", "-shared", "-fPIC", "-pthread", "-o", str(target), str(source), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
    return target


def discard() -> None:
    """Remove the compiled files; also called at exit."""
    if _folder.cache_info().currsize:
        shutil.rmtree(_folder(), ignore_errors=True)
        _folder.cache_clear()


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="kvstore-bench-")
    atexit.register(discard)
    return Path(folder)
