"""The lines of a view of the machine: for each job a heading, and a table of its stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvstore.observe.text_table import table

from .rates import StoreRow
from .watch import JobView, MachineView

_WIDE = 120  # columns of a terminal that has room for all columns of the table
_BRIEF = 0.1  # seconds of a wait that is shown without its length
_LONG, _TOO_LONG = 1.0, 10.0  # seconds of a wait that is shown in yellow, or in red


class Line(NamedTuple):
    """A line of text, and its colour in a terminal; empty for none."""

    text: str
    colour: str = ""


class _Column(NamedTuple):
    title: str
    cell: Callable[[StoreRow], str]
    is_wide: bool = False  # only in a terminal that has room for all


def _name(row: StoreRow) -> str:
    return row.name + (f" #{row.number}" if row.number else "")


def _phase(name: str) -> Callable[[StoreRow], str]:
    return lambda row: _part((row.phases or {}).get(name))


def _wait(row: StoreRow) -> str:
    wait = row.waiting
    if row.stopped:
        return "stopped"
    if wait is None:
        return "-"
    if wait.seconds < _BRIEF:
        return wait.whom
    return f"{wait.whom}, {wait.seconds:.1f} s" if wait.seconds < 10 else f"{wait.whom}, {wait.seconds:.0f} s"


_COLUMNS = (
    _Column("PROCESS", _name),
    _Column("PID", lambda row: str(row.process)),
    _Column("STORE", lambda row: row.store, is_wide=True),
    _Column("CALLS/S", lambda row: _number(row.calls_per_second), is_wide=True),
    _Column("MOVE", _phase("moving"), is_wide=True),
    _Column("SUM", _phase("summing"), is_wide=True),
    _Column("UPDATE", _phase("updating"), is_wide=True),
    _Column("CONVERT", _phase("converting"), is_wide=True),
    _Column("ROUNDS/S", lambda row: _number(row.rounds_per_second)),
    _Column("SENT/S", lambda row: _bytes(row.sent_bytes_per_second)),
    _Column("RECV/S", lambda row: _bytes(row.received_bytes_per_second)),
    _Column("MEMORY", lambda row: _bytes(row.memory_bytes)),
    _Column("CPU", lambda row: _part(row.cpu)),
    _Column("LOST", lambda row: str(row.losses or "-")),
    _Column("WAIT", _phase("waiting")),
    _Column("WAITS FOR", _wait),
)
_TEXTS = ("PROCESS", "STORE", "WAITS FOR")


def _columns(width: int) -> list[_Column]:
    return [one for one in _COLUMNS if width >= _WIDE or not one.is_wide]


def titles(width: int) -> list[str]:
    """Return the titles of the columns for a terminal of this width."""
    return [one.title for one in _columns(width)]


def cells(row: StoreRow, width: int) -> list[str]:
    """Return the cells of a store below `titles`."""
    return [one.cell(row) for one in _columns(width)]


def heading(job: JobView) -> str:
    """Return the name of a job, the numbers of its processes on this machine, its stores and its command."""
    processes = {row.process: row for row in job.stores}.values()
    counts = Counter(row.role for row in processes)
    roles = ", ".join(f"{number} {role}{'s' * (number > 1)}" for role, number in counts.items())
    stores = ", ".join(sorted({row.store for row in job.stores if row.role == "worker"}))
    name = f"job {job.job}" if job.job else f"children of {job.stores[0].parent}"
    return ": ".join(filter(None, [name, f"{roles}{f', {stores}' if stores else ''}", job.command]))


def lines(view: MachineView, width: int) -> Iterator[Line]:
    """Yield the lines of a view, none longer than `width`."""
    for job in view.jobs:
        yield Line(heading(job)[:width])
        left = [at for at, title in enumerate(titles(width)) if title in _TEXTS]
        rows = [titles(width), *(cells(row, width) for row in job.stores)]
        colours = ["", *map(_colour, job.stores)]
        for text, colour in zip(table(rows, left, " "), colours, strict=True):
            yield Line(text[:width].rstrip(), colour)
        yield Line("")
    yield from (Line(one[:width], "yellow") for one in view.news)
    if view.unreadable:
        numbers = ", ".join(map(str, view.unreadable))
        yield Line(f"of another version of kvstore, and not shown: process {numbers}"[:width], "yellow")


def _colour(row: StoreRow) -> str:
    seconds = row.waiting.seconds if row.waiting else 0
    return "red" if seconds > _TOO_LONG else "yellow" if seconds > _LONG else ""


def _part(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if 0 < value < 10 else f"{value:.0f}"


def _bytes(value: float | None) -> str:
    """Round to three digits, with the letter of the decimal unit, as for networks and disks."""
    if value is None:
        return "-"
    for unit in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.1f}{unit}" if unit and value < 9.95 else f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.1f}T"
