"""The bench of training steps: what its page says, and that it runs where there is torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import bench
from bench.cases.ddp import CASES
from bench.claims import ddp
from bench.runner import run
from bench.runner.machine import Probe
from bench.runner.rounds import Measured

pytestmark = pytest.mark.bench


def made() -> list[Measured]:
    """Two rounds of a case; the second was disturbed."""
    seconds = {
        "alone": [0.010, 0.010],
        "gloo": [0.020, 0.030],
        "hook": [0.010, 0.010],
        "optimizer": [0.016, 0.020],
        "store": [0.008, 0.009],
    }
    probes = [Probe(100.0, 20.0)] * 3
    cpu = {way: [2 * time for time in times] for way, times in seconds.items()}
    ways = {way: way for way in seconds}
    return [Measured(CASES[0], seconds, ways, probes, [0.01, 0.3], cpu=cpu)]


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "versions", lambda python: "torch 2, kvstore 0")


@pytest.mark.usefixtures("torch")
def test_the_page_has_times_ratios_and_what_the_exchange_costs() -> None:
    page = ddp.CLAIM.page(made(), 60)
    name = f"{CASES[0].name} *"
    assert f"| {name} | 10 ms | 25 ms | 10 ms | 18 ms | 8.5 ms |" in page
    assert f"| {name} | 2.50 [2.00-3.00] | 2.50 [2.00-3.00] | 1.38 [1.25-1.50] | 2.92 [2.50-3.33] |" in page
    assert f"| {name} | 20 ms | 50 ms | 20 ms | 36 ms | 17 ms |" in page
    assert f"| {name} | 15 ms | 0 µs | 8 ms | -1.5 ms |" in page
    assert "torch 2, kvstore 0." in page
    assert "others were busy" in page


@pytest.mark.usefixtures("torch")
def test_results_survive_json() -> None:
    found = json.loads(ddp.CLAIM.to_json(made(), 60))
    assert found["versions"] == "torch 2, kvstore 0"
    assert found["cases"][0]["seconds"]["store"] == [0.008, 0.009]


def test_cases_are_picked_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(ddp.CLAIM, ["--only", "digits", "--list"])
    assert capsys.readouterr().out.strip() == CASES[0].name


def test_without_torch_it_says_what_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_BENCH_TORCH", raising=False)
    with pytest.raises(SystemExit, match="KVSTORE_BENCH_TORCH"):
        run.main(ddp.CLAIM, ["--only", "digits"])


def test_a_case_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = os.environ.get("KVSTORE_TEST_TORCH", "")
    if not python:
        pytest.skip("KVSTORE_TEST_TORCH names no python with torch and kvstore")
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setenv("KVSTORE_BENCH_TORCH", python)
    arguments = [
        "--only",
        "digits",
        "--rounds",
        "2",
        "--turn",
        "0.02",
        "--write",
        "x",
    ]
    assert run.main(ddp.CLAIM, arguments) == 0
    (case,) = json.loads((tmp_path / "x.json").read_text())["cases"]
    assert set(case["seconds"]) == set(ddp.WAYS)
    assert "digits" in (tmp_path / "x.md").read_text()
