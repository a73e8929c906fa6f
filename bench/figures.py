"""Put measured figures into the README and the guides: ``python -m bench.figures``, after a full run."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from . import compression, dist, dist_table, shared_table, table
from .command import RESULTS

ROOT = Path(__file__).parents[1]
README, GUIDE = ROOT / "README.md", ROOT / "docs" / "how-to" / "gradient-compression.md"
_SECTION = re.compile(r"(<!-- figures: begin[^\n]*-->\n).*?(<!-- figures: end -->)", re.DOTALL)


#: Peers between processes that get a column.
_SHARED = ("limit", "cma", "openmpi", "mpich", "deepspeed", "gloo", "mxnet")


def main() -> None:
    """Rewrite what stands between the marks."""
    columns = {
        "local": table.PEERS,
        "shared": {name: shared_table.PEERS[name] for name in _SHARED},
        "compression": {name: table.PEERS[name] for name in compression.PEERS},
    }
    found = {name: RESULTS / f"{name}.json" for name in columns}
    sections = [section(_read(path), name, columns[name]) for name, path in found.items() if path.exists()]
    servers = RESULTS / "dist.json"
    if servers.exists():
        sections.append(parameter_server(_read(servers)))
    put(README, "\n".join(sections))
    trained = RESULTS / "convergence.json"
    if trained.exists():
        put(GUIDE, guide(_read(trained)))


def put(page: Path, text: str) -> None:
    """Replace what stands between the marks of a page."""
    changed, count = _SECTION.subn(lambda marks: marks[1] + text + marks[2], page.read_text())
    if count != 1:
        raise SystemExit(f"{page.name} has no marks for figures")
    page.write_text(changed)


def guide(results: dict[str, Any]) -> str:
    """Lay out what compression did to training."""
    from . import convergence  # needs what the demo needs

    return "\n".join(convergence.tables(results))


def _read(path: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(path.read_text())
    return results


def section(results: dict[str, Any], name: str, peers: dict[str, str]) -> str:
    """Lay out the cases that have a goal."""
    rows = [_row(case, peers) for case in results["cases"] if case["goals"]]
    head = ["case", "kvstore", *(f"÷ {label}" for label in peers.values())]
    return _introduction(results, name) + table.markdown(head, rows)


def parameter_server(results: dict[str, Any]) -> str:
    """Lay out the cases of the parameter server that have a goal."""
    rows = dist_table.short(dist.from_json(results))
    return _introduction(results, "dist") + table.markdown(dist_table.SHORT_HEAD, rows)


def _introduction(results: dict[str, Any], name: str) -> str:
    return (
        f"float32, on {results['machine']}: time of the peer ÷ time of kvstore, so that above 1 kvstore is "
        "faster. Median [lowest-highest] of rounds in which all took turns. How it is measured: "
        f"[bench/README.md](bench/README.md); all cases: "
        f"[bench/results/{name}.md](bench/results/{name}.md).\n\n"
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
