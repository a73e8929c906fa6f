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


def pieces(text: str, separator: str) -> list[str]:
    """Split at separators that stand in no brackets."""
    found, depth = [""], 0
    for one in text:
        depth += (one in "([{") - (one in ")]}")
        if one == separator and not depth:
            found.append("")
        else:
            found[-1] += one
    return [one for one in found if one.strip()]


def inside(text: str, start: int) -> str:
    """Return what stands in the brackets that open before `start`."""
    depth, end = 1, start
    while depth:
        depth += (text[end] in "([{") - (text[end] in ")]}")
        end += 1
    return text[start : end - 1]


def fields_in_c() -> dict[str, int]:
    """Return how many fields the structs of our headers have."""
    found = {}
    for folder in ANALYSIS["FOLDERS"]:
        for path in (ROOT / folder).glob("*.h"):
            text = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(), flags=re.DOTALL)
            for body, name in re.findall(r"typedef struct\s*\w*\s*\{([^{}]*)\}\s*(\w+);", text):
                found[name] = sum(len(pieces(one, ",")) for one in pieces(body, ";"))
    return found


@pytest.mark.parametrize("folder", ANALYSIS["FOLDERS"])
def test_what_makes_a_struct_has_all_its_fields(folder: str) -> None:
    """Cython leaves out values for which it knows no field, without a word."""
    in_c = fields_in_c()
    sources = [path.read_text() for end in ("pyx", "pxi") for path in (ROOT / folder).glob(f"*.{end}")]
    declared = {
        name: sum(len(pieces(line, ",")) for line in body.strip().splitlines())
        for text in sources
        for name, body in re.findall(r"ctypedef struct (\w+):\n((?:        .*\n)+)", text)
    }
    wrong = []
    for text in sources:
        for made in re.finditer(r"\b(k[pv]_\w+)\(", text):
            name = made[1]
            if name not in declared:
                continue
            given = len(pieces(inside(text, made.end()), ","))
            if not given == declared[name] == in_c[name]:
                wrong.append(f"{name}: {given} values, {declared[name]} fields in Cython, {in_c[name]} in C")
    assert not wrong
