"""Fuzz what reads bytes in C, guided by coverage: python -m fuzz.guided, in `tests`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from fuzz.guided.seeds import SEEDS
from fuzz.guided.targets import FuzzError, build, clang, run


def main() -> int:
    asked = argparse.ArgumentParser(prog="python -m fuzz.guided", description=__doc__)
    asked.add_argument("--seconds", type=int, default=0, help="for each target; 60 if --cases is not given")
    asked.add_argument("--cases", type=int, default=-1, help="for each target")
    asked.add_argument("--corpus", type=Path, help="a folder that keeps inputs from one run to the next")
    asked.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(SEEDS))
    given = asked.parse_args()
    if unknown := set(given.targets) - set(SEEDS):
        asked.error(f"no target {', '.join(sorted(unknown))}: there are {', '.join(SEEDS)}")
    compiler = clang()
    if compiler is None:
        asked.error("no clang with libFuzzer is on the path: install clang and its compiler-rt")
    seconds = given.seconds or (60 if given.cases < 0 else 0)
    table = sys.stdout
    table.write("| target | cases | a second | edges | inputs kept |\n|---|---|---|---|---|\n")
    with tempfile.TemporaryDirectory() as folder:
        for name in given.targets or SEEDS:
            try:
                program = build(compiler, name, Path(folder))
                found = run(program, seconds, given.cases, given.corpus and given.corpus / name)
            except FuzzError as error:
                sys.stderr.write(f"{error}\n")
                return 1
            numbers = found.cases, found.a_second, found.edges, found.kept
            table.write(" | ".join([f"| {name}", *(f"{number:,}" for number in numbers)]) + " |\n")
            table.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
