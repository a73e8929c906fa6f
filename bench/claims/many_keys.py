"""The cost of a key in calls with 100 to 100,000 keys.

The stores are `local`, `shared` with 2 workers, and `dist_sync` with 2 workers and a server. A call pushes
all keys, and the next call pulls them; the keys have four floats each. The time of a key should be the same
in small and in large calls. KVSTORE_BENCH_BEFORE names the interpreter of an environment with an older
kvstore, which is measured in turn with this kvstore. Each round starts new jobs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench
from bench.runner import machine, table
from bench.runner.claim import Claim
from kvstore.observe.bench.rounds import round_ratios

COUNTS = (100, 1_000, 10_000, 50_000, 100_000)
#: The options of `kvstore run` for each store; none: one process without a launcher.
STORES: dict[str, tuple[str, ...]] = {"local": (), "shared": ("-n", "2"), "dist_sync": ("-n", "2", "-s", "1")}
_PROGRAM = bench.RESULTS.parent / "peers" / "many_keys.py"
_PATIENCE = 300.0  # seconds for a job


@dataclass(frozen=True)
class ManyKeys:
    """A number of keys in one call of one store."""

    store: str
    keys: int

    @property
    def name(self) -> str:
        return f"{self.store}, {self.keys:,} keys"


@dataclass
class Timed:
    """Seconds of a push and a pull, by kvstore and round: the slower worker's median in a job."""

    case: ManyKeys
    seconds: dict[str, list[float]] = field(default_factory=dict)


class CallsOfManyKeys(Claim):
    name, title = "many-keys", "Calls with many keys"
    rounds = 5
    common = ("rounds", "only", "list", "write")

    def options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--counts", default=",".join(map(str, COUNTS)))

    def cases(self, options: argparse.Namespace) -> Iterable[ManyKeys]:
        return [ManyKeys(store, int(count)) for store in STORES for count in options.counts.split(",")]

    def measured(self, chosen: list[ManyKeys], options: argparse.Namespace) -> Iterator[Timed]:
        for case in chosen:
            found = Timed(case)
            for number in range(options.rounds):
                _round(found, backwards=bool(number % 2))
            print(case.name, file=sys.stderr)
            yield found

    def page(self, found: list[Timed], took: float) -> str:
        return page_of(json.loads(self.to_json(found, took)))

    def to_json(self, found: list[Timed], took: float) -> str:
        rows = [{"store": m.case.store, "keys": m.case.keys, "seconds": m.seconds} for m in found]
        return table.lines({"machine": machine.describe()}, "cases", rows)


def _round(found: Timed, backwards: bool) -> None:
    """Measure both in turn; the order alternates by round."""
    pythons = [("ours", sys.executable), ("before", os.environ.get("KVSTORE_BENCH_BEFORE"))]
    for name, python in reversed(pythons) if backwards else pythons:
        if python:
            found.seconds.setdefault(name, []).append(measure(found.case, python))


def measure(case: ManyKeys, python: str) -> float:
    """Run one job; return the median of its calls, each with the time of its slower worker."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        worker = [python, str(_PROGRAM), case.store, str(case.keys), folder]
        launcher = [python, "-m", "kvstore", "run", *STORES[case.store]] if STORES[case.store] else []
        # Not in the folder of this kvstore: the job must import the kvstore of its environment.
        subprocess.run([*launcher, *worker], check=True, cwd="/", timeout=_PATIENCE)
        workers = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    return float(f"{statistics.median(map(max, zip(*workers, strict=True))):.4g}")


# ------------------------------------------------------------------------------------------------- pages


def page_of(results: dict[str, Any]) -> str:
    """Write the tables."""
    about = (
        f"A push and a pull of all keys in one call each, four floats a key; {results['machine']}. "
        "Microseconds a key: median [lowest-highest] of rounds, each with a job of its own. A time is that "
        "of the slower worker. *÷ the first row*: on a straight line it is 1; the first rows have the cost "
        "of the call and of its messages, too.\n"
    )
    parts = [f"# {CLAIM.title}\n", about]
    for store, options in STORES.items():
        cases = [case for case in results["cases"] if case["store"] == store]
        head = ["keys in one call", "a key", "÷ the first row"]
        if any("before" in case["seconds"] for case in cases):
            head += ["before, a key", "÷ the first row", "before ÷ now"]
        job = f", kvstore run {' '.join(options)}" if options else ""
        parts += table.section(store + job, head, [_row(case, cases[0]) for case in cases])
    return "\n".join(parts)


def _row(case: dict[str, Any], first: dict[str, Any]) -> list[str]:
    row = [f"{case['keys']:,}"]
    for seconds, least in zip(case["seconds"].values(), first["seconds"].values(), strict=True):
        each = [1e6 * one / case["keys"] for one in seconds]
        base = 1e6 * statistics.median(least) / first["keys"]
        row += [f"{table.spread(each)} µs", f"{statistics.median(each) / base:.2f}"]
    if "before" in case["seconds"]:
        ratios = round_ratios(case["seconds"]["before"], case["seconds"]["ours"])
        row.append(table.spread(ratios))
    return row


CLAIM = CallsOfManyKeys()
