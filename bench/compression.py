"""Ratios of gradient compression on the CPU to its rivals, in turns: ``python -m bench.compression``."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path

from . import compiled, compression_cases, local, machine, table
from .compression_cases import CompressionCase
from .peers.process import Setting
from .rounds import Measured, Plan

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
    plan = Plan(options.rounds, options.rounds // 2, turn=options.turn)
    with local.running(settings(options.mxnet_python)) as peers:
        try:
            for result in local.each(_chosen(options), peers, plan, machine.Prober()):
                measured.append(result)
        except KeyboardInterrupt:
            print("stopped; here is what there is", file=sys.stderr)
    text = report(measured, time.time() - started)
    print(text)
    if options.write:
        local.RESULTS.mkdir(exist_ok=True)
        (local.RESULTS / f"{options.write}.md").write_text(text)
        (local.RESULTS / f"{options.write}.json").write_text(local.to_json(measured))
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.compression", description=__doc__)
    mxnet = os.environ.get("KVSTORE_BENCH_MXNET", "")
    parser.add_argument("--mxnet-python", default=mxnet, metavar="PATH")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn", type=float, default=Plan.turn, help="seconds for one turn of a variant")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--goals", action="store_true", help="only cases that have a goal")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument("--write", default="", metavar="NAME", help="write bench/results/NAME.md and .json")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(case.name for case in _chosen(options)))
        raise SystemExit
    return options


def _chosen(options: argparse.Namespace) -> list[CompressionCase]:
    wanted = [case for case in compression_cases.all_cases() if re.search(options.only, case.name)]
    return [case for case in wanted if case.goals] if options.goals else wanted


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
