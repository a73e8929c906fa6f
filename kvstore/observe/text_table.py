"""Tables of text, as the command prints them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


def table_lines(*rows: Sequence[str], left: Collection[int] = (0,), between: str = "  ") -> Iterator[str]:
    """Yield the lines of a table; the columns of `left` are aligned at the left, the rest at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        aligned = (f"{cell:{'<' if at in left else '>'}{width}}" for at, (cell, width) in enumerate(cells))
        yield between.join(aligned).rstrip()
