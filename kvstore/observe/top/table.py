"""A look at the machine as text: cells of a table, or lines of a width."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from .rates import StoreRow
from .watch import JobView, MachineView

_WIDE = 120  # columns of a terminal that has room for all cells
_TITLES = ("PROCESS", "PID", "ROUNDS/S", "SENT/S", "RECV/S", "MEMORY", "CPU", "LOST", "WAIT", "WAITS FOR")
_MORE = ("STORE", "CALLS/S", "MOVE", "SUM", "UPDATE", "CONVERT")
_BRIEF = 0.1  # seconds of a wait that are not worth a number


def titles(width: int) -> tuple[str, ...]:
    """Return the heads of the columns that a terminal of this width has room for."""
    return (*_TITLES[:2], *_MORE, *_TITLES[2:]) if width >= _WIDE else _TITLES


def cells(row: StoreRow, width: int) -> list[str]:
    """Return what stands below `titles`."""
    phases = row.phases or {}
    name = row.name + (f" #{row.number}" if row.number else "")
    own = [
        name,
        str(row.process),
        _number(row.rounds_per_second),
        _bytes(row.sent_bytes_per_second),
        _bytes(row.received_bytes_per_second),
        _bytes(row.memory_bytes),
        _part(row.cpu),
        str(row.losses or "-"),
        _part(phases.get("waiting")),
        _wait(row),
    ]
    if width < _WIDE:
        return own
    shares = [_part(phases.get(name)) for name in ("moving", "summing", "updating", "converting")]
    return [*own[:2], row.store, _number(row.calls_per_second), *shares, *own[2:]]


def heading(job: JobView) -> str:
    """Say what a job is, and of which processes it consists here."""
    processes = {row.process: row for row in job.stores}.values()
    counts = Counter(row.role for row in processes)
    roles = ", ".join(f"{number} {role}{'s' * (number > 1)}" for role, number in counts.items())
    stores = ", ".join(sorted({row.store for row in job.stores if row.role == "worker"}))
    name = f"job {job.job}" if job.job else f"children of {job.stores[0].parent}"
    return ": ".join(filter(None, [name, f"{roles}{f', {stores}' if stores else ''}", job.command]))


def remarks(view: MachineView) -> list[str]:
    """Return the news, and what could not be read."""
    told = list(view.news)
    if view.unreadable:
        numbers = ", ".join(map(str, view.unreadable))
        told.append(f"of another version of kvstore, and not shown: process {numbers}")
    return told


def lines(view: MachineView, width: int) -> Iterator[str]:
    """Lay all of it out, no line longer than `width`."""
    for job in view.jobs:
        yield heading(job)[:width]
        table = [titles(width), *(cells(row, width) for row in job.stores)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        yield from (_line(row, widths)[:width].rstrip() for row in table)
        yield ""
    yield from (one[:width] for one in remarks(view))


def is_text(title: str) -> bool:
    """Whether a column has text, which begins at the left."""
    return title in ("PROCESS", "STORE", "WAITS FOR")


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    heads = titles(_WIDE if len(row) > len(_TITLES) else 0)
    aligned = (
        cell.ljust(size) if is_text(head) else cell.rjust(size)
        for cell, size, head in zip(row, widths, heads, strict=True)
    )
    return " ".join(aligned)


def _wait(row: StoreRow) -> str:
    wait = row.waiting
    if row.stopped:
        return "stopped"
    if wait is None:
        return "-"
    if wait.seconds < _BRIEF:
        return wait.whom
    return f"{wait.whom}, {wait.seconds:.1f} s" if wait.seconds < 10 else f"{wait.whom}, {wait.seconds:.0f} s"


def _part(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if 0 < value < 10 else f"{value:.0f}"


def _bytes(value: float | None) -> str:
    """Round to three digits, with the letter of the unit: decimal, as networks and disks have it."""
    if value is None:
        return "-"
    for unit in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.1f}{unit}" if unit and value < 9.95 else f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.1f}T"
