"""Ratios of the store in one process to its rivals, measured in turns: ``python -m bench.local``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from bench.cases import local as cases
from bench.cases.local import Case
from bench.peers.process import PeerProcess, Setting
from bench.runner import command, compiled, machine, table
from bench.runner.rounds import Measured, Plan, measure


def settings(mxnet: str = "", torch: str = "") -> list[Setting]:
    """Return the peers that can run here; MXNet twice, as it comes and tuned for this many cores."""
    found = [Setting("ours"), Setting("numpy")]
    if compiled.compiler():
        found.append(Setting("limit"))
    if mxnet:
        cores = str(len(machine.cpus()))
        names = ("OMP_NUM_THREADS", "MXNET_KVSTORE_REDUCTION_NTHREADS", "MXNET_CPU_WORKER_NTHREADS")
        tuned = tuple((name, cores) for name in names)
        found += [Setting("mxnet", mxnet, "tuned", tuned), Setting("mxnet", mxnet, "default settings")]
    if torch:
        found.append(Setting("torch", torch))
    return found


@contextmanager
def running(wanted: list[Setting]) -> Iterator[list[PeerProcess]]:
    """Start the peers, and end them."""
    with ExitStack() as stack:
        yield [stack.enter_context(PeerProcess(setting)) for setting in wanted]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    options = _options(arguments)
    chosen = _chosen(options)
    started = time.time()
    prober = machine.Prober()
    with running(settings(options.mxnet_python, options.torch_python)) as peers:
        limit = [peer for peer in peers if peer.setting.name == "limit"]
        plan = command.plan(options)
        streams, measured = list[Measured](), list[Measured]()
        try:
            streams.extend(each(cases.streams() if limit else [], limit, plan, prober))
            for result in each(chosen, peers, plan, prober):
                measured.append(result)
        except KeyboardInterrupt:
            print("stopped; here is what there is", file=sys.stderr)
    text = report(measured, streams, time.time() - started)
    command.publish(text, to_json([*streams, *measured]), options.write)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.parser("local", __doc__)
    env = os.environ.get
    parser.add_argument("--mxnet-python", default=env("KVSTORE_BENCH_MXNET", ""), metavar="PATH")
    parser.add_argument("--torch-python", default=env("KVSTORE_BENCH_TORCH", ""), metavar="PATH")
    return command.parse(parser, arguments, _chosen)


def _chosen(options: argparse.Namespace) -> list[Case]:
    return command.pick(cases.all_cases(), options, lambda case: case.goals or case.most_us)


def each(
    chosen: Sequence[Any], peers: list[PeerProcess], plan: Plan, prober: machine.Prober
) -> Iterator[Measured]:
    """Measure case after case."""
    for number, case in enumerate(chosen, start=1):
        start = time.time()
        result = measure(case, peers, plan, prober)
        print(f"{number}/{len(chosen)} {case.name}: {time.time() - start:.1f} s", file=sys.stderr)
        if result is not None:
            yield result


def report(measured: list[Measured], streams: list[Measured], took: float) -> str:
    """Write the whole page."""
    rounds = len(measured[0].others) if measured else 0
    parts = [
        "# The store in one process, beside its rivals\n",
        f"{machine.describe()}.\n\n"
        "float32. Ratios are *time of the peer ÷ time of kvstore*: above 1, kvstore is faster. Each is the "
        f"median [lowest-highest] of {rounds} rounds in which all peers took turns; times are medians. "
        f"Measured in {took / 60:.0f} minutes; how, and what each peer does: "
        "[bench/README.md](../README.md).\n",
        state([*streams, *measured]),
    ]
    if goals := table.goals(measured):
        parts += ["## Goals\n", table.markdown(table.GOALS_HEAD, goals)]
    if streams:
        parts += [
            "## What the memory allows\n",
            table.markdown(table.BANDWIDTH_HEAD, table.bandwidth(streams)),
        ]
    parts += ["## All cases\n", table.markdown(table.everything_head(), table.everything(measured))]
    if any(m.disturbed for m in measured):
        parts.append("\\* others were busy during some of these rounds.\n")
    return "\n".join(parts)


def state(measured: list[Measured]) -> str:
    """How the machine was while all this was measured."""
    probes = [probe for m in measured for probe in m.probes]
    shares = [share for m in measured for share in m.others]
    if not probes:
        return ""
    trip = table.spread([probe.round_trip_ns / 1000 for probe in probes])
    read = table.spread([probe.read_gbs for probe in probes])
    return (
        f"The machine meanwhile ({len(probes)} probes of 0.3 s between the rounds): a cache line from core "
        f"to core and back {trip} µs, memory read by two cores {read} GB/s, others' share of the processors "
        f"{table.spread([100 * share for share in shares])} %.\n"
    )


def to_json(measured: list[Measured]) -> str:
    """Write one line for each case."""
    rows = []
    for m in measured:
        row = {
            "case": m.case.name,
            "goals": m.case.goals,
            "seconds": {peer: [float(f"{s:.4g}") for s in seconds] for peer, seconds in m.seconds.items()},
            "variants": m.variants,
            "wrong": m.wrong,
            "others": [round(share, 3) for share in m.others],
            "probes": [{name: round(value, 1) for name, value in asdict(p).items()} for p in m.probes],
        }
        rows.append("  " + json.dumps(row, ensure_ascii=False))
    return '{"machine": ' + json.dumps(machine.describe()) + ', "cases": [\n' + ",\n".join(rows) + "\n]}\n"


if __name__ == "__main__":
    raise SystemExit(main())
