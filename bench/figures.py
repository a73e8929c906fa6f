"""Put measured figures into the README: ``python -m bench.figures``, after a full run was written."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from . import shared_table, table
from .local import RESULTS

README = Path(__file__).parents[1] / "README.md"
_SECTION = re.compile(r"(<!-- figures: begin[^\n]*-->\n).*?(<!-- figures: end -->)", re.DOTALL)


#: Peers between processes that get a column.
_SHARED = ("limit", "cma", "openmpi", "mpich", "deepspeed", "gloo", "mxnet")


def main() -> None:
    """Rewrite what stands between the marks."""
    texts = [section(json.loads((RESULTS / "local.json").read_text()), "local", table.PEERS)]
    between = RESULTS / "shared.json"
    if between.exists():
        peers = {name: shared_table.PEERS[name] for name in _SHARED}
        texts.append(section(json.loads(between.read_text()), "shared", peers))
    text = "\n".join(texts)
    page, count = _SECTION.subn(lambda marks: marks[1] + text + marks[2], README.read_text())
    if count != 1:
        raise SystemExit("README.md has no marks for figures")
    README.write_text(page)


def section(results: dict[str, Any], name: str, peers: dict[str, str]) -> str:
    """Lay out the cases that have a goal."""
    rows = [_row(case, peers) for case in results["cases"] if case["goals"]]
    head = ["case", "kvstore", *(f"÷ {label}" for label in peers.values())]
    return (
        f"float32, on {results['machine']}: time of the peer ÷ time of kvstore, so that above 1 kvstore is "
        "faster. Median [lowest-highest] of rounds in which all took turns. How it is measured: "
        f"[bench/README.md](bench/README.md); all cases: "
        f"[bench/results/{name}.md](bench/results/{name}.md).\n\n" + table.markdown(head, rows)
    )


def _row(case: dict[str, Any], peers: dict[str, str]) -> list[str]:
    ours = case["seconds"]["ours"]
    cells = []
    for peer in peers:
        times = case["seconds"].get(peer)
        cells.append(table.spread([a / b for a, b in zip(times, ours, strict=True)]) if times else "")
    return [case["case"], table.time(statistics.median(ours)), *cells]


if __name__ == "__main__":
    main()
