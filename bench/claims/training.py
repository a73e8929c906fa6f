"""Time of a training step in PyTorch, on one host and between two, compared with DistributedDataParallel."""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from bench import ROOT
from bench.cases import training as cases
from bench.cases.training import Curves
from bench.claims import training_tables
from bench.peers.dist.hosts import Hosts
from bench.peers.setting import Setting
from bench.peers.training.launch import OneHost, TwoHosts
from bench.runner import earlier, machine, rivals, run, table
from bench.runner.claim import Claim
from bench.runner.rounds import Measured, Plan

_PATIENCE = 120.0  # seconds for an interpreter to report its versions
_VERSIONS = """import sys; sys.path.append(sys.argv[1]); import torch, kvstore
told = f"torch {torch.__version__.partition('+')[0]}, kvstore {kvstore.__version__}"
print(told, torch.distributed.is_mpi_available(), sep="|")"""


@dataclass
class Learnt:
    """The losses of all trainings, instead of times."""

    case: Curves
    runs: list[dict[str, Any]]
    #: The fields of `Measured` that the head of the page reads.
    probes: Sequence[machine.Probe] = ()
    others: Sequence[float] = ()


class Training(Claim):
    name, title = "training", "A training step in PyTorch"
    common = ("rounds", "turn", "only", "list", "write")
    rounds, turn = 5, 1.0
    picture = ""
    timed = ("seconds", "cpu", "moved")

    def options(self, parser: argparse.ArgumentParser) -> None:
        earlier.add_option(parser)

    def cases(self, options: argparse.Namespace) -> Iterable[Any]:
        return list(cases.all_cases())

    def plan(self, options: argparse.Namespace) -> Plan:
        """Plan few calls: a step of the largest model lasts seconds, and `prepare` has warmed up each way."""
        return replace(super().plan(options), least=1, warm=0, patience=60.0)

    def job(self, case: Any) -> Any:
        return case.job

    def settings(self, cases: Sequence[Any]) -> list[Setting]:
        return rivals.settings("training", ("torch",), processes=2, servers=cases[0].job[0])

    def measured(self, chosen: list[Any], options: argparse.Namespace) -> Iterator[Any]:
        """Measure on one host, then between hosts, one job after the other, after the kept results."""
        run.needs_a_compiler()
        if not rivals.interpreter("torch"):
            raise SystemExit(f"name a python with torch and kvstore: {rivals.RIVALS['torch'].variable}")
        if options.add:
            yield from kept(options.write)
        plan, prober = self.plan(options), machine.Prober()
        for (hosts, _), some in groupby(chosen, key=self.job):
            together = list(some)
            if hosts == 1:
                self.process = OneHost
                yield from self._steps(together, plan, prober)
                continue
            try:
                with Hosts(hosts, cases.link(together[0])) as TwoHosts.hosts:
                    yield from self._between_hosts(together, plan, prober)
            except OSError as error:
                raise SystemExit(str(error)) from None

    def _between_hosts(self, together: list[Any], plan: Plan, prober: machine.Prober) -> Iterator[Any]:
        self.process = TwoHosts
        yield from self._steps([case for case in together if not isinstance(case, Curves)], plan, prober)
        for case in together:
            if isinstance(case, Curves):
                start = time.time()
                (setting,) = self.settings([case])
                yield Learnt(case, TwoHosts(setting).losses(case))
                print(f"{case.name}: {time.time() - start:.1f} s", file=sys.stderr)

    def _steps(self, together: list[Any], plan: Plan, prober: machine.Prober) -> Iterator[Measured]:
        found = 0
        for m in run.measured(self, together, plan, prober):
            found += 1
            yield m
        if found < len(together):
            raise SystemExit("not all cases were measured; see the messages above")

    # -------------------------------------------------------------------------------------------- tables

    def where(self) -> str:
        return f"{super().where()}, {versions()[0]}"

    def head(self) -> dict[str, Any]:
        return {**super().head(), "versions": versions()[0]}

    def page(self, found: list[Any], took: float) -> str:
        found = earlier.newest(found, cases.all_cases())
        head = [f"# {self.title}\n", f"{self.where()}.\n\n{training_tables.about(versions()[1])}\n"]
        steps, learnt = split(found)
        return "\n".join([*head, table.state(steps), *training_tables.sections(steps, learnt)])

    def to_json(self, found: list[Any], took: float) -> str:
        return super().to_json(earlier.newest(found, cases.all_cases()), took)

    def fields(self, case: Any) -> dict[str, Any]:
        return {}

    def row(self, m: Any) -> dict[str, Any]:
        if isinstance(m, Learnt):
            return {"case": m.case.name, **asdict(m.case), "runs": m.runs}
        return super().row(m)


@functools.cache
def versions() -> tuple[str, bool]:
    """Return the versions of an interpreter's packages, and whether its torch has MPI.

    The interpreter runs outside the tree, so that it prefers an installed kvstore.
    """
    command = [rivals.interpreter("torch"), "-c", _VERSIONS, str(ROOT)]
    told = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=tempfile.gettempdir(), timeout=_PATIENCE
    )
    words, _, mpi = told.stdout.strip().partition("|")
    return words, mpi == "True"


def split(found: list[Any]) -> tuple[list[Measured], list[Learnt]]:
    """Separate steps from losses."""
    learnt = [m for m in found if isinstance(m, Learnt)]
    return [m for m in found if not isinstance(m, Learnt)], learnt


def kept(name: str) -> Iterator[Any]:
    """Read the earlier results, without cases that lack a way that exists now."""
    for case, row in earlier.read(name, cases.all_cases()):
        if isinstance(case, Curves):
            yield Learnt(case, row["runs"])
        elif row["seconds"].keys() >= set(case.ways):
            yield earlier.measured(case, row, Training.timed)


CLAIM = Training()
