"""The live screen, by rich."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .rates import StoreRow
from .table import cells, heading, is_text, remarks, titles
from .watch import JobView, MachineView

_LONG, _TOO_LONG = 1.0, 10.0  # seconds of a wait that are worth a colour


def show(views: Iterable[MachineView]) -> None:
    """Show one view after the other, each in the place of the one before; the last one stays."""
    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False) as live:
        for view in views:
            live.update(_screen(view, console.width), refresh=True)


def _screen(view: MachineView, width: int) -> Group:
    parts: list[RenderableType] = []
    for job in view.jobs:
        title = Text(heading(job), "bold", no_wrap=True, overflow="ellipsis")
        parts += [title, _table(job, width), Text("")]
    parts += [Text(one, "yellow", no_wrap=True, overflow="ellipsis") for one in remarks(view)]
    return Group(*parts)


def _table(job: JobView, width: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for title in titles(width):
        table.add_column(title, justify="left" if is_text(title) else "right", no_wrap=True)
    for row in job.stores:
        table.add_row(*cells(row, width), style=_style(row))
    return table


def _style(row: StoreRow) -> str:
    seconds = row.waiting.seconds if row.waiting else 0
    return "red" if seconds > _TOO_LONG else "yellow" if seconds > _LONG else ""
