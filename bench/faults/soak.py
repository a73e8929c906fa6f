"""``python -m bench soak``: a long job of each store, and the growth of its processes.

Memory, descriptors and threads of each process are sampled twelve times, with the median time of a round.
The slopes are without the first sample.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.runner import machine, run

from .cells import DEAD_AFTER_BUSY, STORES, Plan, Promise
from .group import Group, Mpi, Served, SharedNursery, group, mpi_python
from .soak_workers import WINDOWS

_HOUR = 3600.0
_ENDS = 60.0
_STARTS = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job of each store for the given time, print the table, and write it."""
    parser = argparse.ArgumentParser(prog="python -m bench soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=_HOUR)
    parser.add_argument("--stores", nargs="+", choices=STORES, default=STORES, metavar="STORE")
    parser.add_argument("--at-once", type=int, default=1, help="number of concurrent jobs")
    parser.add_argument("--write", default="", metavar="NAME", help="bench/results/NAME.json, or PATH.json")
    options = parser.parse_args(arguments)
    stores = [store for store in options.stores if store != "mpi" or mpi_python()]
    nursery = SharedNursery()
    try:
        with ThreadPoolExecutor(options.at_once) as pool:
            running = [pool.submit(soak, nursery, store, options.seconds) for store in stores]
        failed = [error for one in running if (error := one.exception()) is not None]
        jobs = [one.result() for one in running if one.exception() is None]
    finally:
        nursery.close()
    side = f", {options.at_once} jobs side by side" if options.at_once > 1 else ""
    content = {"machine": machine.describe() + side, "jobs": jobs}
    if options.write:
        path = run.results(f"{options.write}.json")
        content["jobs"] += _others(path, {job["store"] for job in jobs})
        content["jobs"].sort(key=lambda job: STORES.index(job["store"]))
        path.write_text(json.dumps(content) + "\n")
    print(text_of(content))
    for error in failed:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return len(failed)


def _others(path: Path, stores: set[str]) -> list[dict[str, Any]]:
    """Return the earlier jobs of other stores."""
    before = json.loads(path.read_text())["jobs"] if path.exists() else []
    return [job for job in before if job["store"] not in stores]


def soak(nursery: SharedNursery, store: str, seconds: float) -> dict[str, Any]:
    """Run one job; return its samples."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    plan = Plan(
        store, "", 0, str(folder), 2, 1, "last", "raise", "soak", 0, 0.0, -1, "", True, seconds, seconds
    )
    made = group(nursery, plan, Promise(DEAD_AFTER_BUSY, seconds))
    try:
        made.start()
        samples = _sampled(made, plan)
        # The last sample was half a window ago.
        ended = made.finish(time.monotonic() + seconds / WINDOWS + _ENDS)
        others = made.others(time.monotonic() + _ENDS)
        workers = {f"worker {rank}": one for rank, one in enumerate(ended)}
        codes = {name: one.code for name, one in {**workers, **others}.items()}
        found = {"codes": codes, "samples": samples, "latencies": _latencies(folder)}
        return {"store": store, "seconds": seconds, **found}
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


def _sampled(made: Group, plan: Plan) -> dict[str, list[list[float]]]:
    """Sample all processes in the middle of each window: time, kilobytes, descriptors, threads."""
    start = _started(plan)
    seen: dict[str, list[list[float]]] = {}
    for window in range(WINDOWS):
        time.sleep(max(0.0, start + (window + 0.5) * plan.seconds / WINDOWS - time.monotonic()))
        for name, pid in _processes(made).items():
            if (found := _look(pid)) is None:
                raise RuntimeError(f"{plan.store}: {name} has ended after {time.monotonic() - start:.0f} s")
            seen.setdefault(name, []).append([time.monotonic() - start, *found])
    return seen


def _started(plan: Plan) -> float:
    end = time.monotonic() + _STARTS
    while not list(Path(plan.folder).glob("*.latencies")):
        if time.monotonic() > end:
            raise TimeoutError(f"{plan.store}: the job did not begin")
        time.sleep(0.01)
    return time.monotonic()


def _processes(made: Group) -> dict[str, int]:
    if isinstance(made, Mpi):
        return {f"worker {rank}": pid for rank, pid in sorted(made.pids().items())}
    found = {f"worker {rank}": one.pid for rank, one in enumerate(made.workers)}
    if isinstance(made, Served):
        found |= {f"server {rank}": one.pid for rank, one in enumerate(made.job.servers)}
        found["scheduler"] = made.job.scheduler.pid
    return found


def _look(pid: int) -> list[float] | None:
    """Return the kilobytes in memory, descriptors and threads of a process. None: it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    words = dict(line.split(":", 1) for line in lines)
    if "VmRSS" not in words:
        return None
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return [float(words["VmRSS"].split()[0]), descriptors, float(words["Threads"])]


def _latencies(folder: Path) -> dict[str, list[list[float]]]:
    lines = {path.stem: path.read_text().splitlines() for path in sorted(folder.glob("*.latencies"))}
    return {
        f"worker {slot}": [[float(one) for one in line.split()] for line in lines[slot]] for slot in lines
    }


# ------------------------------------------------------------------------------------------------- table


def section(path: Path) -> str:
    """Return the section of the page, from the JSON; empty if there is none."""
    return text_of(json.loads(path.read_text())) if path.exists() else ""


def text_of(content: dict[str, Any]) -> str:
    """Format the table."""
    head = "| store | minutes | process | memory | per hour | descriptors | threads | a round | per hour |"
    rows = [row for job in content["jobs"] for row in _rows(job)]
    about = f"""\
Two workers (and a server) that repeated the same rounds, on
{content["machine"]}. The first and last of {WINDOWS} samples; the slopes are those of a straight line
through all but the first sample, and vary with the noise of a short run. A round is a
pushpull of 4 KB and 1 MB; its time is the median of a twelfth of the job. Written by `python -m
bench soak --write soak`; the numbers are in
[bench/results/soak.json](../../bench/results/soak.json)."""
    return "\n\n".join(["## Long jobs", about, "\n".join([head, "|" + "---|" * 9, *rows])])


def _rows(job: dict[str, Any]) -> list[str]:
    rows = []
    for name, samples in job["samples"].items():
        memory = [[at, kilobytes / 1024] for at, kilobytes, _, _ in samples]
        ends = [f"{memory[0][1]:.0f} → {memory[-1][1]:.0f} MB", f"{slope(memory) * _HOUR:+.1f} MB"]
        ends += [f"{samples[0][at]:.0f} → {samples[-1][at]:.0f}" for at in (2, 3)]
        times = job["latencies"].get(name, [])
        if len(times) > 2:
            middle = statistics.median(one for _, one in times)
            ends.append(f"{times[0][1] * 1e3:.2f} → {times[-1][1] * 1e3:.2f} ms")
            ends.append(f"{slope(times) * _HOUR / middle:+.0%}")
        cells = [job["store"], f"{job['seconds'] / 60:.3g}", name, *ends, *[""] * (6 - len(ends))]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def slope(points: list[list[float]]) -> float:
    """Return the slope of the line through all points but the first, by least squares."""
    rest = points[1:]
    return statistics.linear_regression(*zip(*rest, strict=True)).slope if len(rest) > 1 else 0.0
