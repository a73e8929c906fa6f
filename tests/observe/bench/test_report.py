"""The table, and the picture."""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore import MissingBackendError
from kvstore.observe.bench import report
from kvstore.observe.bench.key_lists import load_keys
from kvstore.observe.bench.rounds import PeerWay
from kvstore.observe.bench.settings import chosen_settings

PAGE = Path(__file__).parents[3] / "docs/benchmarks/index.md"


def result(**options: Any) -> dict[str, Any]:
    """Return what --json writes for given times."""
    given = {"store": "dist_sync", "servers": None, "method": "pushpull", "compression": None}
    wanted = chosen_settings(**{"workers": 2, "rounds": 3, "optimizer": None, **given, **options})
    ours, gloo = PeerWay("kvstore", "", unused), PeerWay("gloo", "each key", unused)
    ours.seconds, gloo.seconds = [0.02, 0.04, 0.01], [0.06, 0.06, 0.06]
    versions, missing = {"kvstore": "1.0", "torch": "2.0"}, {"mpi": "mpi4py is not installed"}
    return report.report_object(wanted, "resnet50", load_keys("resnet50"), [ours, gloo], versions, missing)


def unused(calls: int) -> list[float]:
    raise NotImplementedError


def test_the_table() -> None:
    lines = list(report.report_lines(result()))
    assert lines[1:4] == [
        "kvstore 1.0, torch 2.0",
        "store dist_sync, workers: 2, servers: 1, pushpull",
        "resnet50: 161 keys, 97.5 MB of float32 in each worker; rounds: 3",
    ]
    head, ours, gloo = (line.split("   ") for line in lines[5:8])
    assert [cell.strip() for cell in head if cell] == ["peer", "median", "min-max", "GB/s", "÷ kvstore"]
    assert [cell.strip() for cell in ours if cell.strip()] == [
        *("kvstore", "20.0 ms", "10.0 ms - 40.0 ms", "5.11", "1.00")
    ]
    assert [cell.strip() for cell in gloo if cell.strip()] == [
        *("gloo (each key)", "60.0 ms", "60.0 ms - 60.0 ms", "1.70", "3.00")
    ]
    assert len({len(line) for line in lines[5:8]}) == 1
    assert "mpi is left out: mpi4py is not installed" in lines


def test_the_documentation_has_every_field() -> None:
    text = PAGE.read_text().partition("## Your own case")[2].partition("\n## ")[0]
    rows = dict(
        re.findall(r"^\| (`[^|]+) \| ([^|]+) \|$", text.partition("`--json` writes")[2], re.MULTILINE)
    )
    found = result()
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(found)
    assert set(re.findall(r"`(\w+)`", rows["`peers`"])) == set(found["peers"][0])
    assert set(re.findall(r"`(\w+)`", rows["`machine`"])) == set(found["machine"])
    assert set(re.findall(r"`(\w+)`", rows["`keys`"])) == set(found["keys"])


def test_ratios_are_taken_within_a_round() -> None:
    found = result()
    assert found["peers"][1]["ratio"] == statistics.median([3.0, 1.5, 6.0])
    assert found["left_out"] == {"mpi": "mpi4py is not installed"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compression": "2bit=0.5"}, "gloo: sums without compression"),
        ({"optimizer": "adam"}, "gloo: sums without an update of weights"),
        ({"store": "dist_async"}, "dist_async does not sum"),
        ({"servers": 64}, "66 workers and servers share"),
    ],
)
def test_what_peers_do_not_do_is_said(options: dict[str, Any], words: str) -> None:
    assert any(line.startswith(words) for line in report.report_lines(result(**options)))
    assert not any(line.startswith(words) for line in report.report_lines(result()))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.5e-7, "0.250 µs"),
        (0.00005, "50.0 µs"),
        (0.0009994, "999 µs"),
        (0.0009996, "1.00 ms"),
        (0.2, "200 ms"),
        (12.0, "12.0 s"),
    ],
)
def test_three_digits_with_a_unit(seconds: float, text: str) -> None:
    assert report.time_text(seconds) == text


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingBackendError, match="pip install matplotlib"):
        report.new_figure()


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_a_picture(tmp_path: Path, name: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib")
    report.new_figure()
    report.draw_report(result(), str(tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes().startswith(begins)
