"""Ratios of gradient compression on the CPU to its rivals, measured in turn."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bench.cases import compression as cases
from bench.claims import local
from bench.peers.setting import Setting
from bench.runner import machine, rivals, table
from bench.runner.claim import Claim
from bench.runner.rounds import Measured

PEERS = {peer: local.PEERS[peer] for peer in ("limit", "numpy", "mxnet")}


class Compression(Claim):
    name, title = "compression", "Gradient compression on the CPU, compared with its rivals"
    what = "float32 gradients, threshold 0.5"
    times = (
        ". MXNet's times of *quantise* and *dequantise* are those of its operators alone, as all cores "
        "together do them"
    )

    def cases(self, options: argparse.Namespace) -> Iterable[Any]:
        return cases.all_cases()

    def settings(self, cases: Sequence[Any] = ()) -> list[Setting]:
        """Return the settings; MXNet has operators of one thread, of all threads, and its defaults."""
        cores = str(len(machine.cpus()))
        mxnet: dict[str, dict[str, str]] = {
            "operators of one thread": {"OMP_NUM_THREADS": "1", "MXNET_CPU_WORKER_NTHREADS": cores},
            "operators of all threads": {"OMP_NUM_THREADS": cores, "MXNET_KVSTORE_REDUCTION_NTHREADS": cores},
            "default settings": {},
        }
        return rivals.settings("compression", ("ours", "numpy", "limit", "mxnet"), {"mxnet": mxnet})

    def sections(self, found: list[Measured]) -> Iterator[str]:
        ran = [row for row in table.goals(found, PEERS) if row[-1] != "not run"]
        yield from table.section("Goals", table.GOALS_HEAD, ran)
        if missing := _missing(found):
            yield f"Not run: {missing}.\n"
        yield from ("## All cases\n", table.everything(found, PEERS), *table.disturbed(found))
        ways = [[m.case.name, *(m.variants.get(peer, "") for peer in PEERS)] for m in found]
        yield "## The way of each peer that was best\n"
        yield table.markdown(["case", *PEERS.values()], ways)


def _missing(measured: list[Measured]) -> str:
    """Return the peers of a goal that did not run."""
    gone = {peer for m in measured for peer in m.case.goals if peer not in m.seconds}
    return ", ".join(label for peer, label in PEERS.items() if peer in gone)


CLAIM = Compression()
