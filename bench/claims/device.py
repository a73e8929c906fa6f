"""The `device` store on a GPU beside its rivals, as shares of the copy rate: ``python -m bench.device``."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

from bench.cases.device import Case, all_cases
from bench.peers.device.base import Peer
from bench.peers.device.ours import Ours
from bench.peers.device.rival_cupy import CuPy
from bench.peers.device.rival_torch import Torch
from bench.peers.device.rival_triton import Triton
from bench.runner import table
from bench.runner.command import RESULTS
from bench.runner.gpu_rounds import Clock, Measured, copy_rate, measure

_SMALL = 1 << 14


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    options = _options(arguments)
    torch: Any = importlib.import_module("torch")
    device = "cpu" if options.trial else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here; --trial runs small cases on the processor", file=sys.stderr)
        return 1
    chosen = [case for case in _cases(options.trial) if re.search(options.only, case.name)]
    rate = copy_rate(torch, device, Clock(torch, device), _SMALL if options.trial else 256 << 20)
    started, measured = time.time(), []
    for number, case in enumerate(chosen, start=1):
        if time.time() - started > options.seconds:
            print(f"time is up: {len(chosen) - number + 1} cases are left out", file=sys.stderr)
            break
        measured += _measured(case, torch, device, rate, options.rounds)
        print(f"{number}/{len(chosen)} {case.name}", file=sys.stderr, flush=True)
        if options.write:
            _write(options.write, measured, torch, rate)
    print(report(measured, machine(torch), rate))
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.device", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after that")
    parser.add_argument("--trial", action="store_true", help="small cases, on the processor")
    parser.add_argument("--write", default="", metavar="PATH", help="write PATH.md and PATH.json")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(case.name for case in all_cases()))
        raise SystemExit
    return options


def _cases(trial: bool) -> list[Case]:
    return list(all_cases(_SMALL, (1000, 3, 70)) if trial else all_cases())


def _measured(case: Case, torch: Any, device: str, rate: float, rounds: int) -> list[Measured]:
    peers: list[Peer] = [Ours(), Torch(), CuPy(), Triton()]
    found = measure(case, peers, torch, device, rate, rounds)
    if device == "cuda":
        torch.cuda.empty_cache()
    return [] if found is None else [found]


def machine(torch: Any) -> str:
    """Name the GPU and the versions."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()}, no GPU"
    versions = [f"Python {platform.python_version()}", f"PyTorch {torch.__version__}"]
    for name in ("cupy", "triton", "numba_cuda"):
        module = sys.modules.get(name)
        versions += [f"{name} {module.__version__}"] if module is not None else []
    return f"{gpu}; {', '.join(versions)}"


HEAD = ["case", "at the copy rate", "kvstore", "share of the copy rate", "host", "beside"]
GOALS_HEAD = ["case", "what", "measured", "goal", "holds"]


def rows(measured: list[Measured]) -> list[list[str]]:
    """One row for every case, all peers in its last cell."""
    found = []
    for m in measured:
        share = [m.floor / us for us in m.gpu[m.best]]
        others = [
            f"{_name(m, way)} {_us(m.median(way))}: {table.spread(m.ratios(way))}" for way in _others(m)
        ]
        cells = [m.case.name, _us(m.floor), f"{_us(m.median(m.best))} ({_name(m, m.best)})"]
        hosts = ", ".join(f"{way.removeprefix('kvstore ')} {_us(us)}" for way, us in _own_host(m))
        found.append([*cells, table.spread(share), hosts, "<br>".join(others)])
    return found


def _others(m: Measured) -> list[str]:
    return [way for way in m.gpu if way not in m.ours]


def _own_host(m: Measured) -> list[tuple[str, float]]:
    return [(way, us) for way, us in m.host.items() if way.startswith("kvstore")]


def _name(m: Measured, way: str) -> str:
    return f"{way.removeprefix('kvstore ')}{' (wrong result!)' if way in m.wrong else ''}"


def _us(us: float) -> str:
    return table.time(us / 1e6)


def goals(measured: list[Measured]) -> list[list[str]]:
    """One row for every goal."""
    found = []
    for m in measured:
        case = m.case
        if case.share:
            share = m.floor / m.median(m.best)
            line = [case.name, "share of the copy rate", f"{share:.2f}", f"≥ {case.share:.2f}"]
            found.append([*line, _holds(share >= case.share)])
        for way, least in case.goals.items():
            if way in m.gpu:
                ratio = m.median(way) / m.median(m.best)
                line = [case.name, f"beside {way}", f"{ratio:.2f}", f"≥ {least:g}"]
                found.append([*line, _holds(ratio >= least)])
        if case.most_us:
            us = min(us for way, us in _own_host(m) if way != "kvstore plan.refresh")
            line = [case.name, "host, for a call", _us(us), f"≤ {case.most_us:g} µs"]
            found.append([*line, _holds(us <= case.most_us)])
    return found


def _holds(holds: bool) -> str:
    return "yes" if holds else "**no**"


def report(measured: list[Measured], where: str, rate: float) -> str:
    """Write the whole page."""
    rounds = len(next(iter(measured[0].gpu.values()))) if measured else 0
    return "\n".join(
        [
            "# The device store on a GPU, beside its rivals\n",
            f"{where}.\n\n"
            f"A plain copy moves {rate / 1e12:.3f} TB/s (bytes read and written); *at the copy rate* is what "
            "the bytes that a case must move would take. Ratios are *time of the peer ÷ time of kvstore*, "
            f"median [lowest-highest] of {rounds} rounds in which all peers took turns; times are by events "
            "of the GPU, over ten calls back to back; *host* is what the processor needs to queue a call. "
            "How, and what each peer does: [bench/README.md](../README.md).\n",
            "## Goals\n",
            table.markdown(GOALS_HEAD, goals(measured)),
            "## All cases\n",
            table.markdown(HEAD, rows(measured)),
        ]
    )


def _write(name: str, measured: list[Measured], torch: Any, rate: float) -> None:
    path = Path(name) if "/" in name else RESULTS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text(report(measured, machine(torch), rate))
    cases = [
        {
            "case": m.case.name,
            "bytes": m.case.nbytes,
            "gpu_us": {way: [round(us, 2) for us in found] for way, found in m.gpu.items()},
            "host_us": {way: round(us, 2) for way, us in m.host.items()},
            "wrong": m.wrong,
        }
        for m in measured
    ]
    content = {"machine": machine(torch), "copy_bytes_per_second": rate, "cases": cases}
    path.with_suffix(".json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
