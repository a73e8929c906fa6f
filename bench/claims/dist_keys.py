"""How the cost of one call to the parameter server grows with its keys.

Jobs of 2 workers and 1 server init so many keys of 1 KB in one call, and pushpull all of them in one call.
Beside each time stands what it is of the time with the fewest keys: on a straight line it is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvstore as kv
from bench import ROOT
from bench.cases.base import Case
from bench.runner import machine, table
from bench.runner.claim import Claim

COUNTS = (2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
ELEMENTS = 256
ROUNDS = 5
_HEAD = "measured "
_BURNER = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(1_000_000))"
_WORKER = (
    f"import sys; sys.path.append({str(ROOT)!r}); from bench.claims import dist_keys; dist_keys.worker()"
)


@dataclass(frozen=True)
class KeysCase(Case):
    """One job."""

    name: str
    keys: int


@dataclass
class Measured:
    """Seconds of a job, while so many other processes computed."""

    case: KeysCase
    seconds: dict[str, Any]
    busy: int


class DistKeys(Claim):
    name, title = "dist-keys", "Cost of a key"
    common = ("only", "list", "write")
    picture = ""

    def options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--busy", type=int, default=0, help="so many other processes compute meanwhile")
        parser.add_argument("--counts", default=",".join(map(str, COUNTS)))

    def cases(self, options: argparse.Namespace) -> Iterable[Any]:
        return [KeysCase(f"{int(count):,} keys", int(count)) for count in options.counts.split(",")]

    def measured(self, chosen: list[Any], options: argparse.Namespace) -> Iterator[Measured]:
        with contextlib.ExitStack() as stack:
            for _ in range(options.busy):
                one = subprocess.Popen([sys.executable, "-ISc", _BURNER], start_new_session=True)
                stack.callback(one.wait)
                stack.callback(one.kill)
            for case in chosen:
                yield Measured(case, seconds(case.keys), options.busy)

    def page(self, found: list[Measured], took: float) -> str:
        return page_of(_results(found)) if found else ""

    def to_json(self, found: list[Measured], took: float) -> str:
        return json.dumps(_results(found), indent=1) + "\n"


def _results(found: list[Measured]) -> dict[str, Any]:
    rows = [{"keys": m.case.keys, **m.seconds} for m in found]
    return {"machine": machine.describe(), "busy": found[0].busy, "cases": rows}


def seconds(count: int) -> dict[str, Any]:
    """Run one job."""
    program = [sys.executable, "-c", _WORKER, str(count)]
    command = [sys.executable, "-m", "kvstore.launch", "run", "-n", "2", "-s", "1", "--", *program]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    line = next(line for line in told.splitlines() if _HEAD in line)
    found: dict[str, Any] = json.loads(line.partition(_HEAD)[2])
    return found


def worker() -> None:
    """Be one worker of a job; worker 0 tells the seconds."""
    count = int(sys.argv[1])
    keys, values = list(range(count)), [np.full(ELEMENTS, 1, np.float32) for _ in range(count)]
    with kv.create("dist_sync") as store:
        store.barrier()
        start = time.perf_counter()
        store.init(keys, values)
        seconds: dict[str, Any] = {"init": time.perf_counter() - start, "pushpull": []}
        for _ in range(ROUNDS):
            store.barrier()
            start = time.perf_counter()
            store.pushpull(keys, values)
            seconds["pushpull"].append(time.perf_counter() - start)
        expected = float(store.num_workers**ROUNDS)
        assert all((value == expected).all() for value in values), "a sum is wrong"
        if store.rank == 0:
            print(_HEAD + json.dumps(seconds), flush=True)


def page_of(results: dict[str, Any]) -> str:
    """Write the table."""
    cases = results["cases"]
    rows = []
    for case in cases:
        row = [f"{case['keys']:,}"]
        for what in ("init", "pushpull"):
            each, least = (np.median(one[what]) / one["keys"] for one in (case, cases[0]))
            row += [f"{1e6 * each:.0f} µs", f"{each / least:.2f}"]
        times = [1e6 * one / case["keys"] for one in case["pushpull"]]
        rows.append([*row, f"{min(times):.0f}-{max(times):.0f} µs"])
    first = "÷ the first row"
    head = ["keys in one call", "init, a key", first, "pushpull, a key", first, "spread"]
    beside = f", beside {results['busy']} busy processes" if results["busy"] else ""
    size = 4 * ELEMENTS // 1024
    return (
        "# The cost of a key\n\n"
        f"dist_sync, 2 workers, 1 server, keys of {size} KB{beside}, on {results['machine']}.\n\n"
        + table.markdown(head, rows)
        + "\n"
    )


CLAIM = DistKeys()
