"""Cases that were measured earlier, kept by ``--add``: a long measurement is made in parts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bench.cases.common import Case
from bench.runner import machine, run
from bench.runner.rounds import Measured


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--add``."""
    parser.add_argument("--add", action="store_true", help="keep the other cases of what --write names")


def read(name: str, cases: Iterable[Case]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the written cases, each with its row, without cases that no longer exist."""
    path = run.results(name)
    there = path.with_name(f"{path.name}.json")
    known = {case.name: case for case in cases}
    for row in json.loads(there.read_text())["cases"] if there.exists() else []:
        if row["case"] in known:
            yield known[row["case"]], row


def measured(case: Case, row: dict[str, Any], timed: Sequence[str]) -> Measured:
    """Return the `Measured` of a row."""
    figures = {one: row[one] for one in (*timed, "variants", "others", "wrong")}
    return Measured(case, probes=[machine.Probe(**probe) for probe in row["probes"]], **figures)


def newest(found: Iterable[Any], cases: Iterable[Case]) -> list[Any]:
    """Keep only the newest result of each case, in the order of the cases."""
    last = {m.case.name: m for m in found}
    return [last[case.name] for case in cases if case.name in last]
