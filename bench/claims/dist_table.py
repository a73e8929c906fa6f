"""Tables of the bench of the parameter server, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

from bench.cases.dist import APART, ENTRIES, Goal
from bench.runner.rounds import Measured
from bench.runner.table import markdown, spread, time

GOALS_HEAD = ["case", "kvstore", "time", "beside", "its time", "peer ÷ kvstore", "goal", "holds"]
#: With whom all others are compared.
BASES = ("ours", "ours shm")


def label(column: str) -> str:
    """Say what a column of the measurement is called."""
    name = column.removesuffix(APART)
    return ENTRIES[name].label + (", push then pull" if column != name else "")


def goals(measured: Iterable[Measured]) -> list[list[str]]:
    """One row for every goal and way of calling; where none of its peers ran, it says so."""
    return [row for m in measured for goal in m.case.goals for row in _goal(m, goal)]


def _goal(m: Measured, goal: Goal) -> Iterator[list[str]]:
    own, peer = columns(m, goal.own), columns(m, goal.peer)
    least = f"≥ {goal.least:.3g}"
    if not own or not peer:
        yield [m.case.name, label(goal.own), "", label(goal.peer), "", "", least, "not run"]
        return
    for column in own:
        like = column.replace(goal.own, goal.peer)
        beside = like if like in peer else best_of(m, goal.peer)
        ratios = ratios_of(m, beside, column)
        holds = "yes" if statistics.median(ratios) >= goal.least else "**no**"
        times = time(m.median(column)), time(m.median(beside))
        yield [m.case.name, label(column), times[0], label(beside), times[1], spread(ratios), least, holds]


def columns(m: Measured, name: str) -> list[str]:
    """Return the columns that an entry has: one call, two calls."""
    return [column for column in (name, name + APART) if column in m.seconds]


def best_of(m: Measured, name: str) -> str:
    """Return the faster column of an entry."""
    return min(columns(m, name), key=m.median)


def ratios_of(m: Measured, peer: str, own: str) -> list[float]:
    """Time of one column over that of another, round by round."""
    return [a / b for a, b in zip(m.seconds[peer], m.seconds[own], strict=True)]


def everything(measured: list[Measured]) -> str:
    """One table for each case, a row for each peer, and beside it how it compares with ours."""
    return "\n".join(_case(m) for m in measured)


def _case(m: Measured) -> str:
    bases = [base for base in BASES if columns(m, base)]
    head = ["peer", "pushpull", "push, then pull", "processor seconds", *(f"÷ {label(b)}" for b in bases)]
    names = [name for name in ENTRIES if columns(m, name)]
    rows = [[_peer(m, name), *_times(m, name), *(_ratio(m, name, base) for base in bases)] for name in names]
    title = f"**{m.case.name}**" + (" \\*" if m.disturbed else "")
    return f"{title}\n\n{markdown(head, rows)}"


def _peer(m: Measured, name: str) -> str:
    return ENTRIES[name].label + (" wrong result!" if name in m.wrong else "")


def _times(m: Measured, name: str) -> list[str]:
    columns = name, name + APART
    used = statistics.median(m.cpu[best_of(m, name)])
    return [*(time(m.median(column)) if column in m.seconds else "" for column in columns), time(used)]


def _ratio(m: Measured, name: str, base: str) -> str:
    """Best way of the peer beside our best."""
    if name == base:
        return "1"
    return spread(ratios_of(m, best_of(m, name), best_of(m, base)))


def variants(measured: Iterable[Measured]) -> list[list[str]]:
    """Which way of calling was the best one."""
    rows = []
    for m in measured:
        cells = [f"{label(column)}: {way}" for column, way in m.variants.items() if "," in way]
        if cells:
            rows.append([m.case.name, "; ".join(cells)])
    return rows
