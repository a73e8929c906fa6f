"""Apply each mutant to a copy of the tree, build it if it is C, and run jobs until their histories break.

    python -m mutants [--only WORD] [--python] [--seconds 20] > table.md

Run it in `tests`. It takes a minute for each mutant in C, and some seconds for each in Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from .table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]

FOLDERS = ["kvstore", "kernels", "tests", "build"]
FILES = ["setup.py", "pyproject.toml", "README.md", "LICENSE"]


def copied(folder: Path) -> Path:
    """Copy what is needed."""
    for name in FOLDERS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True)
    for name in FILES:
        shutil.copy2(ROOT / name, folder / name)
    return folder


def run(tree: Path, *arguments: str, seconds: float) -> tuple[int, str]:
    """Run Python in the copy; return its exit code, 124 if it hangs, and its last line."""
    where = os.pathsep.join([str(tree), str(tree / "tests"), str(tree / "tests/support")])
    environment = {**os.environ, "PYTHONPATH": where, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    try:
        ended = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return 124, "it hangs"
    return ended.returncode, (ended.stdout.strip() or ended.stderr.strip()).rpartition("\n")[2][:110]


def build(tree: Path) -> None:
    """Build the extensions of the copy anew."""
    code, told = run(tree, "setup.py", "build_ext", "--inplace", "-j2", seconds=600)
    if code:
        raise RuntimeError(told)


def caught(tree: Path, mutant: Mutant, seconds: float) -> str:
    """Return how a mutant is caught; empty: it survives."""
    if mutant.group != "phases":
        jobs = ("mutants.simulations", str(seconds), mutant.group)
        code, told = run(tree, "-m", *jobs, seconds=seconds + 60)
        if code:
            return told
    which = "shared" if mutant.group == "phases" else "servers"
    pytest = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", which]
    code, told = run(tree, *pytest, "tests/faults/test_histories.py", seconds=300)
    return told if code else ""


def tried(tree: Path, mutant: Mutant, seconds: float) -> str:
    """Apply a mutant, see whether it is caught, and take it back."""
    path = tree / mutant.file
    text = path.read_text()
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        if path.suffix == ".h":
            build(tree)
        return caught(tree, mutant, seconds)
    finally:
        path.write_text(text)


@click.command()
@click.option("--only", default="", help="a part of the group, the file, or what is broken")
@click.option("--python", is_flag=True, help="only those that need no build")
@click.option("--seconds", default=20.0, help="for the jobs of the simulator")
def main(only: str, python: bool, seconds: float) -> None:
    """Write a table of the mutants, and of how each is caught."""
    chosen = [one for one in MUTANTS if only in f"{one.group} {one.file} {one.why}"]
    chosen = [one for one in chosen if one.file.endswith(".py") or not python]
    click.echo("| group | file | what is broken | caught by |\n|---|---|---|---|")
    left = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder))
        for one in chosen:
            told = tried(tree, one, seconds)
            left += not told
            name = Path(one.file).name
            click.echo(f"| {one.group} | {name} | {one.why} | {told.replace('|', '/') or '**survives**'} |")
            sys.stdout.flush()
    click.echo(f"\n{len(chosen)} mutants, {left} survive")


if __name__ == "__main__":
    main()
