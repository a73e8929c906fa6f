"""The mutants fit the code as it is, the page lists all; and some of them are run and must be caught."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pace
import paths
import pytest
from mutants.__main__ import PAGE, tried
from mutants.building import copied
from mutants.table import MUTANTS, Mutant

IDS = [f"{Path(one.file).name}: {one.why}" for one in MUTANTS]


@pytest.mark.parametrize("mutant", MUTANTS, ids=IDS)
def test_it_fits_once(mutant: Mutant) -> None:
    assert (paths.ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new


def test_there_are_sixty_of_all_groups() -> None:
    groups = Counter(one.group for one in MUTANTS)
    assert sum(groups[one] for one in ("rounds", "duplicates", "fencing", "snapshots", "phases")) >= 60
    assert set(groups) == {"rounds", "duplicates", "fencing", "snapshots", "reads", "phases", "settings"}


def test_the_page_tells_how_each_is_caught() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert [(row[0], row[1], row[2]) for row in rows[1:]] == [
        (one.group, Path(one.file).name, one.why) for one in MUTANTS
    ]
    assert all(row[3].startswith(("history of", "test ", "random program")) for row in rows[1:])


def some() -> list[Mutant]:
    """One of each group that needs no build, and is caught by an early job."""
    return [next(one for one in MUTANTS if one.group == group) for group in ("rounds", "fencing")]


@pytest.mark.parametrize("mutant", some(), ids=[one.why for one in some()])
def test_it_is_caught(tmp_path: Path, mutant: Mutant) -> None:
    assert tried(copied(tmp_path), mutant, pace.seconds(20.0)).startswith("history of a simulated job: ")


def test_nothing_is_caught_in_the_code_as_it_is(tmp_path: Path) -> None:
    whole = MUTANTS[0]._replace(new=MUTANTS[0].old)
    assert tried(copied(tmp_path), whole, 0.3) == ""


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_each_is_caught() -> None:
    command = [sys.executable, "-m", "mutants"]
    ended = subprocess.run(
        command, cwd=paths.TESTS, capture_output=True, text=True, timeout=pace.seconds(7000), check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
