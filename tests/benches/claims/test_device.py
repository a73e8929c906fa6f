"""The bench of the store on a GPU: its cases, its tables, and a trial where there is PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.cases.device import RESNET, DeviceCase, all_cases
from bench.claims import device
from bench.runner import run
from bench.runner.gpu_rounds import Measured

pytestmark = pytest.mark.bench


def test_names_of_cases_are_unique() -> None:
    names = [case.name for case in all_cases()]
    assert len(set(names)) == len(names)


def test_resnet50_has_its_real_size() -> None:
    assert (len(RESNET), sum(RESNET)) == (161, 25_557_032)


@pytest.mark.parametrize(
    ("name", "floor"),
    [
        ("sum k=2 256 MiB", 187),
        ("sum k=8 256 MiB", 562),
        ("2-bit quantise 256 MiB", 191),
        ("ResNet-50 sum k=4", 119),
    ],
)
def test_floors_at_4_3_terabytes_a_second(name: str, floor: float) -> None:
    (case,) = (case for case in all_cases() if case.name == name)
    assert round(case.nbytes / 4.3e12 * 1e6) == floor


@pytest.fixture
def measured() -> Measured:
    case = DeviceCase("a case", "sum", (1000,), 2, bytes_each=12, share=0.9, goals={"rival": 1.9}, most_us=8)
    found = Measured(case, copy_rate=1e9, ours=["kvstore plan", "kvstore push"])
    found.gpu = {"kvstore plan": [12.5, 12.5, 12.5], "kvstore push": [20.0] * 3, "rival": [25.0, 20.0, 30.0]}
    found.host = {"kvstore plan": 7.0, "kvstore push": 30.0, "kvstore plan.refresh": 5.0, "rival": 3.0}
    return found


def test_goals(measured: Measured) -> None:
    lines = device.goals([measured])
    assert [line[2:] for line in lines] == [
        ["0.96", "≥ 0.90", "yes"],
        ["2.00", "≥ 1.9", "yes"],
        ["7 µs", "≤ 8 µs", "yes"],
    ]
    measured.gpu["kvstore plan"] = measured.gpu["kvstore push"] = [19.0] * 3
    measured.host = {"kvstore plan": 9.0}
    assert [line[-1] for line in device.goals([measured])] == ["**no**"] * 3


def test_the_page(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.CLAIM, "where", lambda: "a GPU")
    measured.wrong = {"rival": 0.5}
    page = device.CLAIM.page([measured], 60)
    assert "| a case | 12 µs | 12.5 µs (plan) | 0.96 [0.96-0.96] |" in page
    assert "plan 7 µs, push 30 µs, plan.refresh 5 µs" in page
    assert "rival (wrong result!) 25 µs: 2.00 [1.60-2.40]" in page
    assert "| a case | compared with rival | 2.00 | ≥ 1.9 | yes |" in page


def test_a_trial_on_the_processor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert run.main(device.CLAIM, ["--trial", "--rounds", "2", "--write", str(tmp_path / "device")]) == 0
    assert "wrong result" not in capsys.readouterr().out
    content = json.loads((tmp_path / "device.json").read_text())
    assert not any(case["wrong"] for case in content["cases"])
    assert len(content["cases"]) == sum(case.op not in ("quantise", "dequantise") for case in all_cases())
