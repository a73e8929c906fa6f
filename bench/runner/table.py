"""Tables of ratios, as Markdown, and results as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bench.runner.rounds import Measured
from kvstore.observe.bench.rounds import round_ratios

Labels = Mapping[str, str]

GOALS_HEAD = ["case", "compared with", "kvstore", "peer", "peer ÷ kvstore", "goal", "holds"]


def time(seconds: float) -> str:
    """Format a time with three digits and a unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1 or unit == "µs":
            return f"{seconds * scale:.3g} {unit}"
    raise AssertionError


def spread(ratios: Sequence[float]) -> str:
    """Format ratios as median [lowest-highest]."""
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]"


def mark(holds: bool) -> str:
    return "yes" if holds else "**no**"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def section(heading: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Format a table below a heading; nothing where there are no rows."""
    if rows:
        yield from (f"## {heading}\n", markdown(head, rows))


def lines(head: dict[str, Any], name: str, rows: Iterable[Any]) -> str:
    """Write JSON with one line for each row of the list `name`."""
    written = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows)
    return f'{json.dumps(head)[:-1]}, "{name}": [\n{written}\n]}}\n'


# --------------------------------------------------------------------------------------------- cases


def goals(measured: Iterable[Measured], labels: Labels) -> list[list[str]]:
    """Return one row for each goal; *not run* where none of its peers ran."""
    rows = []
    for m in measured:
        rows += [_goal(m, names.split("|"), least, labels) for names, least in m.case.goals.items()]
        if m.case.most_us:
            mine = m.median("ours") * 1e6
            goal = [f"≤ {m.case.most_us:g} µs", mark(mine <= m.case.most_us)]
            rows.append([m.case.name, "itself", time(m.median("ours")), "", "", *goal])
        if m.case.tail and "ours" in m.tails:
            rows.append(_tail(m))
    return rows


def _goal(m: Measured, names: list[str], least: float, labels: Labels) -> list[str]:
    there = [name for name in names if name in m.seconds]
    label = ("best of " if len(names) > 1 else "") + ", ".join(labels[name] for name in there or names)
    goal = f"≥ {least:.3g}"
    if not there or "ours" not in m.seconds:
        return [m.case.name, label, "", "", "", goal, "not run"]
    best = [min(times) for times in zip(*(m.seconds[name] for name in there), strict=True)]
    ratios = round_ratios(best, m.seconds["ours"])
    times = [time(m.median("ours")), time(statistics.median(best))]
    return [m.case.name, label, *times, spread(ratios), goal, mark(statistics.median(ratios) >= least)]


def _tail(m: Measured) -> list[str]:
    ratios = round_ratios(m.tails["ours"], m.seconds["ours"])
    holds = mark(statistics.median(ratios) <= m.case.tail)
    times = [time(m.median("ours")), time(statistics.median(m.tails["ours"]))]
    return [m.case.name, "its own p99", *times, spread(ratios), f"≤ {m.case.tail:g}", holds]


def everything(measured: Iterable[Measured], labels: Labels) -> str:
    """Format one row for each case, and a column for each peer: its median, and its ratio to kvstore."""
    rows = [[named(m), _own(m), *(_cell(m, peer) for peer in labels)] for m in measured]
    return markdown(["case", "kvstore", *labels.values()], rows)


def named(m: Measured) -> str:
    """Return the name of a case, with an asterisk where other processes were busy."""
    return m.case.name + (" *" if m.disturbed else "")


def disturbed(measured: Iterable[Measured]) -> Iterator[str]:
    """Explain the asterisk."""
    if any(m.disturbed for m in measured):
        yield "\\* other processes were busy during some of these rounds.\n"


def _own(m: Measured) -> str:
    if "ours" not in m.seconds:
        return ""
    return time(m.median("ours")) + (" wrong result!" if "ours" in m.wrong else "")


def _cell(m: Measured, peer: str) -> str:
    if peer not in m.seconds:
        return ""
    ratios = f": {spread(m.ratios(peer))}" if "ours" in m.seconds else ""
    return time(m.median(peer)) + ratios + (" wrong result!" if peer in m.wrong else "")


def state(measured: list[Measured]) -> str:
    """Return the state of the machine during the measurement."""
    probes = [probe for m in measured for probe in m.probes]
    shares = [share for m in measured for share in m.others]
    if not probes:
        return ""
    trip = spread([probe.round_trip_ns / 1000 for probe in probes])
    read = spread([probe.read_gbs for probe in probes])
    return (
        f"The machine during the measurement ({len(probes)} probes of 0.3 s between the rounds): a cache "
        f"line from core to core and back {trip} µs, memory read by two cores {read} GB/s, others' share of "
        f"the processors {spread([100 * share for share in shares])} %.\n"
    )
