"""A simulated job of hundreds of workers: the real state machines on simulated processors and links.

The costs of calls, messages, requests and bytes are measured first, with real jobs of 1 to 8 workers. Then
real jobs of 16 to 64 workers are compared with simulated jobs. Last, larger jobs are simulated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.cases import scale as cases
from bench.claims import scale_tables
from bench.runner import machine, table
from bench.runner.claim import Claim
from bench.scale import calibrate, experiments
from bench.scale.costs import Costs


@dataclass
class Measured:
    """A case and its figures."""

    case: Any
    figures: dict[str, Any]


class Scale(Claim):
    name, title = "scale", "A job of hundreds, simulated"
    common = ("only", "list", "write")
    picture = ""

    def __init__(self) -> None:
        self._costs: Costs | None = None
        self._jobs: list[dict[str, Any]] = []  # the jobs that costs were fitted to
        self._where = machine.describe()

    def options(self, parser: argparse.ArgumentParser) -> None:
        told = "use the costs of the first of these .json, and the chosen cases of all of them"
        parser.add_argument("--costs", type=Path, nargs="+", default=[], help=told)

    def cases(self, options: argparse.Namespace) -> Iterable[Any]:
        return list(cases.cases())

    def measured(self, chosen: list[Any], options: argparse.Namespace) -> Iterator[Measured]:
        kept: dict[str, dict[str, Any]] = {}
        if options.costs:
            kept = self._read(options.costs)
        else:
            found = calibrate.measure(list(calibrate.cases()))
            self._costs = calibrate.fit(found)
            self._jobs = [{"job": asdict(case), "found": asdict(one)} for case, one in found]
        assert self._costs is not None
        for case in chosen:
            if (known := kept.get(_key(asdict(case)))) is not None:
                yield Measured(case, known)
                continue
            figures = experiments.run(case, self._costs)
            print(
                f"{case.name}: {figures['took']:.1f} s, {figures['memory'] / 2**30:.1f} GiB", file=sys.stderr
            )
            yield Measured(case, figures)

    def _read(self, paths: list[Path]) -> dict[str, dict[str, Any]]:
        """Read costs, the jobs that they were fitted to, and cases."""
        first, *others = [json.loads(path.read_text()) for path in paths]
        self._costs, self._jobs = Costs.from_json(first["costs"]), first["jobs"]
        self._where = first["machine"]
        rows = [one for read in (first, *others) for one in read["cases"]]
        return {_key(one["about"]): one["figures"] for one in rows}

    def page(self, found: list[Measured], took: float) -> str:
        return scale_tables.page(json.loads(self.to_json(found, took)))

    def to_json(self, found: list[Measured], took: float) -> str:
        assert self._costs is not None
        head = {"machine": self._where, "costs": self._costs.to_json(), "jobs": self._jobs}
        return table.lines(head, "cases", [_row(one) for one in found])


def _key(about: dict[str, Any]) -> str:
    """Return the key of a figure that several tables have."""
    return json.dumps(
        {name: one for name, one in about.items() if name not in ("name", "group")}, sort_keys=True
    )


def _row(one: Measured) -> dict[str, Any]:
    return {
        "case": one.case.name,
        "group": one.case.group,
        **{"about": asdict(one.case)},
        "figures": one.figures,
    }


CLAIM = Scale()
