"""The mutants fit the code as it is; and one of them, to see that the jobs catch it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pace
import paths
import pytest
from mutants.table import MUTANTS, SURVIVORS


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{one.group}: {one.why}" for one in MUTANTS])
def test_it_fits_once(mutant: tuple[str, str, str, str, str]) -> None:
    _, file, old, new, _ = mutant
    assert (paths.ROOT / file).read_text().count(old) == 1
    assert old != new


def test_there_are_sixty_of_all_groups() -> None:
    groups = Counter(one.group for one in MUTANTS)
    assert len(MUTANTS) >= 60
    assert set(groups) == {"rounds", "duplicates", "fencing", "snapshots", "reads", "phases"}


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_each_is_caught() -> None:
    command = [sys.executable, "-m", "mutants"]
    ended = subprocess.run(
        command, cwd=paths.TESTS, capture_output=True, text=True, timeout=pace.seconds(7000), check=False
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line.split(" | ") for line in ended.stdout.splitlines() if "**survives**" in line]
    assert {line[2] for line in lines} <= set(SURVIVORS), ended.stdout


def test_known_survivors_are_mutants() -> None:
    assert set(SURVIVORS) <= {one.why for one in MUTANTS}
