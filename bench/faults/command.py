"""``python -m bench faults``: faults in small jobs of each store, checked by their histories.

The name of a run has its store, its fault, the load and its seed. With ``--write`` runs are added to the
earlier ones, with later seeds, so that a long measurement can be made in parts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from faults.burners import busy_machine

import bench
from bench.runner import machine

from . import page, soak
from .cells import FAULTS, STORES, Cell, impossible
from .group import SharedNursery, mpi_python
from .trial import Outcome, run

PAGES = bench.ROOT / "docs" / "reference"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen cells, print the page, and write it."""
    options = _parse(arguments)
    cells = list(chosen(options))
    if options.list:
        print("\n".join(cell.name for cell in cells))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background job
    table = page.Table(_json(options.write))
    begun, before = time.time(), sum(row.runs for row in table.rows.values())
    with contextlib.suppress(KeyboardInterrupt):
        for cell, outcome in _outcomes(table, cells, options):
            table.row(cell).add(outcome)
            _say(cell, outcome)
            _write(table, options.write)
    runs = sum(row.runs for row in table.rows.values()) - before
    table.calls.append(_how(runs, time.time() - begun, options))
    print(_write(table, options.write))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench faults", description=__doc__)
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--stores", nargs="+", choices=STORES, default=STORES, metavar="STORE")
    parser.add_argument("--runs", type=int, default=20, help="runs of each cell")
    parser.add_argument("--seed", type=int, help="seed of the first run; default: the next seed")
    parser.add_argument("--load", type=int, default=0, help="other busy processes")
    parser.add_argument("--at-once", type=int, default=1, help="number of concurrent runs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--keep", action="store_true", help="keep the folders of bad runs, in $TMPDIR")
    parser.add_argument("--list", action="store_true", help="print the names of the cells and stop")
    parser.add_argument("--write", default="", metavar="NAME",
                        help="add to bench/results/NAME.json, write docs/reference/NAME.md")  # fmt: skip
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield the chosen cells that are possible."""
    for store in options.stores:
        if store == "mpi" and not mpi_python():
            print(
                "mpi: omitted, there is no mpiexec: see KVSTORE_BENCH_MPICH in bench/README.md",
                file=sys.stderr,
            )
            continue
        for fault in options.faults:
            if not impossible(store, fault):
                yield Cell(store, fault, options.load)


def _outcomes(
    table: page.Table, cells: list[Cell], options: argparse.Namespace
) -> Iterator[tuple[Cell, Outcome]]:
    """Run all cells once, then again: after an interrupt each cell has as many runs."""
    end = time.monotonic() + options.seconds
    firsts = {cell: table.row(cell).next_seed if options.seed is None else options.seed for cell in cells}
    nursery = SharedNursery()

    def one(cell: Cell, seed: int) -> Outcome | None:
        return run(nursery, cell, seed, options.keep) if time.monotonic() < end else None

    try:
        with busy_machine(options.load), ThreadPoolExecutor(options.at_once) as pool:
            waiting = {
                pool.submit(one, cell, firsts[cell] + count): cell
                for count in range(options.runs)
                for cell in cells
            }
            try:
                for future in as_completed(waiting):
                    outcome = future.result()
                    if outcome is not None:
                        yield waiting[future], outcome
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        nursery.close()


def _say(cell: Cell, outcome: Outcome) -> None:
    bad = [*outcome.wrong, *outcome.hangs, *outcome.leftovers, *([outcome.missed] if outcome.missed else [])]
    if bad:
        print(f"{cell.name}, seed {outcome.seed}: {bad[0]}", file=sys.stderr, flush=True)


def _how(runs: int, took: float, options: argparse.Namespace) -> dict[str, Any]:
    """Return the conditions of the measurement, for the JSON."""
    return {
        "machine": machine.describe(),
        "load": options.load,
        "at_once": options.at_once,
        "runs": runs,
        "minutes": round(took / 60, 1),
        "load_average": round(os.getloadavg()[0], 1),
    }


def _json(name: str) -> Path | None:
    if not name:
        return None
    return Path(f"{name}.json") if "/" in name else bench.RESULTS / f"{name}.json"


def _page(name: str) -> Path:
    return Path(f"{name}.md") if "/" in name else PAGES / f"{name}.md"


def _write(table: page.Table, name: str) -> str:
    text = page.page(table, soak.section(bench.RESULTS / "soak.json"))
    if path := _json(name):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(table.to_json())
        _page(name).write_text(text)
    return text
