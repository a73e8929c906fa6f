"""The analysis of the C in .ci/analyze.py: it reads all headers, and a finding ends it."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "analyze.py"
ANALYSIS = runpy.run_path(str(SCRIPT))


def usable() -> list[str]:
    return [compiler for compiler in ("clang", "gcc") if ANALYSIS["usable"](compiler)]


def test_every_header_is_read() -> None:
    compiler = shutil.which("cc") or pytest.skip("there is no C compiler")
    read: set[str] = set()
    for folder in ANALYSIS["FOLDERS"]:
        command = [
            *(compiler, "-MM", "-x", "c", "-", "-D_GNU_SOURCE"),
            *(f"-I{one}" for one in ANALYSIS["FOLDERS"]),
        ]
        made = subprocess.run(
            command, input=ANALYSIS["unit"](folder), text=True, capture_output=True, check=True, cwd=ROOT
        )
        read |= set(re.findall(r"\S+\.h", made.stdout))
    ours = {
        str(path.relative_to(ROOT)) for top in ("kernels", "kvstore") for path in ROOT.glob(f"{top}/**/*.h")
    }
    assert ours - read == set()


@pytest.mark.parametrize("compiler", usable())
def test_a_finding_ends_it(tmp_path: Path, compiler: str) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci")
    for folder in ANALYSIS["FOLDERS"]:
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "kernels" / "_cpu.pyx").write_text('cdef extern from "run.h" nogil:\n    pass\n')
    header = tmp_path / "kernels" / "run.h"
    for text, rc in ((" ", 0), ("x = NULL;", 1)):
        header.write_text(
            f"#include <stddef.h>\nstatic int broken(int *x) {{ {text} return *x; }}\n"
            "int use(int *x) { return broken(x); }\n"
        )
        done = subprocess.run(
            [sys.executable, ".ci/analyze.py", compiler],
            cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == rc, done.stdout + done.stderr
        assert ("run.h" in done.stdout) == bool(rc)
