"""The table of faults, as JSON, to which runs can be added, and as a page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from bench.runner import table

from .cells import FAULTS, STORES, Cell, impossible
from .trial import Outcome

_HEAD = ["fault", "runs", "wrong", "hangs", "leftovers", "p50", "p99", "worst"]
_FOUND = 20  # bad runs of a cell with a description in the JSON


@dataclass
class Row:
    """All runs of a cell so far."""

    cell: Cell
    runs: int = 0
    next_seed: int = 0
    missed: int = 0
    wrong: list[int] = field(default_factory=list)  # seeds
    hangs: list[int] = field(default_factory=list)
    leftovers: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each surviving worker and run
    found: list[list[Any]] = field(default_factory=list)  # seed and description

    def add(self, outcome: Outcome) -> None:
        """Add a run."""
        self.next_seed = max(self.next_seed, outcome.seed + 1)
        if outcome.missed:
            self.missed += 1
            self._say(outcome.seed, outcome.missed)
            return
        self.runs += 1
        self.seconds += [round(one, 4) for one in outcome.seconds]
        for name in ("wrong", "hangs", "leftovers"):
            if texts := getattr(outcome, name):
                getattr(self, name).append(outcome.seed)
                self._say(outcome.seed, f"{name}: {texts[0]}")

    def _say(self, seed: int, text: str) -> None:
        if len(self.found) < _FOUND:
            self.found.append([seed, text[:400]])


class Table:
    """The rows of all cells with runs, by cell, in a file."""

    def __init__(self, path: Path | None = None) -> None:
        self.rows: dict[Cell, Row] = {}
        self.calls: list[dict[str, Any]] = []  # calls of the program, with their conditions
        if path is not None and path.exists():
            content = json.loads(path.read_text())
            self.calls = content["calls"]
            for one in content["cells"]:
                cell = Cell(one.pop("store"), one.pop("fault"), one.pop("load"))
                self.rows[cell] = Row(cell, **one)

    def row(self, cell: Cell) -> Row:
        """Return the row of a cell."""
        return self.rows.setdefault(cell, Row(cell))

    def to_json(self) -> str:
        """Write a line for each cell."""
        rows = sorted(self.rows.values(), key=lambda row: _place(row.cell))
        names = [one.name for one in fields(Row) if one.name != "cell"]
        content = ({**row.cell._asdict(), **{name: getattr(row, name) for name in names}} for row in rows)
        return table.lines({"calls": self.calls}, "cells", content)


def _place(cell: Cell) -> tuple[int, int, int]:
    return cell.load, STORES.index(cell.store), list(FAULTS).index(cell.fault)


def page(of: Table, soak: str = "") -> str:
    """Write the page."""
    parts = ["# Faults", _about(of), *_faults()]
    for load in sorted({cell.load for cell in of.rows}):
        parts.append(f"## With {load} other busy processes" if load else "## Without other busy processes")
        for store in STORES:
            parts += _section(of, store, load)
    parts += [*_bad(of), soak]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _about(of: Table) -> str:
    rows = of.rows.values()
    sums = {name: sum(len(getattr(row, name)) for row in rows) for name in ("wrong", "hangs", "leftovers")}
    said = "{wrong} wrong, {hangs} with hangs, {leftovers} with leftovers".format(**sums)
    how = " ".join(_measured(of.calls))
    return f"""\
Small jobs of 2 or 3 workers (and 1 or 2 servers), each with one fault at a random instant, and their
outcomes. {sum(row.runs for row in rows)} runs: {said}. Written by `python -m
bench faults --write faults`; the numbers are in
[bench/results/faults.json](../../bench/results/faults.json).

{how}

- **wrong**: runs in which a value, an error or an exit differs from the promises in [Stores](../stores.md).
  Each call is recorded, and the [history](../decisions/0029-histories.md) is checked: no push is lost or
  applied twice, and rounds are complete and equal for all workers.
- **hangs**: runs in which a worker raised its error later than promised, or a process did not end. The
  promise is the time after which a process is lost, plus 3 s, and more on a busy machine. For a killed
  scheduler without a journal it is three times the first part: rounds do not need the scheduler, so the
  servers end first, and then the workers detect the loss of the servers.
- **leftovers**: runs after which a name of kvstore's in `/dev/shm`, a file in `$TMPDIR`, or a server or
  scheduler was left. MPICH leaves names of its own when its processes are killed.
- **p50, p99, worst**: seconds from the fault until a surviving worker raised the error, or, where the
  job continues (`on_peer_loss="continue"`, a worker that has closed its store, or a temporary fault),
  until it had read a round without the lost worker; over all workers of all runs. A temporary fault is
  counted from its end.

A run is drawn from its seed: sizes, the instant, the victim, `"raise"` or `"continue"`, sums that
replace the value or an optimizer that adds them up. With servers, a process is lost after 1.5 s
without a heartbeat, with other busy processes after 5 s (the default); in `shared`, at once if it is
dead, and after 5 s if it is stopped. `mpi` is MPICH, which ends all processes if one is lost, and
does not detect a stopped process: waits have a deadline of 4 s there. If a process is killed during a
sum, MPICH can complete the sum without its part, in the 0.1 s before it ends the other processes:
kvstore raises `PeerLostError` instead."""


def _measured(calls: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a sentence on the conditions of all calls with the same conditions."""
    kinds: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for one in calls:
        kinds.setdefault((one["machine"], one["load"], one["at_once"]), []).append(one)
    for (where, load, at_once), some in kinds.items():
        runs, minutes = (sum(one[name] for one in some) for name in ("runs", "minutes"))
        busy = sorted(one["load_average"] for one in some)
        beside = f", with {load} other busy processes" if load else ""
        yield (
            f"{runs} runs in {minutes:.0f} minutes, {at_once} at a time{beside}, on {where}; load "
            f"averages of a minute, of other work too, were {busy[0]} to {busy[-1]}."
        )


def _faults() -> Iterator[str]:
    rows = [[name, what] for name, what in FAULTS.items()]
    yield "## The faults"
    yield table.markdown(["fault", "what happens"], rows)


def _section(of: Table, store: str, load: int) -> Iterator[str]:
    rows = [of.rows.get(Cell(store, fault, load)) for fault in FAULTS]
    there = [row for row in rows if row is not None and row.runs + row.missed]
    if not there:
        return
    yield f"### {store}" + (f", load {load}" if load else "")
    yield table.markdown(_HEAD, [_cells(row) for row in there])
    reasons: dict[str, list[str]] = {}
    for fault in FAULTS:
        if reason := impossible(store, fault):
            reasons.setdefault(reason, []).append(fault)
    if reasons and not load:
        yield "Impossible: " + "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items()) + "."


def _cells(row: Row) -> list[str]:
    counts = [row.runs, *(len(getattr(row, name)) for name in ("wrong", "hangs", "leftovers"))]
    times = [f"{one:.2f} s" for one in percentiles(row.seconds)] or [""] * 3
    return [row.cell.fault, *map(str, counts), *times]


def percentiles(seconds: Iterable[float]) -> list[float]:
    """Return median, 99th percentile and worst, each a measured value; an empty list if there are none."""
    ordered = sorted(seconds)
    if not ordered:
        return []
    return [ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in (0.5, 0.99, 1.0)]


def _bad(of: Table) -> Iterator[str]:
    rows = sorted(of.rows.values(), key=lambda row: _place(row.cell))
    lines = [f"- {row.cell.name}, seed {seed}: {_short(text)}" for row in rows for seed, text in row.found]
    if lines:
        yield "## Bad runs"
        yield "\n".join(lines)


def _short(text: str) -> str:
    return " ".join(text.split())[:200].replace("|", "\\|").replace("<", "&lt;")
