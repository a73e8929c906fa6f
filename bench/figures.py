"""Put measured figures into the README: ``python -m bench.figures``, after a full run was written."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from . import table
from .local import RESULTS

README = Path(__file__).parents[1] / "README.md"
_SECTION = re.compile(r"(<!-- figures: begin[^\n]*-->\n).*?(<!-- figures: end -->)", re.DOTALL)


def main() -> None:
    """Rewrite what stands between the marks."""
    text = section(json.loads((RESULTS / "local.json").read_text()))
    page, count = _SECTION.subn(lambda marks: marks[1] + text + marks[2], README.read_text())
    if count != 1:
        raise SystemExit("README.md has no marks for figures")
    README.write_text(page)


def section(results: dict[str, Any]) -> str:
    """Lay out the cases that have a goal."""
    rows = [_row(case) for case in results["cases"] if case["goals"]]
    head = ["case", "kvstore", *(f"÷ {name}" for name in table.PEERS.values())]
    return (
        f"float32, on {results['machine']}: time of the peer ÷ time of kvstore, so that above 1 kvstore is "
        "faster. Median [lowest-highest] of rounds in which all took turns. How it is measured: "
        "[bench/README.md](bench/README.md); all cases: [bench/results/local.md](bench/results/local.md).\n\n"
        + table.markdown(head, rows)
    )


def _row(case: dict[str, Any]) -> list[str]:
    ours = case["seconds"]["ours"]
    cells = []
    for peer in table.PEERS:
        times = case["seconds"].get(peer)
        cells.append(table.spread([a / b for a, b in zip(times, ours, strict=True)]) if times else "")
    return [case["case"], table.time(statistics.median(ours)), *cells]


if __name__ == "__main__":
    main()
