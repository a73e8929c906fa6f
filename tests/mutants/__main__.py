"""Apply each mutant to a copy of the tree, and report which run catches it.

    python -m mutants [--only WORD] [--python] [--seconds 60] [--side-by-side 2] [--write]

Run it in `tests`. It takes some seconds for each: a C module is built alone, without optimization. Ends
with 1 if one survives.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import click

from .building import ROOT, Extension, copied, run
from .table import MUTANTS, Mutant
from .table.mutant import PROCESSES, PROGRAMS, SIMULATED

PAGE = ROOT / "docs/reference/mutants.md"
HEAD = """# Mutants

Tests show their worth when the code is wrong. Each row is a small change of the code that breaks a
promise of [Stores](../stores.md), and its detector: the history of a job in the simulator, whose own checks
are off, or of real processes, judged by a model that knows nothing of the code
([decision 0029](../decisions/0029-histories.md)); or, where histories do not show it, a test, or a random
program that is compared with one process. Written by `python -m mutants --write`, run in `tests`.

"""
PLAYED = ["-m", "programs", "--seeds", "0:60", "--first", "--whole"]
PYTEST = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
TABLE = "| group | file | fault | caught by |\n|---|---|---|---|"


def caught(tree: Path, mutant: Mutant, seconds: float) -> str:
    """Return how a mutant is caught; empty: it survives."""
    if mutant.by == SIMULATED:
        jobs = ("-m", "mutants.simulations", str(seconds), mutant.group)
        code, told = run(tree, *jobs, seconds=2 * seconds + 60)
        return told.rpartition("\n")[2] if code else ""
    if mutant.by == PROGRAMS:
        code, told = run(tree, *PLAYED, seconds=1800)
        return program_of(told) if code else ""
    code, told = run(tree, *PYTEST, test_of(mutant), seconds=300)
    return judged(told, mutant.by.startswith(PROCESSES)) if code else ""


def test_of(mutant: Mutant) -> str:
    """Return the test that a row names."""
    return mutant.by.replace(PROCESSES + " ", "tests/faults/test_histories.py::test_")


def program_of(told: str) -> str:
    """Return the first program that differs, and in which store."""
    found = re.match(r"seed (\d+): ([^,]+),", told)
    return f"random program: {found[2]} (seed {found[1]})" if found else f"programs: {told[-100:]!r}"


def judged(told: str, history: bool) -> str:
    """Return which test has failed, and, if it is of a history, what that breaks."""
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", told, re.MULTILINE)
    if failed is None:
        return "tests that hang" if told == "it hangs" else f"pytest: {told[-100:]!r}"
    kind = re.search(r"^E +AssertionError: ([a-z ]+): ", told, re.MULTILINE)
    what = f"history of processes: {kind[1]}, " if history and kind else "test "
    return f"{what}`{failed[1]}`"


def tried(tree: Path, mutant: Mutant, seconds: float) -> str:
    """Apply a mutant, see whether it is caught, and take it back."""
    path = tree / mutant.file
    text = path.read_text()
    extension = Extension(tree, path) if path.suffix == ".h" else None
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        if extension:
            extension.build()
        return caught(tree, mutant, seconds)
    finally:
        path.write_text(text)
        if extension:
            extension.restore()


def row(mutant: Mutant, told: str) -> str:
    """Return a line of the table."""
    told = told.replace("|", "/") or "**survives**"
    return f"| {mutant.group} | {Path(mutant.file).name} | {mutant.why} | {told} |"


def results(chosen: list[Mutant], seconds: float, side_by_side: int) -> list[str]:
    """Try all, some at a time, each in a tree of its own."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(side_by_side) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for at in range(side_by_side):
            trees.put(copied(Path(folder) / str(at)))

        def one(mutant: Mutant) -> str:
            tree = trees.get()
            try:
                told = tried(tree, mutant, seconds)
            finally:
                trees.put(tree)
            click.echo(row(mutant, told))
            sys.stdout.flush()
            return told

        return list(pool.map(one, chosen))


def broken_without(chosen: list[Mutant], told: list[str]) -> Iterator[str]:
    """Return simulated jobs and tests that caught a mutant, and are broken in the code as it is, too."""
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder))
        for header in {Path(one.file).parent: one.file for one in chosen if one.file.endswith(".h")}.values():
            Extension(tree, tree / header).build()
        for group, seeds in caught_by_seeds(chosen, told).items():
            code, text = run(tree, "-m", "mutants.simulations", "600", group, *seeds, seconds=660)
            if code:
                yield f"{group}: {text.rpartition(chr(10))[2]}"
        tests = sorted({test_of(one) for one in chosen if one.by not in (SIMULATED, PROGRAMS)})
        if any(one.by == PROGRAMS for one in chosen):
            code, text = run(tree, *PLAYED, seconds=1800)
            if code:
                yield program_of(text)
        code, text = run(tree, *PYTEST, *tests, seconds=600) if tests else (0, "")
        if code:
            yield text[-2000:]


def caught_by_seeds(chosen: list[Mutant], told: list[str]) -> dict[str, set[str]]:
    """Return the simulated jobs that caught mutants of each group."""
    seeds: dict[str, set[str]] = {}
    for mutant, one in zip(chosen, told, strict=True):
        if mutant.by == SIMULATED and (found := re.search(r"\(seed (\d+)\)$", one)):
            seeds.setdefault(mutant.group, set()).add(found[1])
    return seeds


def summary(chosen: list[Mutant], told: list[str]) -> str:
    """Return how many there are, by what catches them."""
    how = Counter(one.split(":")[0].split(" `")[0] for one in told)
    names = {"": "survive", "history of a simulated job": "histories of simulated jobs"}
    names |= {"history of processes": "histories of processes", "test": "tests"}
    names |= {"random program": "random programs"}
    counts = ", ".join(f"{names.get(name, name)} {how[name]}" for name in sorted(how, reverse=True))
    return f"{len(chosen)} mutants: {counts}."


@click.command()
@click.option("--only", default="", help="a part of the group, the file, or the fault")
@click.option("--python", is_flag=True, help="only those that need no build")
@click.option("--seconds", default=60.0, help="at most, for the jobs of the simulator")
@click.option("--side-by-side", default=1, help="how many at a time")
@click.option("--write", is_flag=True, help="write the page")
def main(only: str, python: bool, seconds: float, side_by_side: int, write: bool) -> None:
    """Write a table of the mutants, and of how each is caught."""
    chosen = [one for one in MUTANTS if only in f"{one.group} {one.file} {one.why}"]
    chosen = [one for one in chosen if one.file.endswith(".py") or not python]
    told = results(chosen, seconds, side_by_side)
    for one in broken_without(chosen, told):
        raise click.ClickException(f"it is broken without a mutant, too: {one}")
    if write:
        rows = [TABLE, *map(row, chosen, told)]
        PAGE.write_text(f"{HEAD}{summary(chosen, told)}\n\n" + "\n".join(rows) + "\n")
    click.echo(summary(chosen, told))
    sys.exit("" in told)


if __name__ == "__main__":
    main()
