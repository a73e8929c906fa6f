"""How the cost of one call grows with its keys: ``python -m bench.dist_keys [--write NAME] [--busy N]``.

Jobs of 2 workers and 1 server init so many keys of 1 KB in one call, and pushpull all of them in one call.
Beside each time stands what it is of the time with the fewest keys: on a straight line it is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

import kvstore as kv
from bench.runner.command import RESULTS
from bench.runner.machine import describe
from bench.runner.table import markdown

COUNTS = (2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
ELEMENTS = 256
ROUNDS = 5
_HEAD = "measured "
_BURNER = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(1_000_000))"


def main(arguments: list[str] | None = None) -> int:
    """Measure, and write table and plot."""
    parser = argparse.ArgumentParser(prog="python -m bench.dist_keys", description=__doc__)
    parser.add_argument("--write", metavar="NAME", help="write bench/results/NAME.md, .json and .png")
    parser.add_argument("--busy", type=int, default=0, help="so many other processes compute meanwhile")
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)))
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(options.worker)
        return 0
    with contextlib.ExitStack() as stack:
        for _ in range(options.busy):
            one = subprocess.Popen([sys.executable, "-ISc", _BURNER], start_new_session=True)
            stack.callback(one.wait)
            stack.callback(one.kill)
        cases = [measured(int(count)) for count in options.counts.split(",")]
    results = {"machine": describe(), "busy": options.busy, "cases": cases}
    print(table(results))
    if options.write:
        (RESULTS / f"{options.write}.json").write_text(json.dumps(results, indent=1) + "\n")
        (RESULTS / f"{options.write}.md").write_text(table(results))
        draw(results, RESULTS / f"{options.write}.png")
    return 0


def worker(count: int) -> None:
    """Be one worker of a job; worker 0 tells the seconds."""
    keys, values = list(range(count)), [np.full(ELEMENTS, 1, np.float32) for _ in range(count)]
    with kv.create("dist_sync") as store:
        store.barrier()
        start = time.perf_counter()
        store.init(keys, values)
        seconds = {"init": time.perf_counter() - start, "pushpull": []}
        for _ in range(ROUNDS):
            store.barrier()
            start = time.perf_counter()
            store.pushpull(keys, values)
            seconds["pushpull"].append(time.perf_counter() - start)
        expected = float(store.num_workers**ROUNDS)
        assert all((value == expected).all() for value in values), "a sum is wrong"
        if store.rank == 0:
            print(_HEAD + json.dumps(seconds), flush=True)


def measured(count: int) -> dict[str, Any]:
    """Run one job."""
    program = [sys.executable, "-m", "bench.claims.dist_keys", "--worker", str(count)]
    command = [sys.executable, "-m", "kvstore.launch", "run", "-n", "2", "-s", "1", "--", *program]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    line = next(line for line in told.splitlines() if _HEAD in line)
    return {"keys": count, **json.loads(line.partition(_HEAD)[2])}


def table(results: dict[str, Any]) -> str:
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
        f"dist_sync, 2 workers, 1 server, keys of {size} KB{beside}, on {results['machine']}.\n\n"
        + markdown(head, rows)
        + "\n"
    )


def draw(results: dict[str, Any], target: Any) -> None:
    """Draw seconds over keys, and the straight line through the origin and the last point."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    keys = [case["keys"] for case in results["cases"]]
    for what in ("init", "pushpull"):
        seconds = [statistics.median(np.atleast_1d(case[what])) for case in results["cases"]]
        (line,) = axis.plot(keys, seconds, "o-", label=what)
        axis.plot([0, keys[-1]], [0, seconds[-1]], ":", color=line.get_color())
    axis.set_xlabel("keys in one call")
    axis.set_ylabel("seconds")
    axis.set_title(f"dist_sync, {results['machine'].partition(',')[0]}", fontsize="small")
    axis.legend()
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
