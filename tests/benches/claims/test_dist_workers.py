"""The cost of a worker: times are divided by the workers, and the page and the plot say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.cases.dist import DistCase
from bench.claims import dist_workers
from bench.claims.dist_workers import CLAIM
from bench.plots import dist_workers as plot
from bench.runner import run
from bench.runner.rounds import Measured

pytestmark = pytest.mark.bench


def measured(workers: int, size: str, **seconds: float) -> Measured:
    times = {name: [first, 2 * first, 3 * first] for name, first in seconds.items()}
    return Measured(dist_workers.case(workers, size), times, {}, [], [0.0], cpu=times)


def found() -> list[Measured]:
    return [
        measured(2, "4 KB", ours=1e-3, sum=2e-3),
        measured(8, "4 KB", ours=8e-3),
        measured(2, "4 MB", ours=3e-3),
    ]


def test_page_divides_by_the_workers() -> None:
    page = CLAIM.page(found(), 60.0)
    assert "| peer | 2 workers | 8 workers | last ÷ first |" in page
    assert "| kvstore, tcp | 1 ms | 2 ms | 2.00 |" in page
    assert "| bare C over sockets, with the sum | 2 ms |  | 1.00 |" in page
    assert "| kvstore, tcp | 3 ms |  | 1.00 |" in page


def test_plot_divides_by_the_workers(tmp_path: Path) -> None:
    results: dict[str, Any] = json.loads(CLAIM.to_json(found(), 60.0))
    points = plot.curve(results["cases"], dist_workers.SIZES["4 KB"], "ours")
    assert points == [(2, 1000.0, 500.0, 1500.0), (8, 2000.0, 1000.0, 3000.0)]
    pytest.importorskip("matplotlib")
    plot.draw(results, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_cases_are_sound() -> None:
    cases = list(CLAIM.cases(run.parse(CLAIM, [])))
    assert [case.workers for case in cases] == [n for n in dist_workers.WORKERS for _ in range(2)]
    for case in cases:
        assert DistCase.from_json(json.loads(json.dumps(case.to_json()))) == case
    few = run.parse(CLAIM, ["--workers", "2", "--only", "KB"])
    assert [case.name for case in run.pick(CLAIM, few)] == ["2 workers: 4 KB"]
