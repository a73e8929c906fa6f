"""Take the mending of each former fault out of a copy of the tree, and see that buggify finds the fault.

    python -m mutants.found [--only WORD] > table.md

Run it in `tests`. Ends with 1 if a fault is not found, or if its seeds find something with the mending in.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

from .building import build, copied, run
from .former import FORMER, Former


def told(tree: Path, former: Former) -> str:
    """Return what buggify finds in a tree; empty: nothing."""
    if former.kind.startswith("test_"):
        for seed in former.seeds:
            where = f"tests/faults/test_buggify.py::{former.kind.format(seed)}"
            code, text = run(
                tree, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", where, seconds=300
            )
            if code:
                return f"seed {seed}: {last_line(text)}"
        return ""
    seeds = map(str, former.seeds)
    code, text = run(tree, "-m", "buggify.again", former.kind, *seeds, seconds=600)
    return last_line(text) if code else ""


def last_line(text: str) -> str:
    """Return the last line of a program."""
    return text.rpartition("\n")[2][:110]


def without(tree: Path, former: Former) -> str:
    """Return the findings without the mending."""
    path = tree / former.file
    text = path.read_text()
    path.write_text(text.replace(former.old, former.new))
    native = path.suffix != ".py"
    try:
        if native:
            build(tree)
        return told(tree, former)
    finally:
        path.write_text(text)
        if native:
            build(tree)


@click.command()
@click.option("--only", default="", help="a part of the commit, the file, or the fault")
def main(only: str) -> None:
    """Write a table of the faults, and of what finds each."""
    chosen = [one for one in FORMER if one.seeds and only in f"{one.commit} {one.file} {one.fault}"]
    click.echo("| mended in | fault | found by | with the mending out |\n|---|---|---|---|")
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder))
        for one in chosen:
            broken, whole = without(tree, one), told(tree, one)
            bad += not broken or bool(whole)
            how = broken.replace("|", "/") or "**not found**"
            how += f"; **with the mending in: {whole}**" if whole else ""
            click.echo(f"| {one.commit} | {one.fault} | {one.kind} {one.seeds} | {how} |")
            sys.stdout.flush()
    click.echo(f"\n{len(chosen)} faults")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
