"""The table keeps the results of its runs, over several calls of the program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.faults import page, soak
from bench.faults.cells import Cell
from bench.faults.trial import Outcome

pytestmark = pytest.mark.bench
CELL = Cell("shared", "kill in push")


def rows_of(text: str, heading: str) -> dict[str, list[str]]:
    """Parse the table below a heading, by the first column."""
    part = re.split(r"^#+ ", text.partition(f" {heading}\n")[2], flags=re.MULTILINE)[0]
    lines = [cells_of(line) for line in part.splitlines() if line.startswith("|")]
    return {line[0]: line[1:] for line in lines[2:]}


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_runs_are_counted_and_added_to_what_was_written(tmp_path: Path) -> None:
    table = page.Table()
    for seed in range(3):
        table.row(CELL).add(Outcome(seed, seconds=(0.25, 0.5)))
    (tmp_path / "faults.json").write_text(table.to_json())
    table = page.Table(tmp_path / "faults.json")
    assert table.row(CELL).next_seed == 3
    table.row(CELL).add(Outcome(3, wrong=("two rounds: key 'a'",), hangs=("told after 9 s",), seconds=(9.0,)))
    table.row(CELL).add(Outcome(4, missed="there was no at.0"))
    text = page.page(table)
    assert rows_of(text, "shared") == {"kill in push": ["4", "1", "1", "0", "0.50 s", "9.00 s", "9.00 s"]}
    assert "4 runs: 1 wrong, 1 with hangs, 0 with leftovers" in text
    assert "- shared: kill in push, seed 3: wrong: two rounds: key 'a'" in text
    assert "seed 4: there was no at.0" in text


def test_loads_have_parts_of_their_own() -> None:
    table = page.Table()
    table.row(CELL).add(Outcome(0, seconds=(0.25,)))
    table.row(CELL._replace(load=20)).add(Outcome(0, seconds=(1.5,)))
    text = page.page(table)
    assert rows_of(text, "shared")["kill in push"][-1] == "0.25 s"
    assert rows_of(text, "shared, load 20")["kill in push"][-1] == "1.50 s"


@given(st.lists(st.floats(0, 100), min_size=1))
def test_percentiles_were_measured_and_are_in_order(seconds: list[float]) -> None:
    found = page.percentiles(seconds)
    assert found == sorted(found)
    assert set(found) <= set(seconds)
    assert found[-1] == max(seconds)
    for share, value in zip((0.5, 0.99), found, strict=False):
        assert sum(one <= value for one in seconds) >= share * len(seconds)


def test_a_soak_shows_what_grows() -> None:
    grows = [[float(at), 1024.0 * (100 + at), 7.0 + at, 3.0] for at in range(12)]
    times = [[float(at), 0.002] for at in range(12)]
    job = {"store": "shared", "seconds": 90, "samples": {"worker 0": grows}, "latencies": {"worker 0": times}}
    text = soak.text_of({"machine": "here", "jobs": [job]})
    row = cells_of(text.splitlines()[-1])
    assert row[:5] == ["shared", "1.5", "worker 0", "100 → 111 MB", "+3600.0 MB"]
    assert row[5:] == ["7 → 18", "3 → 3", "2.00 → 2.00 ms", "+0%"]
