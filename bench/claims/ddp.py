"""Time of a training step in PyTorch beside DistributedDataParallel's, measured in turns."""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from bench import ROOT
from bench.cases import ddp as cases
from bench.peers.ddp.launch import DdpGroup
from bench.peers.process import Setting
from bench.runner import rivals, table
from bench.runner.claim import Claim
from bench.runner.rounds import Measured, Plan

#: Ways to train, as the table has them.
WAYS = {
    "alone": "no exchange",
    "gloo": "DDP, gloo",
    "hook": "DDP, hook",
    "optimizer": "DistributedOptimizer",
    "store": "updates in the store",
}
HEAD = ["case", *(f"{label}: step" for label in WAYS.values())]
RATIOS = ["case", *(f"DDP, gloo ÷ {label}" for way, label in WAYS.items() if way != "gloo")]
CPU = ["case", *(f"{label}: processor seconds" for label in WAYS.values())]
COST = ["case", *(f"{label}: cost of the exchange" for way, label in WAYS.items() if way != "alone")]
_VERSIONS = """import sys; sys.path.append(sys.argv[1]); import torch, kvstore
print(f"torch {torch.__version__.partition('+')[0]}, kvstore {kvstore.__version__}")"""


class Ddp(Claim):
    name, title = "ddp", "A training step beside DistributedDataParallel"
    common = tuple(option for option in Claim.common if option != "peers")
    turn = 0.5
    process = DdpGroup
    timed = ("seconds", "cpu")

    def cases(self, options: argparse.Namespace) -> Iterable[Any]:
        return cases.CASES

    def plan(self, options: argparse.Namespace) -> Plan:
        return replace(super().plan(options), patience=60.0)

    def settings(self, cases: Sequence[Any] = ()) -> list[Setting]:
        return rivals.settings("ddp", ("torch",), processes=2)

    def measured(self, chosen: list[Any], options: argparse.Namespace) -> Iterator[Measured]:
        if not self.settings():
            raise SystemExit(f"name a python with torch and kvstore: {rivals.RIVALS['torch'].variable}")
        return super().measured(chosen, options)

    def where(self) -> str:
        return f"{super().where()}, {versions(rivals.interpreter('torch'))}"

    def head(self) -> dict[str, Any]:
        return {**super().head(), "versions": versions(rivals.interpreter("torch"))}

    def about(self, rounds: int, minutes: float) -> str:
        return (
            "Two processes of one thread each; gloo over loopback, the store is `shared`; float32, SGD with "
            "momentum. A time is that of the worker that took longer. Times are medians of the rounds, "
            f"ratios medians [lowest-highest] of {rounds} rounds in which all ways took turns: above 1, "
            f"kvstore is faster. Measured in {minutes:.0f} minutes; how, and what each way is: "
            "[bench/README.md](../README.md)."
        )

    def sections(self, found: list[Measured]) -> Iterator[str]:
        yield table.markdown(HEAD, [[table.named(m), *_times(m.seconds)] for m in found])
        yield table.markdown(RATIOS, [_ratios(m) for m in found])
        yield "Processor seconds that both workers together give to a step:\n"
        yield table.markdown(CPU, [[table.named(m), *_times(m.cpu)] for m in found])
        yield (
            "What a step takes longer than without any exchange; it may be less than nothing where the "
            "update runs in the store, fused with the sum:\n"
        )
        yield table.markdown(COST, [_costs(m) for m in found])
        yield from table.disturbed(found)


@functools.cache
def versions(python: str) -> str:
    """Ask an interpreter what it has; away from the tree: an installed kvstore goes first."""
    command = [python, "-c", _VERSIONS, str(ROOT)]
    told = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tempfile.gettempdir())
    return told.stdout.strip()


def _times(times: dict[str, list[float]]) -> list[str]:
    return [table.time(statistics.median(times[way])) for way in WAYS]


def _ratios(m: Measured) -> list[str]:
    ratios = [table.over(m.seconds["gloo"], m.seconds[way]) for way in WAYS if way != "gloo"]
    return [table.named(m), *map(table.spread, ratios)]


def _costs(m: Measured) -> list[str]:
    cells = []
    for way in WAYS:
        if way != "alone":
            extra = [t - alone for t, alone in zip(m.seconds[way], m.seconds["alone"], strict=True)]
            sign = "-" if statistics.median(extra) < 0 else ""
            cells.append(f"{sign}{table.time(abs(statistics.median(extra)))}")
    return [table.named(m), *cells]


CLAIM = Ddp()
