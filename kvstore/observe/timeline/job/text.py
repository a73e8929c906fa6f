"""The report of a job as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...counters import PHASES
from ...text_table import table
from .activity import SHARES
from .report import Report


def lines(report: Report) -> Iterator[str]:
    """Yield the lines of a report."""
    sure = "unknown" if report.uncertainty is None else _seconds(report.uncertainty)
    yield f"{report.seconds:.1f} s are recorded; clocks agree within {sure}"
    yield from (f"note: {note}" for note in report.notes)
    for part in (_workers, _straggler, _overlap, _servers, _keys):
        if found := list(part(report)):
            yield from ("", *found)


def _workers(report: Report) -> Iterator[str]:
    if not report.workers:
        return
    rows = [
        [f"worker {one.rank}", str(one.steps), _seconds(one.step), *_parts(one.shares, SHARES)]
        for one in report.workers
    ]
    yield from table([["", "steps", "step", *SHARES], *rows])
    yield f"Steps are counted by: {', '.join(dict.fromkeys(one.source for one in report.workers))}."
    for one in report.workers:
        if one.usual < one.steps:
            begin, seconds = one.longest
            what = f"{one.steps - one.usual} steps of worker {one.rank} of more than three times the median"
            yield f"Not in the shares: {what}; the longest took {_seconds(seconds)}, from {begin:.2f} s on."


def _straggler(report: Report) -> Iterator[str]:
    if not report.last:
        return
    worst, *others = report.last
    often = f"{worst.rounds} of {worst.of} rounds of keys or parts of keys"
    lead = f"{_seconds(worst.lead)} (median) after the one before it"
    yield f"Worker {worst.rank} came last in {often}, {lead}."
    yield from (f"  worker {one.rank}: {one.rounds} rounds, {_seconds(one.lead)}" for one in others)


def _overlap(report: Report) -> Iterator[str]:
    found = [(one.rank, one.overlap) for one in report.workers if one.overlap is not None]
    if found:
        yield "Communication of gradients in a step (median), and what of it the backward pass does not hide:"
    for rank, one in found:
        part = one.exposed / one.communication if one.communication else 0.0
        whole, exposed = _seconds(one.communication), _seconds(one.exposed)
        yield f"  worker {rank}: {whole}, not hidden {exposed} ({part:.0%})"


def _servers(report: Report) -> Iterator[str]:
    if report.servers:
        rows = [[f"server {one.rank}", *_parts(one.shares, PHASES)] for one in report.servers]
        yield from table([["", *PHASES], *rows])


def _keys(report: Report) -> Iterator[str]:
    if not report.keys:
        return
    yield "Keys that cost most in these steps, in all workers together:"
    rows = []
    for one in report.keys:
        phases = [_seconds(one.phases[name]) for name in PHASES]
        rows.append([one.key, _seconds(one.seconds), *phases, _bytes(one.nbytes)])
    yield from table([["key", "all", *PHASES, "bytes"], *rows])


def _parts(shares: dict[str, float], names: Sequence[str]) -> list[str]:
    return [f"{shares[name]:.1%}" for name in names]


def _seconds(seconds: float) -> str:
    unit, factor = next((one for one in (("s", 1.0), ("ms", 1e3)) if seconds * one[1] >= 1), ("us", 1e6))
    return f"{seconds * factor:.3g} {unit}"


def _bytes(count: float) -> str:
    units = ("B", 1.0), ("KB", 1e3), ("MB", 1e6), ("GB", 1e9)
    unit, size = next(one for one in reversed(units) if count >= one[1] or one[0] == "B")
    return f"{count / size:.3g} {unit}"
