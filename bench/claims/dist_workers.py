"""How the cost of a call to the parameter server grows with its workers.

Jobs of 2 to 64 workers and 1 server pushpull one key of 4 KB, and one of 4 MB. A server handles the bytes of
all workers, so the cost of a call should be linear in the workers: divided by them it is constant. Where
there are more workers than cores, processor seconds are more exact than the time of the last worker.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from bench.cases.common import KB, MB
from bench.cases.dist import ENTRIES, DistCase
from bench.claims import dist
from bench.runner import table
from bench.runner.rounds import Measured, Plan

WORKERS = (2, 4, 8, 16, 32, 64)
SIZES = {"4 KB": 4 * KB, "4 MB": 4 * MB}
PEERS = ("ours", "ours shm", "zmq-c", "sum")


class DistWorkers(dist.Dist):
    name, title = "dist-workers", "Cost of a worker"
    common = ("rounds", "turn", "only", "list", "peers", "workers", "write")
    workers = WORKERS
    picture = ""

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Add no options."""

    def instead(self, options: argparse.Namespace) -> str:
        return ""

    def cases(self, options: argparse.Namespace) -> Iterable[Any]:
        return [case(workers, size) for workers in options.workers for size in SIZES]

    def plan(self, options: argparse.Namespace) -> Plan:
        return replace(dist.FULL, rounds=options.rounds, turn=options.turn)

    def sections(self, found: list[Measured]) -> Iterator[str]:
        numbers = sorted({m.case.workers for m in found})
        head = ["peer", *(f"{n} workers" for n in numbers), "last ÷ first"]
        for size in SIZES:
            for of, what in (("seconds", "time"), ("cpu", "processor seconds")):
                heading = f"One key of {size}: {what} of a pushpull ÷ workers"
                yield from table.section(heading, head, each(found, size, numbers, of))
        yield from ("## All cases\n", dist.everything(found), *table.disturbed(found))


def case(workers: int, size: str) -> DistCase:
    """Make the case of one key and `workers` workers."""
    return DistCase(f"{workers} workers: {size}", ((SIZES[size] // 4,),), workers, peers=PEERS)


def each(found: list[Measured], size: str, numbers: Sequence[int], of: str) -> list[list[str]]:
    """Format one row for each peer: seconds of a pushpull, or processor seconds, ÷ the workers."""
    rows = []
    for peer in PEERS:
        times = {
            m.case.workers: statistics.median(getattr(m, of)[peer]) / m.case.workers
            for m in found
            if m.case.nbytes == SIZES[size] and peer in m.seconds
        }
        if times:
            cells = [table.time(times[n]) if n in times else "" for n in numbers]
            rows.append([ENTRIES[peer].label, *cells, f"{times[max(times)] / times[min(times)]:.2f}"])
    return rows


CLAIM = DistWorkers()
