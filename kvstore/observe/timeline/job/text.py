"""The report of a job as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...counters import PHASES
from .activity import SHARES
from .report import Report


def lines(report: Report) -> Iterator[str]:
    """Yield the lines of a report."""
    sure = "unknown" if report.uncertainty is None else _seconds(report.uncertainty)
    yield f"{report.seconds:.1f} s are recorded; clocks agree within {sure}"
    yield from (f"note: {note}" for note in report.notes)
    yield from _workers(report)
    yield from _straggler(report)
    yield from _overlap(report)
    yield from _servers(report)
    yield from _keys(report)


def _workers(report: Report) -> Iterator[str]:
    if report.workers:
        yield ""
        rows = [
            [f"worker {one.rank}", str(one.steps), _seconds(one.step), *_parts(one.shares, SHARES)]
            for one in report.workers
        ]
        yield from table(["", "steps", "step", *SHARES], rows)
        yield f"Steps are counted by: {', '.join(dict.fromkeys(one.source for one in report.workers))}."
        yield from _long_steps(report)


def _long_steps(report: Report) -> Iterator[str]:
    for one in report.workers:
        if one.usual < one.steps:
            begin, seconds = one.longest
            what = f"{one.steps - one.usual} steps of worker {one.rank} of more than three times the median"
            yield f"Not in the shares: {what}; the longest took {_seconds(seconds)}, from {begin:.2f} s on."


def _straggler(report: Report) -> Iterator[str]:
    if report.last:
        worst = report.last[0]
        yield ""
        yield (
            f"Worker {worst.rank} came last in {worst.rounds} of {worst.of} rounds of keys or parts of keys, "
            f"{_seconds(worst.lead)} (median) after the one before it."
        )
        for one in report.last[1:]:
            yield f"  worker {one.rank}: {one.rounds} rounds, {_seconds(one.lead)}"


def _overlap(report: Report) -> Iterator[str]:
    found = [(one.rank, one.overlap) for one in report.workers if one.overlap is not None]
    if found:
        yield ""
        yield "Communication of gradients in a step (median), and what of it the backward pass does not hide:"
        for rank, one in found:
            part = one.exposed / one.communication if one.communication else 0.0
            whole, exposed = _seconds(one.communication), _seconds(one.exposed)
            yield f"  worker {rank}: {whole}, not hidden {exposed} ({part:.0%})"


def _servers(report: Report) -> Iterator[str]:
    if report.servers:
        yield ""
        rows = [[f"server {one.rank}", *_parts(one.shares, PHASES)] for one in report.servers]
        yield from table(["", *PHASES], rows)


def _keys(report: Report) -> Iterator[str]:
    if report.keys:
        yield ""
        yield "Keys that cost most in these steps, in all workers together:"
        rows = [
            [
                one.key,
                _seconds(one.seconds),
                *(_seconds(one.phases[name]) for name in PHASES),
                _bytes(one.nbytes),
            ]
            for one in report.keys
        ]
        yield from table(["key", "all", *PHASES, "bytes"], rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: the first column to the left, the others to the right."""
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    for row in (head, *rows):
        first, *others = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        cells = [cell.strip().rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join((first, *cells)).rstrip()


def _parts(shares: dict[str, float], names: Sequence[str]) -> list[str]:
    return [f"{shares[name]:.1%}" for name in names]


def _seconds(seconds: float) -> str:
    unit, factor = next((one for one in (("s", 1.0), ("ms", 1e3)) if seconds * one[1] >= 1), ("us", 1e6))
    return f"{seconds * factor:.3g} {unit}"


def _bytes(count: float) -> str:
    units = ("B", 1.0), ("KB", 1e3), ("MB", 1e6), ("GB", 1e9)
    unit, size = next(one for one in reversed(units) if count >= one[1] or one[0] == "B")
    return f"{count / size:.3g} {unit}"
