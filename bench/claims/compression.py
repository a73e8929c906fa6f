"""Ratios of gradient compression on the CPU to its rivals, in turns: ``python -m bench.compression``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from bench.cases import compression as compression_cases
from bench.cases.compression import CompressionCase
from bench.claims import local
from bench.peers.process import Setting
from bench.runner import command, compiled, machine, table
from bench.runner.rounds import Measured

PEERS = ("limit", "numpy", "mxnet")


def settings(mxnet: str = "") -> list[Setting]:
    """Return the peers that can run here; MXNet with narrow operators, with wide ones, and as it comes."""
    found = [Setting("ours", bench="compression"), Setting("numpy", bench="compression")]
    if compiled.compiler():
        found.append(Setting("limit", bench="compression"))
    if mxnet:
        python = str(Path(mxnet).absolute())
        for label, variables in _mxnet().items():
            found.append(Setting("mxnet", python, label, tuple(variables.items()), "compression"))
    return found


def _mxnet() -> dict[str, dict[str, str]]:
    cores = str(len(machine.cpus()))
    return {
        "operators of one thread": {"OMP_NUM_THREADS": "1", "MXNET_CPU_WORKER_NTHREADS": cores},
        "operators of all threads": {"OMP_NUM_THREADS": cores, "MXNET_KVSTORE_REDUCTION_NTHREADS": cores},
        "default settings": {},
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    options = _options(arguments)
    started, measured = time.time(), list[Measured]()
    plan = command.plan(options)
    with local.running(settings(options.mxnet_python)) as peers:
        try:
            for result in local.each(_chosen(options), peers, plan, machine.Prober()):
                measured.append(result)
        except KeyboardInterrupt:
            print("stopped; here is what there is", file=sys.stderr)
    text = report(measured, time.time() - started)
    command.publish(text, local.to_json(measured), options.write)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.parser("compression", __doc__)
    mxnet = os.environ.get("KVSTORE_BENCH_MXNET", "")
    parser.add_argument("--mxnet-python", default=mxnet, metavar="PATH")
    return command.parse(parser, arguments, _chosen)


def _chosen(options: argparse.Namespace) -> list[CompressionCase]:
    return command.pick(compression_cases.all_cases(), options, lambda case: case.goals)


def report(measured: list[Measured], took: float) -> str:
    """Write the whole page."""
    rounds = len(measured[0].others) if measured else 0
    parts = [
        "# Gradient compression on the CPU, beside its rivals\n",
        f"{machine.describe()}.\n\n"
        "float32 gradients, threshold 0.5. Ratios are *time of the peer ÷ time of kvstore*: above 1, "
        f"kvstore is faster. Each is the median [lowest-highest] of {rounds} rounds in which all peers took "
        "turns; times are medians. MXNet's times of *quantise* and *dequantise* are those of its operators "
        f"alone, as all cores together do them. Measured in {took / 60:.0f} minutes; how, and what each peer "
        "does: [bench/README.md](../README.md).\n",
        local.state(measured),
    ]
    if goals := table.goals(measured):
        parts += ["## Goals\n", table.markdown(table.GOALS_HEAD, goals)]
    if missing := _missing(measured):
        parts.append(f"Not run: {missing}.\n")
    parts += [
        "## All cases\n",
        table.markdown(table.everything_head(PEERS), table.everything(measured, PEERS)),
    ]
    if any(m.disturbed for m in measured):
        parts.append("\\* others were busy during some of these rounds.\n")
    parts += ["## The way of each peer that was best\n", table.markdown(["case", *_names()], _ways(measured))]
    return "\n".join(parts)


def _missing(measured: list[Measured]) -> str:
    """Peers that a goal asks for and that took no part."""
    gone = {peer for m in measured for peer in m.case.goals if peer not in m.seconds}
    return ", ".join(table.PEERS[peer] for peer in PEERS if peer in gone)


def _names() -> list[str]:
    return [table.PEERS[peer] for peer in PEERS]


def _ways(measured: list[Measured]) -> list[list[str]]:
    return [[m.case.name, *(m.variants.get(peer, "") for peer in PEERS)] for m in measured]


if __name__ == "__main__":
    raise SystemExit(main())
