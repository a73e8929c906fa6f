"""What it costs to look on: one store with its log, its metrics or its timeline, beside itself without them.

Where KVSTORE_BENCH_BEFORE names the interpreter of an environment with an older kvstore, that takes part.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.cases import dist, local, shared
from bench.peers.dist.launch import DistGroup
from bench.peers.process import PeerProcess, Process, Setting
from bench.peers.shared.launch import SharedGroup
from bench.runner import table
from bench.runner.claim import Claim
from bench.runner.rounds import Measured

#: Cases of other claims: a small call, a large one and the keys of a model.
WANTED = {
    "local": r"^pushpull k=2 (4 KB|4 MB)$",
    "shared": r"^2 processes, (round trip 4 KB, spin|all-reduce in the store, ResNet-50)$",
    "dist": r"^2 workers, 1 server: (4 KB|4 MB|ResNet-50)$",
}
#: Processes of one store differ by some percent, for as long as they live: the better ones of two count.
TWICE = 2
LABELS = {
    "before": "an older kvstore",
    "log": "log, debug",
    "metrics": "metrics",
    "timeline": "timeline",
    "all": "all three",
}


class _InLocal(PeerProcess):
    def column(self, variant: str) -> str:
        return self.setting.label or self.setting.name


class _InShared(SharedGroup):
    def column(self, variant: str) -> str:
        return self.setting.label or self.setting.name


class _InDist(DistGroup):
    def column(self, variant: str) -> str:
        apart = super().column(variant).removeprefix(self.setting.name)
        return (self.setting.label or self.setting.name) + apart


_PROCESSES = {"local": _InLocal, "shared": _InShared, "dist": _InDist}


def _start(setting: Setting) -> Process:
    return _PROCESSES[setting.claim](setting)


class Observe(Claim):
    name, title = "observe", "What it costs to look on"
    rounds, turn = 7, 0.2
    common = ("rounds", "turn", "only", "list", "peers", "write")
    process = staticmethod(_start)  # type: ignore[assignment]
    folder = ""

    def cases(self, options: argparse.Namespace) -> Iterable[Any]:
        for name, cases in (
            ("local", local.all_cases()), ("shared", shared.all_cases((2,))), ("dist", dist.all_cases())
        ):  # fmt: skip
            for case in cases:
                if re.search(WANTED[name], case.name):
                    yield replace(case, goals=type(case.goals)())

    def job(self, case: Any) -> str:
        return case.__module__.rpartition(".")[2]

    def settings(self, cases: Sequence[Any]) -> list[Setting]:
        claim, times = self.job(cases[0]), {"KVSTORE_TIMELINE": self.folder}
        metrics, log = {"KVSTORE_METRICS": "127.0.0.1:0"}, {"KVSTORE_LOG": "debug"}
        settings = {"": {}, "log": log, "metrics": metrics, "timeline": times, "all": log | metrics | times}
        found = [self._setting(claim, label, env) for label, env in settings.items()]
        if older := os.environ.get("KVSTORE_BENCH_BEFORE"):
            found.append(replace(self._setting(claim, "before", {}), python=str(Path(older).absolute())))
        return found * TWICE

    def _setting(self, claim: str, label: str, env: dict[str, str]) -> Setting:
        processes = 1 if claim == "local" else 2
        return Setting("ours", claim, sys.executable, label, tuple(env.items()), processes)

    def measured(self, chosen: list[Any], options: argparse.Namespace) -> Iterator[Any]:
        with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as self.folder:
            yield from super().measured(chosen, options)

    def about(self, rounds: int, minutes: float) -> str:
        return (
            "float32. Ratios are *time with ÷ time without*: 1.02 is a cost of 2 %. Each is the median "
            f"[lowest-highest] of {rounds} rounds in which all took turns; times are medians. A timeline is "
            "written when a store closes, which is not in these times. Measured in "
            f"{minutes:.0f} minutes; how: [bench/README.md](../README.md)."
        )

    def sections(self, found: list[Measured]) -> Iterator[str]:
        there = {label: text for label, text in LABELS.items() if any(label in m.seconds for m in found)}
        yield from ("## All cases\n", table.everything(found, there), *table.disturbed(found))


CLAIM = Observe()
