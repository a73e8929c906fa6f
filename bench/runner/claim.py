"""The interface of a claim: its cases, its peers, its tables. `bench.runner.run` measures it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from bench.peers.group.driver import Alone, Group
from bench.peers.setting import Setting
from bench.runner import machine, run, table
from bench.runner.rounds import Measured, Plan


class Claim:
    """One subject of ``python -m bench``; the defaults are for peers that are measured in turn."""

    #: The name on the command line, and the heading of its page.
    name = ""
    title = ""
    #: The data and the worker of the times: parts of the sentences below the heading.
    what, times = "float32", ""
    #: Options of `bench.runner.run.OPTIONS` that it has.
    common: tuple[str, ...] = ("rounds", "turn", "only", "goals", "list", "peers", "write")
    rounds, turn = 7, Plan.turn
    workers: tuple[int, ...] = ()
    #: The part between a name of results and ``.png``; None if there is nothing to draw.
    picture: str | None = None
    #: The class that starts the processes of a peer.
    process: type[Group] = Alone
    #: The figures that are written of each case.
    timed: tuple[str, ...] = ("seconds",)

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of this claim."""

    def instead(self, options: argparse.Namespace) -> str:
        """Return a text to print instead of a measurement."""
        return ""

    # --------------------------------------------------------------------------------------------- cases

    def cases(self, options: argparse.Namespace) -> Iterable[Any]:
        """List all cases, in the order of the tables."""
        raise NotImplementedError

    def always(self) -> list[Any]:
        """Return the cases that are always measured, before the chosen ones."""
        return []

    def plan(self, options: argparse.Namespace) -> Plan:
        """Return the plan of a full run; half as many more rounds where other processes were busy."""
        return Plan(options.rounds, options.rounds // 2, turn=options.turn)

    def plan_of(self, case: Any, plan: Plan) -> Plan:
        """Return the plan of one case."""
        return plan

    # --------------------------------------------------------------------------------------------- peers

    def settings(self, cases: Sequence[Any]) -> list[Setting]:
        """Return the peers that can run here and have any of these cases of one job, kvstore first."""
        raise NotImplementedError

    def job(self, case: Any) -> Any:
        """Return the job of a case: the same processes measure all cases of a job."""
        return ()

    def takes(self, case: Any, peer: str) -> bool:
        """Return whether a peer is measured in a case."""
        return True

    def memory(self, case: Any, setting: Setting) -> float:
        """Return the bytes that a peer needs for a case."""
        return 0.0

    def measured(self, chosen: list[Any], options: argparse.Namespace) -> Iterator[Any]:
        """Measure one case after the other."""
        run.needs_a_compiler()
        plan = self.plan(options)
        return run.measured(self, [*self.always(), *chosen], plan, machine.Prober(), options.peers)

    # -------------------------------------------------------------------------------------------- tables

    def sections(self, found: list[Any]) -> Iterator[str]:
        """Format the tables of the page."""
        raise NotImplementedError

    def where(self) -> str:
        """Return the name of the machine."""
        return machine.describe()

    def about(self, rounds: int, minutes: float) -> str:
        """Return the explanation of the figures, below the heading."""
        return (
            f"{self.what}. Ratios are *time of the peer ÷ time of kvstore*: above 1, kvstore is faster. Each "
            f"is the median [lowest-highest] of {rounds} rounds in which all peers took turns; times are "
            f"medians{self.times}. Measured in {minutes:.0f} minutes; method, and the work of each peer: "
            "[bench/README.md](../README.md)."
        )

    def page(self, found: list[Any], took: float) -> str:
        """Write the whole page."""
        about = self.about(len(found[0].others) if found else 0, took / 60)
        head = [f"# {self.title}\n", f"{self.where()}.\n\n{about}\n", table.state(found)]
        return "\n".join([*head, *self.sections(found)])

    def head(self) -> dict[str, Any]:
        """Return the fields of the measurement, for the JSON."""
        return {"machine": machine.describe()}

    def fields(self, case: Any) -> dict[str, Any]:
        """Return the fields of a case, for the JSON."""
        return {"goals": case.goals}

    def to_json(self, found: list[Any], took: float) -> str:
        """Write one line for each case."""
        return table.lines(self.head(), "cases", map(self.row, found))

    def row(self, m: Measured) -> dict[str, Any]:
        """Format one case for the JSON."""
        row: dict[str, Any] = {"case": m.case.name, **self.fields(m.case)}
        for name in self.timed:
            row[name] = {p: [float(f"{s:.4g}") for s in times] for p, times in getattr(m, name).items()}
        row |= {"variants": m.variants, "wrong": m.wrong, "others": [round(share, 3) for share in m.others]}
        row["probes"] = [{name: round(value, 1) for name, value in asdict(p).items()} for p in m.probes]
        return row
