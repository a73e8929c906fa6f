"""The page of simulated jobs, and its costs, are made from the findings."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from benches.scale.sample_costs import COSTS

from bench.cases import scale as cases
from bench.cases.common import KB, MB
from bench.cases.scale import CheckCase, ControlCase, ExactCase, LossCase, StepCase, TrainingCase
from bench.claims import scale
from bench.plots import scale as plot
from bench.scale.real import RealCase

SMALL: list[Any] = [
    StepCase("a", "step", f"8x{MB}", 16, 2, 4),
    *(StepCase(f"{n}", "workers", f"8x{MB}", n, 2, 4, by_host=by) for n in (8, 16) for by in (False, True)),
    ExactCase("b", "exact", f"12x{MB}", (f"2x{MB}", f"4x{MB}"), 4, 2),
    TrainingCase("c", "p3", f"8x{MB}", 4, 2, 10, MB, 32 * MB, True, 0.01, 0.02),
    ControlCase("d", "scheduler", 8, 2, f"20x{KB}"),
    LossCase("e", "losses", "worker", "continue", 8, 2),
    LossCase("f", "losses", "server", "continue", 8, 2),
]


def claim_of(path: Path) -> scale.Scale:
    """A claim with the costs of a file, as `--costs` takes them."""
    content = {"costs": COSTS.to_json(), "jobs": [], "machine": "a machine", "cases": []}
    path.write_text(json.dumps(content))
    return scale.Scale()


def measured(path: Path, chosen: list[Any]) -> tuple[scale.Scale, list[scale.Measured]]:
    claim = claim_of(path)
    return claim, list(claim.measured(chosen, argparse.Namespace(costs=[path])))


def test_every_kind_of_case_has_its_row(tmp_path: Path) -> None:
    claim, found = measured(tmp_path / "costs.json", SMALL)
    page = claim.page(found, 1.0)
    for case in SMALL:
        assert f"\n| {case.name} |" in page
    assert "all 7 continue" in page
    assert "PeerLostError in 8" in page
    read = json.loads(claim.to_json(found, 1.0))
    assert [one["case"] for one in read["cases"]] == [case.name for case in SMALL]


def test_the_picture_is_drawn_from_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    claim, found = measured(tmp_path / "costs.json", SMALL)
    plot.draw(json.loads(claim.to_json(found, 1.0)), tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 10_000


@pytest.mark.bench
def test_a_real_job_has_the_requests_and_bytes_of_its_simulation(tmp_path: Path) -> None:
    case = CheckCase("real", "check", RealCase(3, 2, (1000, 600_000), calls=4, warm=1), runs=1)
    claim, found = measured(tmp_path / "costs.json", [case])
    row = next(line for line in claim.page(found, 1.0).splitlines() if line.startswith("| real |"))
    assert row.split("|")[2:5] == [" 4 ", " 2,348 KB ", " yes "]


def test_names_of_cases_are_unique() -> None:
    names = [case.name for case in cases.cases()]  # type: ignore[attr-defined]
    assert len(names) == len(set(names))
