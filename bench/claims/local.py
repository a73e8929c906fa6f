"""Ratios of the store in one process to its rivals, measured in turn."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bench.cases import local as cases
from bench.cases.local import LocalCase
from bench.peers.setting import Setting
from bench.runner import machine, rivals, table
from bench.runner.claim import Claim
from bench.runner.rounds import Measured

PEERS = {"limit": "compiled limit", "numpy": "NumPy", "mxnet": "MXNet 1.9.1", "torch": "torch fused"}
BANDWIDTH_HEAD = ["pass over 64 MB", "GB/s moved", "best with"]
_THREADS = ("OMP_NUM_THREADS", "MXNET_KVSTORE_REDUCTION_NTHREADS", "MXNET_CPU_WORKER_NTHREADS")


class Local(Claim):
    name, title = "local", "The store in one process, compared with its rivals"

    def cases(self, options: argparse.Namespace) -> Iterable[Any]:
        return cases.all_cases()

    def always(self) -> list[Any]:
        return cases.streams()

    def settings(self, cases: Sequence[Any] = ()) -> list[Setting]:
        """Return the settings; MXNet runs twice, tuned for this number of cores and with its defaults."""
        tuned = dict.fromkeys(_THREADS, str(len(machine.cpus())))
        variants = {"mxnet": {"tuned": tuned, "default settings": {}}}
        return rivals.settings("local", ("ours", "numpy", "limit", "mxnet", "torch"), variants)

    def sections(self, found: list[Measured]) -> Iterator[str]:
        streams = [m for m in found if _is_stream(m.case)]
        measured = [m for m in found if not _is_stream(m.case)]
        ran = [row for row in table.goals(measured, PEERS) if row[-1] != "not run"]
        yield from table.section("Goals", table.GOALS_HEAD, ran)
        yield from table.section("Bandwidth of the memory", BANDWIDTH_HEAD, bandwidth(streams))
        yield from ("## All cases\n", table.everything(measured, PEERS), *table.disturbed(measured))


def _is_stream(case: LocalCase) -> bool:
    return case.verb in cases.STREAMS


def bandwidth(measured: Iterable[Measured]) -> list[list[str]]:
    """Return one row for each bare pass: the bytes that it moves each second."""
    rows = []
    for m in measured:
        moved = m.case.nbytes * {"read": 1, "write": 1, "copy": 2, "scale": 2}[m.case.verb] / 1e9
        rates = [moved / seconds for seconds in m.seconds["limit"]]
        rows.append([m.case.verb, table.spread(rates), m.variants["limit"] or "ordinary stores"])
    return rows


CLAIM = Local()
