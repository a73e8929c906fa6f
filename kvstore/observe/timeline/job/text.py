"""The report of a job as plain text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...counters import PHASES
from ...text_table import table_lines
from .spans import SHARES


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a report."""
    sure = "unknown" if report["uncertainty"] is None else _time_text(report["uncertainty"])
    yield f"{report['seconds']:.1f} s are recorded; clocks agree within {sure}"
    yield from (f"note: {note}" for note in report["notes"])
    for part, rows in (
        (_worker_lines, report["workers"]),
        (_straggler_lines, report["last"]),
        (_overlap_lines, [one for one in report["workers"] if one["overlap"] is not None]),
        (_server_lines, report["servers"]),
        (_key_lines, report["keys"]),
    ):
        if rows:
            yield from ("", *part(rows))


def _worker_lines(workers: list[dict[str, Any]]) -> Iterator[str]:
    yield from table_lines(
        ["", "steps", "step", *SHARES],
        *(
            [f"worker {one['rank']}", str(one["steps"]), _time_text(one["step"]), *_share_texts(one)]
            for one in workers
        ),
    )
    yield f"Steps are counted by: {', '.join(dict.fromkeys(one['source'] for one in workers))}."
    for one in workers:
        if more := one["steps"] - one["usual"]:
            begin, seconds = one["longest"]
            what = f"{more} steps of worker {one['rank']} of more than three times the median"
            yield f"Not in the shares: {what}; the longest took {_time_text(seconds)}, from {begin:.2f} s on."


def _straggler_lines(last: list[dict[str, Any]]) -> Iterator[str]:
    worst, *others = last
    often = f"{worst['rounds']} of {worst['of']} rounds of keys or parts of keys"
    lead = f"{_time_text(worst['lead'])} (median) after the one before it"
    yield f"Worker {worst['rank']} came last in {often}, {lead}."
    for one in others:
        yield f"  worker {one['rank']}: {one['rounds']} rounds, {_time_text(one['lead'])}"


def _overlap_lines(workers: list[dict[str, Any]]) -> Iterator[str]:
    yield "Communication of gradients in a step (median), and what of it the backward pass does not hide:"
    for one in workers:
        whole, exposed = one["overlap"].values()
        part = exposed / whole if whole else 0.0
        yield f"  worker {one['rank']}: {_time_text(whole)}, not hidden {_time_text(exposed)} ({part:.0%})"


def _server_lines(servers: list[dict[str, Any]]) -> Iterator[str]:
    return table_lines(["", *PHASES], *([f"server {one['rank']}", *_share_texts(one)] for one in servers))


def _key_lines(keys: list[dict[str, Any]]) -> Iterator[str]:
    yield "Keys that cost most in these steps, in all workers together:"
    rows = []
    for one in keys:
        times = map(_time_text, (one["seconds"], *one["phases"].values()))
        rows.append([one["key"], *times, _bytes_text(one["nbytes"])])
    yield from table_lines(["key", "all", *PHASES, "bytes"], *rows)


def _share_texts(row: dict[str, Any]) -> list[str]:
    return [f"{share:.1%}" for share in row["shares"].values()]


def _time_text(seconds: float) -> str:
    unit, factor = next((one for one in (("s", 1.0), ("ms", 1e3)) if seconds * one[1] >= 1), ("us", 1e6))
    return f"{seconds * factor:.3g} {unit}"


def _bytes_text(count: float) -> str:
    units = ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)
    unit, size = next((one for one in units if count >= one[1]), ("B", 1.0))
    return f"{count / size:.3g} {unit}"
