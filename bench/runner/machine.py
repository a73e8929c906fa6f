"""The machine: its name for the tables, a probe of its state, and the load by other processes."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.cases.common import MB
from bench.runner import compiled


def describe() -> str:
    """Return processor, cores, memory and kernel; no names of hosts or people."""
    cpu = _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    memory = _field("/proc/meminfo", "MemTotal").partition(" ")[0]
    size = f", {int(memory) / 1024**2:.0f} GiB" if memory else ""
    system = f"{platform.system()} {platform.release().partition('-')[0]}"
    return f"{cpu}, {_family()}{len(cpus())} cores usable{size}, {system}, Python {platform.python_version()}"


def cpus() -> list[int]:
    """Return the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _family() -> str:
    family, model = _field("/proc/cpuinfo", "cpu family"), _field("/proc/cpuinfo", "model\t")
    return f"family {family} model {model}, " if family and model else ""


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


@dataclass(frozen=True)
class Probe:
    """State of the machine at one moment."""

    round_trip_ns: float
    read_gbs: float


class Prober:
    """Measures, in 0.3 s, the latency between two cores and the rate of memory reads."""

    def __init__(self) -> None:
        self._code = compiled.load(Path(__file__).with_name("probe.c"))
        self._code.round_trip.restype = ctypes.c_double
        self._code.read_rate.restype = ctypes.c_double
        self._data = np.ones(256 * MB // 4, np.float32)

    def __call__(self) -> Probe:
        a, b = cpus()[0], cpus()[-1]
        trip = self._code.round_trip(ctypes.c_double(0.1), a, b) if a != b else 0.0
        where = ctypes.c_void_p(self._data.ctypes.data)
        rate = self._code.read_rate(where, ctypes.c_ssize_t(self._data.size), ctypes.c_double(0.2), a, b)
        return Probe(trip, rate / 1e9)


class Others:
    """The share of the processors that processes other than `pids` used since `start`; NaN where unknown."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = list(pids)
        self.start()

    def start(self) -> None:
        self._busy, self._total = _machine_ticks()
        self._own = self._own_ticks()

    def share(self) -> float:
        busy, total = _machine_ticks()
        if total <= self._total:
            return float("nan")
        foreign = (busy - self._busy) - (self._own_ticks() - self._own)
        return max(0.0, foreign / (total - self._total))

    def _own_ticks(self) -> int:
        return sum(_ticks(pid) for pid in self._pids)


def _machine_ticks() -> tuple[int, int]:
    try:
        numbers = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0, 0
    return sum(numbers) - numbers[3] - numbers[4], sum(numbers)


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])
