"""The `device` store on a GPU and its rivals, as shares of the copy rate."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from bench.cases.device import all_cases
from bench.peers.device.base import Peer
from bench.peers.device.ours import Ours
from bench.peers.device.rivals import CuPy, Torch, Triton
from bench.runner import table
from bench.runner.claim import Claim
from bench.runner.gpu_rounds import Clock, Measured, copy_rate, measure

_SMALL = 1 << 14


class Device(Claim):
    name, title = "device", "The device store on a GPU, compared with its rivals"
    common = tuple(option for option in Claim.common if option != "turn")
    rounds = 15

    def options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after this time")
        parser.add_argument("--trial", action="store_true", help="small cases, on the processor")

    def cases(self, options: argparse.Namespace) -> Iterable[Any]:
        return all_cases(_SMALL, (1000, 3, 70)) if options.trial else all_cases()

    def measured(self, chosen: list[Any], options: argparse.Namespace) -> Iterator[Measured]:
        """Measure one case after the other, all peers in this process."""
        torch: Any = importlib.import_module("torch")
        device = "cpu" if options.trial else "cuda"
        if device == "cuda" and not torch.cuda.is_available():
            raise SystemExit("there is no GPU here; --trial runs small cases on the processor")
        rate = copy_rate(torch, device, Clock(torch, device), _SMALL if options.trial else 256 << 20)
        started = time.time()
        for number, case in enumerate(chosen, start=1):
            if time.time() - started > options.seconds:
                print(f"time is up: {len(chosen) - number + 1} cases are left out", file=sys.stderr)
                break
            result = measure(case, peers(options.peers), torch, device, rate, options.rounds)
            if device == "cuda":
                torch.cuda.empty_cache()
            print(f"{number}/{len(chosen)} {case.name}", file=sys.stderr, flush=True)
            if result is not None:
                yield result

    def where(self) -> str:
        return machine(importlib.import_module("torch"))

    def page(self, found: list[Measured], took: float) -> str:
        rounds = len(next(iter(found[0].gpu.values()))) if found else 0
        about = (
            f"{self.where()}.\n\n"
            f"A plain copy moves {_rate(found) / 1e12:.3f} TB/s (bytes read and written); *at the copy rate* "
            "is the time of the bytes that a case must move. Ratios are *time of the peer ÷ time of "
            f"kvstore*, median [lowest-highest] of {rounds} rounds in which all peers took turns; times "
            "are by events of the GPU, over ten calls back to back; *host* is the processor's time to "
            "queue a call. The method, and the work of each peer: [bench/README.md](../README.md).\n"
        )
        return "\n".join([f"# {self.title}\n", about, *self.sections(found)])

    def sections(self, found: list[Measured]) -> Iterator[str]:
        yield from ("## Goals\n", table.markdown(GOALS_HEAD, goals(found)))
        yield from ("## All cases\n", table.markdown(HEAD, rows(found)))

    def to_json(self, found: list[Measured], took: float) -> str:
        head = {"machine": self.where(), "copy_bytes_per_second": _rate(found)}
        content = {**head, "cases": list(map(_row, found))}
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def peers(only: str = "") -> list[Peer]:
    """Make the peers, kvstore first."""
    rivals: list[Peer] = [Torch(), CuPy(), Triton()]
    return [Ours(), *(rival for rival in rivals if re.search(only, rival.name))]


def _rate(found: list[Measured]) -> float:
    return found[0].copy_rate if found else 0.0


def _row(m: Measured) -> dict[str, Any]:
    return {
        "case": m.case.name,
        "bytes": m.case.nbytes,
        "gpu_us": {way: [round(us, 2) for us in found] for way, found in m.gpu.items()},
        "host_us": {way: round(us, 2) for way, us in m.host.items()},
        "wrong": m.wrong,
    }


def machine(torch: Any) -> str:
    """Return the names of the GPU and the versions."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()}, no GPU"
    versions = [f"Python {platform.python_version()}", f"PyTorch {torch.__version__}"]
    for name in ("cupy", "triton", "numba_cuda"):
        module = sys.modules.get(name)
        versions += [f"{name} {module.__version__}"] if module is not None else []
    return f"{gpu}; {', '.join(versions)}"


HEAD = ["case", "at the copy rate", "kvstore", "share of the copy rate", "host", "compared with"]
GOALS_HEAD = ["case", "what", "measured", "goal", "holds"]


def rows(measured: list[Measured]) -> list[list[str]]:
    """Return one row for each case, with all peers in its last cell."""
    return [_case(m) for m in measured]


def _case(m: Measured) -> list[str]:
    others = [
        f"{_name(m, way)} {_us(m.median(way))}: {table.spread(m.ratios(way))}"
        for way in m.gpu
        if way not in m.ours
    ]
    hosts = ", ".join(f"{way.removeprefix('kvstore ')} {_us(us)}" for way, us in _own_host(m))
    cells = [m.case.name, _us(m.floor), f"{_us(m.median(m.best))} ({_name(m, m.best)})"]
    return [*cells, table.spread([m.floor / us for us in m.gpu[m.best]]), hosts, "<br>".join(others)]


def _own_host(m: Measured) -> list[tuple[str, float]]:
    return [(way, us) for way, us in m.host.items() if way.startswith("kvstore")]


def _name(m: Measured, way: str) -> str:
    return f"{way.removeprefix('kvstore ')}{' (wrong result!)' if way in m.wrong else ''}"


def _us(us: float) -> str:
    return table.time(us / 1e6)


def goals(measured: list[Measured]) -> list[list[str]]:
    """Return one row for each goal."""
    return [row for m in measured for row in _goals(m)]


def _goals(m: Measured) -> Iterator[list[str]]:
    case, best = m.case, m.median(m.best)
    least = {"share of the copy rate": (m.floor / best, case.share)} if case.share else {}
    least |= {
        f"compared with {way}": (m.median(way) / best, ratio)
        for way, ratio in case.goals.items()
        if way in m.gpu
    }
    for what, (found, wanted) in least.items():
        goal = f"≥ {wanted:g}" if what.startswith("compared") else f"≥ {wanted:.2f}"
        yield [case.name, what, f"{found:.2f}", goal, table.mark(found >= wanted)]
    if case.most_us:
        us = min(us for way, us in _own_host(m) if way != "kvstore plan.refresh")
        goal = f"≤ {case.most_us:g} µs"
        yield [case.name, "host, for a call", _us(us), goal, table.mark(us <= case.most_us)]


CLAIM = Device()
