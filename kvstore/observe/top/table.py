"""The lines of a view of the machine: for each job a heading, and a table of its stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kvstore.observe.processes import process_name
from kvstore.observe.text_table import table_lines

from .watch import Row

_WIDE = 120  # columns of a terminal that has room for all columns of the table
_BRIEF = 0.1  # seconds of a wait that is shown without its length
_LONG, _TOO_LONG = 1.0, 10.0  # seconds of a wait that is shown in yellow, or in red


class TableColumn(NamedTuple):
    """Title of a column, the text of its cell for a row, and whether only a wide terminal has room for it."""

    title: str
    cell: Callable[[Row], str]
    is_wide: bool = False


def _phase_cell(name: str) -> Callable[[Row], str]:
    return lambda row: _percent_text((row["phases"] or {}).get(name))


def _number_cell(name: str) -> Callable[[Row], str]:
    return lambda row: _number_text(row[name])


def _bytes_cell(name: str) -> Callable[[Row], str]:
    return lambda row: _bytes_text(row[name])


def _name_text(row: Row) -> str:
    return process_name(row["role"], row["rank"]) + (f" #{row['number']}" if row["number"] else "")


def _wait_text(row: Row) -> str:
    wait = row["waiting"]
    if row["stopped"] or not wait:
        return "stopped" if row["stopped"] else "-"
    seconds = wait["seconds"]
    length = "" if seconds < _BRIEF else f", {seconds:.{1 if seconds < 10 else 0}f} s"
    return f"{wait['whom']}{length}"


_COLUMNS = (
    TableColumn("PROCESS", _name_text),
    TableColumn("PID", lambda row: str(row["process"])),
    TableColumn("STORE", lambda row: str(row["store"]), is_wide=True),
    TableColumn("CALLS/S", _number_cell("calls_per_second"), is_wide=True),
    TableColumn("MOVE", _phase_cell("moving"), is_wide=True),
    TableColumn("SUM", _phase_cell("summing"), is_wide=True),
    TableColumn("UPDATE", _phase_cell("updating"), is_wide=True),
    TableColumn("CONVERT", _phase_cell("converting"), is_wide=True),
    TableColumn("ROUNDS/S", _number_cell("rounds_per_second")),
    TableColumn("SENT/S", _bytes_cell("sent_bytes_per_second")),
    TableColumn("RECV/S", _bytes_cell("received_bytes_per_second")),
    TableColumn("MEMORY", _bytes_cell("memory_bytes")),
    TableColumn("CPU", lambda row: _percent_text(row["cpu"])),
    TableColumn("LOST", lambda row: str(row["losses"] or "-")),
    TableColumn("WAIT", _phase_cell("waiting")),
    TableColumn("WAITS FOR", _wait_text),
)
_TEXTS = ("PROCESS", "STORE", "WAITS FOR")


def table_columns(width: int) -> list[TableColumn]:
    """Return the columns for which a terminal of this width has room."""
    return [one for one in _COLUMNS if width >= _WIDE or not one.is_wide]


def job_heading(job: dict[str, Any]) -> str:
    """Return the name of a job, the numbers of its processes on this machine, its stores and its command."""
    processes = {row["process"]: row for row in job["stores"]}.values()
    counts = Counter(row["role"] for row in processes)
    parts = [f"{number} {role}{'s' * (number > 1)}" for role, number in counts.items()]
    parts += sorted({row["store"] for row in job["stores"] if row["role"] == "worker"})
    name = f"job {job['job']}" if job["job"] else f"children of {job['stores'][0]['parent']}"
    return ": ".join(filter(None, [name, ", ".join(parts), job["command"]]))


def view_lines(view: dict[str, Any], width: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of a view, none longer than `width`, each with its colour in a terminal, or ""."""
    columns = table_columns(width)
    left = [at for at, column in enumerate(columns) if column.title in _TEXTS]
    for job in view["jobs"]:
        yield job_heading(job)[:width], ""
        rows = [[column.cell(row) for column in columns] for row in job["stores"]]
        texts = table_lines([column.title for column in columns], *rows, left=left, between=" ")
        for text, colour in zip(texts, ["", *map(_wait_colour, job["stores"])], strict=True):
            yield text[:width].rstrip(), colour
        yield "", ""
    yield from ((one[:width], "yellow") for one in view["news"])
    if view["unreadable"]:
        numbers = ", ".join(map(str, view["unreadable"]))
        yield f"of another version of kvstore, and not shown: process {numbers}"[:width], "yellow"


def _wait_colour(row: Row) -> str:
    seconds = row["waiting"]["seconds"] if row["waiting"] else 0
    return "red" if seconds > _TOO_LONG else "yellow" if seconds > _LONG else ""


def _percent_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.{1 if 0 < value < 10 else 0}f}"


def _bytes_text(value: float | None) -> str:
    """Round to three digits, with the letter of the decimal unit, as for networks and disks."""
    if value is None:
        return "-"
    for unit in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.{1 if unit and value < 9.95 else 0}f}{unit}"
        value /= 1000
    return f"{value:.1f}T"
