"""What a claim says of itself: its cases, its peers, its tables. `bench.runner.run` does the rest."""

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
    """One subject of ``python -m bench``; the defaults are those of a claim that is measured in turns."""

    #: What the command line calls it, and the heading of its page.
    name = ""
    title = ""
    #: What was summed, and whose times they are: parts of the sentences below the heading.
    what, times = "float32", ""
    #: Options of `bench.runner.run.OPTIONS` that it has.
    common: tuple[str, ...] = ("rounds", "turn", "only", "goals", "list", "peers", "write")
    rounds, turn = 7, Plan.turn
    workers: tuple[int, ...] = ()
    #: What stands between a name of results and ``.png``; None if there is nothing to draw.
    picture: str | None = None
    #: How the processes of a peer are started.
    process: type[Group] = Alone
    #: What is written of each case, beside its seconds.
    timed: tuple[str, ...] = ("seconds",)

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Add options of its own."""

    def instead(self, options: argparse.Namespace) -> str:
        """Return what to print instead of measuring."""
        return ""

    # --------------------------------------------------------------------------------------------- cases

    def cases(self, options: argparse.Namespace) -> Iterable[Any]:
        """List every case, in the order of the tables."""
        raise NotImplementedError

    def always(self) -> list[Any]:
        """Cases that are measured first, whatever is chosen."""
        return []

    def plan(self, options: argparse.Namespace) -> Plan:
        """Return the plan of a full run; half as many rounds more where others were busy."""
        return Plan(options.rounds, options.rounds // 2, turn=options.turn)

    def plan_of(self, case: Any, plan: Plan) -> Plan:
        """Return the plan of one case."""
        return plan

    # --------------------------------------------------------------------------------------------- peers

    def settings(self, cases: Sequence[Any]) -> list[Setting]:
        """Return the peers that can run here and take part in any of these cases of one job, ours first."""
        raise NotImplementedError

    def job(self, case: Any) -> Any:
        """Cases of one job are done by the same processes."""
        return ()

    def takes(self, case: Any, peer: str) -> bool:
        """Whether a peer is measured in a case."""
        return True

    def memory(self, case: Any, setting: Setting) -> float:
        """Bytes that a peer needs for a case."""
        return 0.0

    def measured(self, chosen: list[Any], options: argparse.Namespace) -> Iterator[Any]:
        """Measure case after case."""
        run.needs_a_compiler()
        plan = self.plan(options)
        return run.measured(self, [*self.always(), *chosen], plan, machine.Prober(), options.peers)

    # -------------------------------------------------------------------------------------------- tables

    def sections(self, found: list[Any]) -> Iterator[str]:
        """Lay out the tables of the page."""
        raise NotImplementedError

    def where(self) -> str:
        """Name the machine."""
        return machine.describe()

    def about(self, rounds: int, minutes: float) -> str:
        """Say below the heading what the figures are."""
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
        """Say in the JSON where it was measured."""
        return {"machine": machine.describe()}

    def fields(self, case: Any) -> dict[str, Any]:
        """Say in the JSON what the case is."""
        return {"goals": case.goals}

    def to_json(self, found: list[Any], took: float) -> str:
        """Write one line for each case."""
        return table.lines(self.head(), "cases", map(self.row, found))

    def row(self, m: Measured) -> dict[str, Any]:
        """Lay out one case for the JSON."""
        row: dict[str, Any] = {"case": m.case.name, **self.fields(m.case)}
        for name in self.timed:
            row[name] = {p: [float(f"{s:.4g}") for s in times] for p, times in getattr(m, name).items()}
        row |= {"variants": m.variants, "wrong": m.wrong, "others": [round(share, 3) for share in m.others]}
        row["probes"] = [{name: round(value, 1) for name, value in asdict(p).items()} for p in m.probes]
        return row
