"""Time of a training step beside DistributedDataParallel's, measured in turns: ``python -m bench.ddp``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bench import ROOT
from bench.claims.local import state
from bench.peers.process import PeerError
from bench.runner import command, compiled, machine, table
from bench.runner.rounds import Measured, Plan, measure

#: Ways to train, as the table has them.
WAYS = {
    "alone": "no exchange",
    "gloo": "DDP, gloo",
    "hook": "DDP, hook",
    "optimizer": "DistributedOptimizer",
    "store": "updates in the store",
}
_START = "import sys; sys.path.append(sys.argv.pop(1)); from bench.peers.ddp.worker import main; main()"
_PATIENCE = 300.0  # seconds for one answer


@dataclass(frozen=True)
class DdpCase:
    """A model of `ddp_worker.py`, and the share of a batch that each of two workers has."""

    name: str
    model: str
    batch: int
    goals: tuple[str, ...] = ()


CASES = [
    DdpCase("digits: 64-128-10, 32 images", "digits", 32),
    DdpCase("transformer: 6 layers of 256, 4.8 M parameters, 8 x 32 tokens", "transformer", 8),
    DdpCase("perceptron: 6 layers of 2048, 25 M parameters, 32 rows", "perceptron", 32),
]


@dataclass(frozen=True)
class _Setting:
    name: str = "torch"
    label: str = ""


class Workers:
    """Two processes with torch, gloo and a `shared` store, which train in the way that they are told."""

    def __init__(self, python: str) -> None:
        self.setting = _Setting()
        self.cpu = 0.0
        self._folder = tempfile.TemporaryDirectory(prefix="kvstore-bench-")
        job = secrets.token_hex(16)
        self._processes = [self._start(python, rank, job) for rank in (0, 1)]
        self.versions = str(self._ask({"do": "versions"})[0])

    def _start(self, python: str, rank: int, job: str) -> subprocess.Popen[bytes]:
        place = {f"KVSTORE_{name}": str(rank) for name in ("RANK", "LOCAL_RANK")}
        place |= {f"KVSTORE_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
        common = {"KVSTORE_JOB": job, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.Popen(
            [python, "-c", _START, str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=self._folder.name,  # away from the tree: an installed kvstore goes first
            env={**os.environ, **common, **place},
        )

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def column(self, variant: str) -> str:
        """Each way is a column."""
        return variant

    def start_prepare(self, case: DdpCase) -> None:
        self._send({"do": "prepare", "model": case.model, "batch": case.batch})

    def finish_prepare(self) -> tuple[list[str], list[float]]:
        """All ways; the workers have seen that all lead to the same weights."""
        self._replies()
        return list(WAYS), []

    def run(self, variant: str, repeats: int) -> list[float]:
        """Seconds of each step, of the worker that took longer."""
        replies = self._ask({"do": variant, "steps": repeats})
        self.cpu = sum(reply["cpu"] for reply in replies) / repeats
        return [max(times) for times in zip(*(reply["times"] for reply in replies), strict=True)]

    def _ask(self, request: dict[str, Any]) -> list[Any]:
        self._send(request)
        return self._replies()

    def _send(self, request: dict[str, Any]) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()

    def _replies(self) -> list[Any]:
        found = []
        for process in self._processes:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], _PATIENCE)
            line = process.stdout.readline() if ready else b""
            if not line:
                raise PeerError("a worker has ended or hangs; see its messages above")
            found.append(json.loads(line))
        return found

    def close(self) -> None:
        """End the workers; they end when nothing more is asked."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        end = time.monotonic() + 15
        while any(process.poll() is None for process in self._processes) and time.monotonic() < end:
            time.sleep(0.05)
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._folder.cleanup()


@contextlib.contextmanager
def workers(python: str) -> Iterator[Workers]:
    """Hold the workers, and end them."""
    made = Workers(python)
    try:
        yield made
    finally:
        made.close()


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    options = _options(arguments)
    if not options.torch_python:
        raise SystemExit("name a python with torch and kvstore: KVSTORE_BENCH_TORCH, or --torch-python")
    if compiled.compiler() is None:
        raise SystemExit("no C compiler: set CC or install cc")
    started, found, prober = time.time(), list[Measured](), machine.Prober()
    plan = replace(command.plan(options), patience=60.0)
    with workers(options.torch_python) as pair:
        with contextlib.suppress(KeyboardInterrupt):
            for case in _chosen(options):
                found += _one(case, pair, plan, prober)
        versions = pair.versions
    command.publish(report(found, versions, time.time() - started), to_json(found, versions), options.write)
    return 0


def _one(case: DdpCase, pair: Workers, plan: Plan, prober: machine.Prober) -> list[Measured]:
    start = time.time()
    result = measure(case, [pair], plan, prober)
    print(f"{case.name}: {time.time() - start:.1f} s", file=sys.stderr)
    return [] if result is None else [result]


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.parser("ddp", __doc__)
    parser.set_defaults(turn=0.5)
    parser.add_argument("--torch-python", default=os.environ.get("KVSTORE_BENCH_TORCH", ""), metavar="PATH")
    return command.parse(parser, arguments, _chosen)


def _chosen(options: argparse.Namespace) -> list[DdpCase]:
    return command.pick(CASES, options, lambda case: case.goals)


HEAD = ["case", *(f"{label}: step" for label in WAYS.values())]
RATIOS = ["case", *(f"DDP, gloo ÷ {label}" for way, label in WAYS.items() if way != "gloo")]
CPU = ["case", *(f"{label}: processor seconds" for label in WAYS.values())]
COST = ["case", *(f"{label}: cost of the exchange" for way, label in WAYS.items() if way != "alone")]


def report(found: list[Measured], versions: str, took: float) -> str:
    """Write the whole page."""
    rounds = len(found[0].others) if found else 0
    parts = [
        "# A training step beside DistributedDataParallel\n",
        f"{machine.describe()}, {versions}.\n\n"
        "Two processes of one thread each; gloo over loopback, the store is `shared`; float32, SGD with "
        "momentum. A time is that of the worker that took longer. Times are medians of the rounds, ratios "
        f"medians [lowest-highest] of {rounds} rounds in which all ways took turns: above 1, kvstore is "
        f"faster. Measured in {took / 60:.0f} minutes; how, and what each way is: "
        "[bench/README.md](../README.md).\n",
        state(found),
        table.markdown(HEAD, [_times(m) for m in found]),
        table.markdown(RATIOS, [_ratios(m) for m in found]),
        "Processor seconds that both workers together give to a step:\n",
        table.markdown(CPU, [_cpu(m) for m in found]),
        "What a step takes longer than without any exchange; it may be less than nothing where the update "
        "runs in the store, fused with the sum:\n",
        table.markdown(COST, [_costs(m) for m in found]),
    ]
    if any(m.disturbed for m in found):
        parts.append("\\* others were busy during some of these rounds.\n")
    return "\n".join(parts)


def _named(m: Measured) -> str:
    return m.case.name + (" *" if m.disturbed else "")


def _times(m: Measured) -> list[str]:
    return [_named(m), *(table.time(m.median(way)) for way in WAYS)]


def _cpu(m: Measured) -> list[str]:
    return [_named(m), *(table.time(statistics.median(m.cpu[way])) for way in WAYS)]


def _ratios(m: Measured) -> list[str]:
    cells = []
    for way in WAYS:
        if way != "gloo":
            pairs = zip(m.seconds["gloo"], m.seconds[way], strict=True)
            cells.append(table.spread([gloo / ours for gloo, ours in pairs]))
    return [_named(m), *cells]


def _costs(m: Measured) -> list[str]:
    cells = []
    for way in WAYS:
        if way != "alone":
            extra = [t - alone for t, alone in zip(m.seconds[way], m.seconds["alone"], strict=True)]
            sign = "-" if statistics.median(extra) < 0 else ""
            cells.append(f"{sign}{table.time(abs(statistics.median(extra)))}")
    return [_named(m), *cells]


def to_json(found: list[Measured], versions: str) -> str:
    """Write one line for each case."""
    rows = []
    for m in found:
        seconds = {way: [float(f"{s:.4g}") for s in times] for way, times in m.seconds.items()}
        cpu = {way: [float(f"{s:.4g}") for s in times] for way, times in m.cpu.items()}
        row = {"case": m.case.name, "seconds": seconds, "cpu": cpu}
        row["others"] = [round(share, 3) for share in m.others]
        rows.append("  " + json.dumps(row, ensure_ascii=False))
    head = json.dumps({"machine": machine.describe(), "versions": versions})[:-1]
    return head + ', "cases": [\n' + ",\n".join(rows) + "\n]}\n"


if __name__ == "__main__":
    raise SystemExit(main())
