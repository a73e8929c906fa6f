"""Static analysis of the C in our headers, by clang and gcc if they are here: analyze.py [COMPILER...].

Cython's megabytes are left out. Exits with 1 if there is a finding.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from itertools import product
from multiprocessing.pool import ThreadPool
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVERS = "kvstore/stores/parameter_server"
FOLDERS = [
    "kernels",
    "kvstore/observe/native",
    "kvstore/stores/shared/native",
    f"{SERVERS}/native",
    f"{SERVERS}/transport/native",
]

#: Findings that are none: file, text, why. One that no compiler has any more is to be taken out.
KNOWN = [
    (
        "replies.h",
        "null pointer (loaded from variable 'v')",
        "only a slice with a value has bytes",
    ),
    ("stream.h", "Division by zero", "without room there are no pieces to move"),
    ("stream.h", "leak of", "no message is under way when the sizes of the next one have come"),
    ("exchange_replies.h", "Division by zero", "kp_is_there lets no code pass where there are no parts"),
    ("block.h", "Assigned value is garbage", "an item has a source at least"),
    ("block.h", "Null pointer passed to 1st parameter", "what is updated has a place"),
    ("sum.h", "use of uninitialized value 's[", "there are as many sources as the item says"),
    ("overlap.h", "use of uninitialized value '*e_", "extents are written as far as `end`"),
]

# Of several instruction sets one is enough, but where the loops are; gcc would take minutes there, too.
ONE_LEVEL = "-DKV_ONE_LEVEL"
GCC = ["-fanalyzer", "-c", "-O0", "-Wno-unused-function", ONE_LEVEL]
CLANG = ["--analyze", "-Xclang", "-analyzer-opt-analyze-headers", "-Wno-everything"]


def usable(compiler: str) -> bool:
    """Return whether a compiler is here, and has an analyzer."""
    if shutil.which(compiler) is None:
        return False
    flag = "--analyze" if "clang" in compiler else "-fanalyzer"
    command = [compiler, flag, "-c", "-x", "c", "-", "-o", os.devnull]
    return subprocess.run(command, input="", text=True, capture_output=True, check=False).returncode == 0


def unit(folder: str) -> str:
    """Return one text with all headers that Cython includes from a folder."""
    sources = sorted([*(ROOT / folder).glob("*.pyx"), *(ROOT / folder).glob("*.pxi")])
    found = re.findall(
        r'^cdef extern from "(\w+\.h)"', "\n".join(path.read_text() for path in sources), re.MULTILINE
    )
    return "".join(f'#include "{name}"\n' for name in found if name != "Python.h")


def analyze(compiler: str, folder: str) -> list[str]:
    """Return what a compiler finds in a folder, once each."""
    flags = GCC
    if "clang" in compiler:
        flags = CLANG if folder == "kernels" else [*CLANG, ONE_LEVEL]
    includes = [f"-I{one}" for one in FOLDERS]
    command = [compiler, *flags, "-std=gnu11", "-D_GNU_SOURCE", *includes, "-x", "c", "-", "-o", os.devnull]
    done = subprocess.run(
        command, input=unit(folder), capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    lines = re.findall(r"^(\S+: (?:warning|error|fatal error): .*)", done.stdout + done.stderr, re.MULTILINE)
    if done.returncode and not lines:
        return [f"{folder}: {compiler} ended with {done.returncode}: {done.stderr[-500:]}"]
    ours = [line for line in dict.fromkeys(lines) if not line.startswith("/")]
    return [f"{compiler}: {line}" for line in ours if not any(is_known(line, *one) for one in KNOWN)]


def is_known(line: str, file: str, text: str, _: str) -> bool:
    """Return whether a finding is this known one."""
    place, _, found = line.partition(" ")
    return f"/{file}:" in f"/{place}" and text in found


def main() -> None:
    """Analyze all folders, with as many processes as there are cores."""
    compilers = [compiler for compiler in sys.argv[1:] or ["clang", "gcc"] if usable(compiler)]
    if not compilers:
        print("no compiler here has an analyzer (clang, or gcc since 10): nothing is analyzed")
        return
    with ThreadPool(len(os.sched_getaffinity(0))) as pool:
        found = [one for lines in pool.starmap(analyze, product(compilers, FOLDERS)) for one in lines]
    print("\n".join(found) or f"nothing found by {' and '.join(compilers)}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
