"""Put measured figures into the README and the guides: ``python -m bench.figures``, after a full run."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import RESULTS, ROOT
from bench.cases.dist import APART
from bench.claims import local, shared
from bench.runner import table
from kvstore.observe.bench.rounds import round_ratios

README, GUIDE = ROOT / "README.md", ROOT / "docs" / "how-to" / "gradient-compression.md"
_SECTION = re.compile(r"(<!-- figures: begin[^\n]*-->\n).*?(<!-- figures: end -->)", re.DOTALL)

HEAD = ["case", "kvstore", "÷ limit", "÷ MXNet 1.9.1", "÷ best of the others"]
PEERS = {**local.PEERS, **shared.PEERS, "zmq": "bare ZeroMQ"}


@dataclass(frozen=True)
class Row:
    """One row of the README: a case of a results file."""

    results: str  # name of the file in `bench/results`
    case: str  # name of the case in it
    label: str  # its name in the README
    ours: str = "ours"  # our entry of the case
    limit: str = "limit"  # the entry that is a limit of the machine; empty where the case has none
    others: tuple[str, ...] = ()  # entries the best of which is shown


_MPI = ("openmpi", "mpich", "deepspeed", "gloo")

#: The cases that matter most for the choice of a library, including a case in which kvstore is slower.
ROWS = (
    Row("local", "ResNet-50 pushpull k=2", "`local`: ResNet-50, 2 gradients summed", others=("numpy",)),
    Row("local", "ResNet-50 pushpull SGD-momentum k=2", "`local`: and a step of SGD", others=("numpy",)),
    Row(
        "local", "row-sparse push + SGD k=2 1,000,000 x 64, 20,000 rows", "`local`: 20,000 rows of a table",
        others=("numpy",),
    ),
    Row(
        "device", "ResNet-50 sum k=4", "`device`, one GPU: ResNet-50, 4 gradients summed",
        others=("torch foreach", "torch key by key"),
    ),
    Row("compression", "2bit quantise 64 MB N(0, 0.01)", "2bit: 64 MB packed", others=("numpy",)),
    Row("shared", "2 processes, round trip 4 KB, spin", "`shared`, 2 processes: 4 KB", others=_MPI),
    Row("shared", "2 processes, all-reduce in the store, 64 MB", "`shared`, 2 processes: 64 MB", others=_MPI),
    Row("dist", "2 workers, 1 server: 4 KB", "`dist_sync`, 2 workers: 4 KB", "ours shm", "", ("gloo", "zmq")),
    Row(
        "dist", "2 workers, 1 server: ResNet-50", "`dist_sync`, 2 workers: ResNet-50", "ours shm", "",
        ("gloo", "zmq"),
    ),
)  # fmt: skip


def main() -> None:
    """Rewrite the text between the marks."""
    files = {name: _read(RESULTS / f"{name}.json") for name in dict.fromkeys(row.results for row in ROWS)}
    put(README, readme(files))
    trained = RESULTS / "convergence.json"
    if trained.exists():
        put(GUIDE, guide(_read(trained)))


def put(page: Path, text: str) -> None:
    """Replace the text between the marks of a page."""
    changed, count = _SECTION.subn(lambda marks: marks[1] + text + marks[2], page.read_text())
    if count != 1:
        raise SystemExit(f"{page.name} has no marks for figures")
    page.write_text(changed)


def guide(results: dict[str, Any]) -> str:
    """Format the effect of compression on training."""
    from bench.claims import convergence  # needs the extra `demo`

    return "\n".join(convergence.tables(results, "###"))


def readme(files: dict[str, dict[str, Any]], rows: Sequence[Row] = ROWS) -> str:
    """Format the rows of the README, by results file."""
    machines = dict.fromkeys(results["machine"] for results in files.values())
    tables = ", ".join(f"[{name}](bench/results/{name}.md)" for name in files)
    return (
        "Time of the peer ÷ time of kvstore: above 1 kvstore is faster. Median [lowest-highest] of rounds "
        f"in which all took turns. All cases: {tables}; [how it is measured](bench/README.md).\n"
        f"On {'; and '.join(machines)}.\n\n"
        + table.markdown(HEAD, [cells(row, files[row.results]) for row in rows])
    )


def cells(row: Row, results: dict[str, Any]) -> list[str]:
    """Format one row."""
    (case,) = (case for case in results["cases"] if case["case"] == row.case)
    seconds = case["seconds"] if "seconds" in case else _of_gpu(case, results["copy_bytes_per_second"])
    ours = _best(seconds, row.ours)
    assert ours is not None, f"{row.case} has no {row.ours}"
    found = {peer: _best(seconds, peer) for peer in row.others}
    others = {peer: times for peer, times in found.items() if times is not None}
    best = min(others, key=lambda peer: statistics.median(others[peer]), default=None)
    return [
        row.label,
        table.time(statistics.median(ours)),
        _ratios(_best(seconds, row.limit), ours),
        _ratios(_best(seconds, "mxnet"), ours),
        "" if best is None else f"{_ratios(others[best], ours)} {PEERS.get(best, best)}",
    ]


def _of_gpu(case: dict[str, Any], copy_rate: float) -> dict[str, list[float]]:
    """Return the times of a case on a GPU; its limit is a copy of as many bytes."""
    seconds = {way: [us / 1e6 for us in times] for way, times in case["gpu_us"].items()}
    ours = min((times for way, times in seconds.items() if way.startswith("kvstore ")), key=statistics.median)
    return {**seconds, "ours": ours, "limit": [case["bytes"] / copy_rate] * len(ours)}


def _best(seconds: dict[str, list[float]], name: str) -> list[float] | None:
    """Return the times of the faster way of an entry: one call, or two."""
    ways = [seconds[column] for column in (name, name + APART) if column in seconds]
    return min(ways, key=statistics.median, default=None)


def _ratios(peer: list[float] | None, ours: list[float]) -> str:
    return "" if peer is None else table.spread(round_ratios(peer, ours))


def _read(path: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(path.read_text())
    return results


if __name__ == "__main__":
    main()
