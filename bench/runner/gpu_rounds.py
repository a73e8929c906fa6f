"""Time on a GPU by its own events, with the peers in turn, and time of the host for a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.cases.device import DeviceCase
from bench.peers.base import Unsupported
from bench.peers.device.base import Data, Peer, Way
from kvstore.observe.bench.rounds import in_turn, round_ratios


@dataclass
class Measured:
    """The figures of a case; times in microseconds, one for each round."""

    case: DeviceCase
    copy_rate: float  # bytes in a second, read and written
    gpu: dict[str, list[float]] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    wrong: dict[str, float] = field(default_factory=dict)
    ours: list[str] = field(default_factory=list)

    def median(self, way: str) -> float:
        """Return the median time of a way."""
        return statistics.median(self.gpu[way])

    @property
    def best(self) -> str:
        """Return the fastest way of kvstore."""
        return min(self.ours, key=self.median)

    @property
    def floor(self) -> float:
        """Return the time of the bytes of the case at the rate of a copy."""
        return self.case.nbytes / self.copy_rate * 1e6

    def ratios(self, way: str) -> list[float]:
        """Return the time of a way ÷ that of kvstore, by round."""
        return round_ratios(self.gpu[way], self.gpu[self.best])


class Clock:
    """Events of the GPU, or, for a trial without one, the clock of the host."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch, self._gpu = torch, device == "cuda"

    def wait(self) -> None:
        """Block until the GPU is idle."""
        if self._gpu:
            self._torch.cuda.synchronize()

    def time(self, work: Callable[[], None], calls: int) -> float:
        """Return the microseconds of one of the `calls` that `work` makes back to back."""
        if not self._gpu:
            start = time.perf_counter()
            work()
            return (time.perf_counter() - start) / calls * 1e6
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / calls


def copy_rate(torch: Any, device: str, clock: Clock, elements: int) -> float:
    """Return the bytes that a plain copy reads and writes in a second, the best of eight."""
    a, b = (torch.ones(elements, device=device) for _ in range(2))

    def copies() -> None:
        for _ in range(10):
            b.copy_(a)

    best = min(clock.time(copies, 10) for _ in range(8))
    return 8 * elements / best * 1e6


def measure(
    case: DeviceCase, peers: list[Peer], torch: Any, device: str, rate: float, rounds: int, calls: int = 10
) -> Measured | None:
    """Measure the peers in turn; return None where kvstore cannot run the case here."""
    clock, data = Clock(torch, device), Data(case, torch, device)
    found, ways = Measured(case, rate), dict[str, Way]()
    reference = _reference(case, data)
    for peer in peers:
        try:
            theirs = peer.ways(data)
        except Unsupported:
            continue
        for name, way in theirs.items():
            named = f"kvstore {name}" if peer is peers[0] else name
            way(0)
            clock.wait()
            found.wrong.update(_compared(named, peer.results(data), reference, torch))
            ways[named] = way
            if peer is peers[0]:
                found.ours.append(named)
    if found.ours:
        _take_turns(ways, data, clock, found, rounds, calls)
        for name, way in ways.items():
            found.host[name] = host_us(lambda way=way: way(0), clock)  # type: ignore[misc]
        refresh = getattr(peers[0], "refresh", None)
        if refresh is not None and len(case.sizes) > 1 and case.op == "sum":
            found.host["kvstore plan.refresh"] = host_us(refresh(data), clock)
    for peer in peers:
        peer.release()
    return found if found.ours else None


def _take_turns(
    ways: dict[str, Way], data: Data, clock: Clock, found: Measured, rounds: int, calls: int
) -> None:
    names = list(ways)
    found.gpu = {name: [] for name in names}
    for way in ways.values():
        for i in range(data.sets):
            way(i)
    clock.wait()
    for number in range(rounds):
        for name in in_turn(names, number):
            way = ways[name]

            def work(way: Way = way) -> None:
                for i in range(calls):
                    way(i % data.sets)

            found.gpu[name].append(clock.time(work, calls))


def host_us(call: Callable[[], Any], clock: Clock, batches: int = 5, calls: int = 100) -> float:
    """Return the microseconds of the host for a call, while the queue of the GPU is short."""
    best = float("inf")
    for _ in range(batches):
        clock.wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    clock.wait()
    return best


def _reference(case: DeviceCase, data: Data) -> list[Any] | None:
    if case.op != "sum":
        return None
    return [sum(value.double() for value in values) for values in data.values[0]]


def _compared(name: str, results: Any, reference: Any, torch: Any) -> dict[str, float]:
    """Return a way whose result is not the sum, with its relative error."""
    if results is None or reference is None:
        return {}
    worst = 0.0
    for result, right in zip(results, reference, strict=True):
        error = (result.double() - right).norm() / right.norm().clamp_min(1e-30)
        worst = max(worst, float(error)) if not torch.isnan(error) else float("inf")
    return {name: worst} if worst > 1e-2 else {}
