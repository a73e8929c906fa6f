"""The cost of observation: one store with its log, metrics or timeline, compared with the store without them.

Where KVSTORE_BENCH_BEFORE names the interpreter of an environment with another kvstore, this is measured
too: an older kvstore, or one that was compiled without counters.

With ``--starts`` nothing is on, and only the two are compared, each started many times: the processes of one
store differ by more than the difference between the two.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.cases import dist, local, shared
from bench.peers.dist.launch import DistGroup
from bench.peers.group.driver import Alone
from bench.peers.setting import Setting
from bench.peers.shared.launch import SharedGroup
from bench.runner import machine, run, table
from bench.runner.claim import Claim
from bench.runner.rounds import Measured, Plan

#: Cases of other claims: a small call, a large call and the keys of a model.
WANTED = {
    "local": r"^pushpull k=2 (4 KB|4 MB)$",
    "shared": r"^2 processes, (round trip 4 KB, spin|all-reduce in the store, ResNet-50)$",
    "dist": r"^2 workers, 1 server: (4 KB|4 MB|ResNet-50)$",
}
#: Processes of one store differ by some percent during their whole life: the faster of two sets counts.
TWICE = 2
LABELS = {
    "before": "another kvstore",
    "log": "log, debug",
    "metrics": "metrics",
    "timeline": "timeline",
    "all": "all three",
}


_PATIENCE = 60.0  # seconds until it has answered
#: Asks another kvstore whether it counts; older versions have no such constant.
_COUNTS = "from kvstore.observe.native import _observe; print(getattr(_observe, 'COUNTS', True))"


def _other() -> str:
    """Return the name of the other kvstore."""
    python = os.environ.get("KVSTORE_BENCH_BEFORE")
    if not python:
        return LABELS["before"]
    command = [python, "-c", _COUNTS]
    said = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", timeout=_PATIENCE)
    return "kvstore without counters" if said.stdout.strip() == "False" else LABELS["before"]


_GROUPS = {"local": Alone, "shared": SharedGroup, "dist": DistGroup}


class Observe(Claim):
    name, title = "observe", "The cost of observation"
    rounds, turn = 7, 0.2
    common = ("rounds", "turn", "only", "list", "peers", "write")
    folder, starts = "", 0

    def options(self, parser: argparse.ArgumentParser) -> None:
        text = "compare with the other kvstore only, nothing on, both started N times"
        parser.add_argument("--starts", type=int, default=0, help=text)

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
        self.process = _GROUPS[self.job(cases[0])]
        claim, times = self.job(cases[0]), {"KVSTORE_TIMELINE": self.folder}
        metrics, log = {"KVSTORE_METRICS": "127.0.0.1:0"}, {"KVSTORE_LOG": "debug"}
        settings = {"": {}, "log": log, "metrics": metrics, "timeline": times, "all": log | metrics | times}
        found = [self._setting(claim, label, env) for label, env in settings.items()]
        if older := os.environ.get("KVSTORE_BENCH_BEFORE"):
            found.append(replace(self._setting(claim, "before", {}), python=str(Path(older).absolute())))
        return found * TWICE

    def _setting(self, claim: str, label: str, env: dict[str, str]) -> Setting:
        processes = 1 if claim == "local" else 2
        return Setting("ours", claim, sys.executable, label, tuple(env.items()), processes, column=label)

    def measured(self, chosen: list[Any], options: argparse.Namespace) -> Iterator[Any]:
        self.starts = options.starts
        if options.starts:
            self.title = "The cost of counters without a reader"
            yield from self._started_anew(chosen, options)
            return
        with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as self.folder:
            yield from super().measured(chosen, options)

    def _started_anew(self, chosen: list[Any], options: argparse.Namespace) -> Iterator[Measured]:
        run.needs_a_compiler()
        prober, plan = machine.Prober(), Plan(options.rounds, 0, turn=options.turn, field=1)
        for case in chosen:
            found = [m for n in range(options.starts) if (m := self._start_once(case, n % 2, plan, prober))]
            print(f"{case.name}: {len(found)} starts", file=sys.stderr)
            yield _together(found)

    def _start_once(self, case: Any, swapped: int, plan: Plan, prober: machine.Prober) -> Measured | None:
        """Start both, in alternating order, as the placement of memory depends on the order."""
        settings = {setting.label: setting for setting in self.settings([case])}
        both = [settings[label] for label in ("", "before") if label in settings]
        with run.running(self, both[::-1] if swapped else both) as peers:
            return run.one(self, case, peers, plan, prober)

    def about(self, rounds: int, minutes: float) -> str:
        if self.starts:
            return (
                "float32. Ratios are *time of the other build ÷ time of this build*, with nothing on: 0.99 "
                "is a cost of 1 %. Both are started for each ratio, and measured in turn; the median, and "
                "the interval that contains the true median with a probability of 95 %. Measured in "
                f"{minutes:.0f} minutes; how: [bench/README.md](../README.md)."
            )
        return (
            "float32. Ratios are *time with ÷ time without*: 1.02 is a cost of 2 %. Each is the median "
            f"[lowest-highest] of {rounds} rounds in which all took turns; times are medians. A timeline is "
            "written when a store closes, which is not in these times. Measured in "
            f"{minutes:.0f} minutes; how: [bench/README.md](../README.md)."
        )

    def sections(self, found: list[Measured]) -> Iterator[str]:
        if self.starts:
            rows = [_off_row(m) for m in found]
            yield table.markdown(["case", "kvstore", _other(), "other ÷ this", "95 %", "starts"], rows)
            return
        there = {label: text for label, text in LABELS.items() if any(label in m.seconds for m in found)}
        yield from ("## All cases\n", table.everything(found, there), *table.disturbed(found))


def _together(found: list[Measured]) -> Measured:
    """Merge several starts into one result: each start gives one time of both."""
    seconds = {name: [m.median(name) for m in found] for name in found[0].seconds}
    probes, others = [p for m in found for p in m.probes], [share for m in found for share in m.others]
    return Measured(found[0].case, seconds, found[0].variants, probes, others)


def _off_row(m: Measured) -> list[str]:
    if "before" not in m.seconds:
        return [m.case.name, table.time(m.median("ours")), "", "not run", "", str(len(m.seconds["ours"]))]
    ratios = m.ratios("before")
    low, high = interval_of_median(ratios)
    times = [table.time(m.median(name)) for name in ("ours", "before")]
    return [
        m.case.name,
        *times,
        f"{statistics.median(ratios):.3f}",
        f"{low:.3f}-{high:.3f}",
        str(len(ratios)),
    ]


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Return the order statistics that enclose the true median with a probability of at least 0.95.

    The number of values below the median is binomial with p = 1/2 (the sign test). With fewer than six values
    no two reach this probability: the lowest and the highest are returned.
    """
    ordered, n = sorted(values), len(values)
    outside, skipped = 0.0, 0
    while skipped < n // 2 and outside + 2 * math.comb(n, skipped) / 2**n <= 0.05:
        outside += 2 * math.comb(n, skipped) / 2**n
        skipped += 1
    at = max(skipped - 1, 0)
    return ordered[at], ordered[n - 1 - at]


CLAIM = Observe()
