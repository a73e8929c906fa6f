"""Ratios of the parameter server to its rivals, measured in turn."""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from bench.cases import dist as cases
from bench.cases.dist import APART, ENTRIES, DistCase, Goal
from bench.peers.dist.launch import DistGroup
from bench.peers.setting import Setting
from bench.runner import profile, rivals, table
from bench.runner.claim import Claim
from bench.runner.rounds import Measured, Plan
from kvstore.observe.bench.rounds import round_ratios

GOALS_HEAD = ["case", "kvstore", "time", "compared with", "its time", "ratio", "goal", "holds"]
#: The entries that all other entries are compared with.
BASES = ("ours", "ours shm")
#: Memory of a peer, in arrays of each worker and including its servers, where it is not four.
COPIES = {"ours": 6, "mxnet": 8, "memcpy-c": 5}

#: A call of many megabytes is slow: a turn is two calls, after one to warm up.
FULL = Plan(rounds=5, spare=2, least=2, field=1)
QUICK = replace(FULL, rounds=3, spare=0, turn=0.02)


class Dist(Claim):
    name, title = "dist", "The parameter server, compared with its rivals"
    what = "float32; scheduler, servers and workers on one machine"
    times = " of a push and a pull of all keys, of the worker that took longest"
    common = (*Claim.common, "workers")
    rounds, workers = FULL.rounds, (1, 2, 4)
    picture = "-scaling"
    process = DistGroup
    timed = ("seconds", "cpu")

    def options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--quick", action="store_true", help="three short rounds, for a rough figure")
        parser.add_argument(
            "--profile",
            default="",
            metavar="REGEX",
            help="print a profile of a case, for one of --peers",
        )
        parser.add_argument("--calls", action="store_true", help="with --profile: count calls, by cProfile")
        parser.add_argument("--way", default="", help="with --profile: the beginning of the way of calling")

    def instead(self, options: argparse.Namespace) -> str:
        return profiled(options) if options.profile else ""

    def cases(self, options: argparse.Namespace) -> Iterable[Any]:
        return [case for case in cases.all_cases() if case.workers in options.workers]

    def plan(self, options: argparse.Namespace) -> Plan:
        if options.quick:
            return QUICK
        asked = super().plan(options)
        return replace(FULL, rounds=asked.rounds, spare=asked.spare, turn=asked.turn)

    def settings(self, cases: Sequence[DistCase]) -> list[Setting]:
        names = {peer for case in cases for peer in case.peers}
        wanted = [name for name in ENTRIES if name in names]
        return rivals.settings("dist", wanted, processes=cases[0].workers, servers=cases[0].servers)

    def job(self, case: DistCase) -> tuple[int, int, str, str, bool]:
        return case.job

    def takes(self, case: DistCase, peer: str) -> bool:
        return peer in case.peers

    def memory(self, case: DistCase, setting: Setting) -> float:
        return case.nbytes * case.workers * COPIES.get(ENTRIES[setting.name].engine, 4)

    def fields(self, case: DistCase) -> dict[str, Any]:
        row: dict[str, Any] = {"bytes": case.nbytes, "keys": len(case.shapes)}
        row |= {name: getattr(case, name) for name in ("workers", "servers", "mode", "update", "rows")}
        return row | {"goals": [asdict(goal) for goal in case.goals]}

    def sections(self, found: list[Measured]) -> Iterator[str]:
        yield from table.section("Goals", GOALS_HEAD, goals(found))
        yield from ("## All cases\n", everything(found), *table.disturbed(found))
        yield from (
            "## The way of calling that was best\n",
            table.markdown(["case", "ways"], variants(found)),
        )


def profiled(options: argparse.Namespace) -> str:
    """Profile the first case with a matching name, with one entry."""
    name, entry = options.profile, options.peers or "ours"
    case = next((case for case in cases.all_cases() if re.search(name, case.name)), None)
    if case is None:
        raise SystemExit(f"no case matches {name!r}; --list prints them")
    there = rivals.settings("dist", ENTRIES, processes=case.workers, servers=case.servers)
    known = {setting.name: setting for setting in there}
    if entry not in known:
        raise SystemExit(f"{entry!r} cannot run here; there are: {', '.join(known)}")
    return profile.profile(case, known[entry], options.way, options.calls)


def label(column: str) -> str:
    """Return the name of a column in the tables."""
    name = column.removesuffix(APART)
    return ENTRIES[name].label + (", push then pull" if column != name else "")


def goals(measured: Iterable[Measured]) -> list[list[str]]:
    """Return one row for each goal and way of calling; *not run* where none of its peers ran."""
    return [row for m in measured for goal in m.case.goals for row in _goal(m, goal)]


def _goal(m: Measured, goal: Goal) -> Iterator[list[str]]:
    own, peer = columns(m, goal.own), columns(m, goal.peer)
    if not own or not peer:
        yield [m.case.name, label(goal.own), "", label(goal.peer), "", "", _wanted(goal), "not run"]
        return
    figures = getattr(m, goal.of)
    for column in own:
        like = column.replace(goal.own, goal.peer)
        beside = like if like in peer else best_of(m, goal.peer)
        ours, others = figures[column], figures[beside]
        ratios = round_ratios(ours, others) if goal.most else round_ratios(others, ours)
        ratio = statistics.median(ratios)
        yield [
            m.case.name,
            label(column),
            table.time(statistics.median(ours)),
            label(beside),
            table.time(statistics.median(others)),
            table.spread(ratios),
            _wanted(goal),
            table.mark(ratio <= goal.most if goal.most else ratio >= goal.least),
        ]


def _wanted(goal: Goal) -> str:
    """Return the name of the ratio with its goal."""
    ratio = f"kvstore ÷ peer ≤ {goal.most:.3g}" if goal.most else f"peer ÷ kvstore ≥ {goal.least:.3g}"
    return ("processor seconds, " if goal.of == "cpu" else "") + ratio


def columns(m: Measured, name: str) -> list[str]:
    """Return the columns of an entry: one call, two calls."""
    return [column for column in (name, name + APART) if column in m.seconds]


def best_of(m: Measured, name: str) -> str:
    """Return the faster column of an entry."""
    return min(columns(m, name), key=m.median)


def ratios_of(m: Measured, peer: str, own: str) -> list[float]:
    """Return the time of one column ÷ that of another, by round."""
    return round_ratios(m.seconds[peer], m.seconds[own])


def everything(measured: list[Measured]) -> str:
    """Format one table for each case: a row for each peer, with its ratio to kvstore."""
    return "\n".join(_case(m) for m in measured)


def _case(m: Measured) -> str:
    bases = [base for base in BASES if columns(m, base)]
    head = ["peer", "pushpull", "push, then pull", "processor seconds", *(f"÷ {label(b)}" for b in bases)]
    names = [name for name in ENTRIES if columns(m, name)]
    rows = [[_peer(m, name), *_times(m, name), *(_ratio(m, name, base) for base in bases)] for name in names]
    title = f"**{m.case.name}**" + (" \\*" if m.disturbed else "")
    return f"{title}\n\n{table.markdown(head, rows)}"


def _peer(m: Measured, name: str) -> str:
    return ENTRIES[name].label + (" wrong result!" if name in m.wrong else "")


def _times(m: Measured, name: str) -> list[str]:
    columns = name, name + APART
    used = statistics.median(m.cpu[best_of(m, name)])
    return [
        *(table.time(m.median(column)) if column in m.seconds else "" for column in columns),
        table.time(used),
    ]


def _ratio(m: Measured, name: str, base: str) -> str:
    """Return the time of the peer's fastest way ÷ that of kvstore's fastest way."""
    if name == base:
        return "1"
    return table.spread(ratios_of(m, best_of(m, name), best_of(m, base)))


def variants(measured: Iterable[Measured]) -> list[list[str]]:
    """Return the fastest way of calling of each case."""
    rows = []
    for m in measured:
        cells = [f"{label(column)}: {way}" for column, way in m.variants.items() if "," in way]
        if cells:
            rows.append([m.case.name, "; ".join(cells)])
    return rows


CLAIM = Dist()
