"""Cases that were measured earlier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench
from bench.cases import hosts
from bench.runner import earlier
from bench.runner.rounds import Measured

CASES = list(hosts.all_cases())[:2]


def test_what_is_measured_again_counts() -> None:
    first, again, other = (Measured(case, {}, {}, [], []) for case in (CASES[1], CASES[1], CASES[0]))
    found = earlier.newest([first, again, other], CASES)
    assert found[0] is other and found[1] is again and len(found) == 2


def test_cases_that_there_are_no_more_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    rows = [{"case": name, "more": 1} for name in ("another", CASES[1].name)]
    (tmp_path / "x.json").write_text(json.dumps({"cases": rows}))
    assert list(earlier.read("x", CASES)) == [(CASES[1], rows[1])]
    assert list(earlier.read("y", CASES)) == []
