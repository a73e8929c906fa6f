"""Tables of text, as the command prints them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


def table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,), between: str = "  ") -> Iterator[str]:
    """Yield the lines of a table; the columns of `left` are aligned at the left, the rest at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield between.join(cells).rstrip()
