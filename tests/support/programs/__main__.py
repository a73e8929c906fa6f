"""Play random programs in all stores that mean the same, and compare them with one process.

    python -m programs [--seeds FIRST:END] [--stores shared,p3] [--whole] [--first] [--side-by-side 4]
    python -m programs --file FILE [--workers 2] [--times 100] [--stores shared]

Run it in `tests`, with `tests/support` and `tests/bodies` on the path. Ends with 1 if a program differs. FILE
has the lines of one program.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import click

from .crews import PLACES, Crews, Script, crews
from .hunting import hunted, told


def _again(made: Crews, script: Script, stores: list[str], times: int) -> Iterator[str]:
    for store in stores:
        for number in range(times):
            if (found := made.differs(script, store)) is not None:
                yield told(f"time {number}", script, found)


@click.command()
@click.option("--seeds", default="0:20", help="the first, and the one after the last")
@click.option("--stores", default=",".join(PLACES), help="some of them")
@click.option("--whole", is_flag=True, help="do not look for the smallest program")
@click.option("--first", "until_first", is_flag=True, help="end at the first that differs")
@click.option("--side-by-side", default=4, help="how many at a time")
@click.option("--file", type=click.Path(exists=True, path_type=Path), help="the lines of one program")
@click.option("--workers", default=2, help="that play the program of the file")
@click.option("--dtype", default="float32", help="of the program of the file")
@click.option("--times", default=1, help="that the program of the file is played")
def main(
    seeds: str, stores: str, whole: bool, until_first: bool, side_by_side: int, file: Path | None,
    workers: int, dtype: str, times: int,
) -> None:  # fmt: skip
    """Play programs; write each that differs."""
    warnings.simplefilter("ignore")
    chosen, first, end = stores.split(","), *map(int, seeds.split(":"))
    start, count = time.monotonic(), 0
    with crews() as made:
        if file is not None:
            texts = _again(made, Script(workers, dtype, tuple(file.read_text().splitlines())), chosen, times)
        else:
            texts = hunted(made, range(first, end), chosen, not whole, side_by_side)
        for text in texts:
            count += 1
            click.echo(text)
            if until_first:
                break
    click.echo(f"{count} differ; {time.monotonic() - start:.1f} s")
    sys.exit(count > 0)


if __name__ == "__main__":
    main()
