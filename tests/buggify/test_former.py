"""Faults that were mended: buggify finds them when the mending is taken out, and nothing while it is in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pace
import paths
import pytest
from buggify import simulated
from mutants import found
from mutants.building import copied
from mutants.former import FORMER, Former

IDS = [f"{one.commit}: {one.fault}" for one in FORMER]
SIMULATED = [one for one in FORMER if one.kind in simulated.KINDS and one.seeds]


@pytest.mark.parametrize("former", FORMER, ids=IDS)
def test_the_change_fits_once(former: Former) -> None:
    assert (paths.ROOT / former.file).read_text().count(former.old) == 1
    assert former.old != former.new


def test_there_are_ten() -> None:
    assert sum(bool(one.seeds) for one in FORMER) >= 10


def test_why_the_others_are_not_found_is_told() -> None:
    assert all(bool(one.seeds) != bool(one.why_not) for one in FORMER)


def test_their_seeds_are_clean_with_all_mendings_in() -> None:
    for one in SIMULATED:
        for seed in one.seeds:
            simulated.run(one.kind, seed)


def test_one_is_found(tmp_path: Path) -> None:
    assert found.without(copied(tmp_path), min(SIMULATED, key=lambda one: one.seeds[0]))


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_each_is_found() -> None:
    command = [sys.executable, "-m", "mutants.found"]
    ended = subprocess.run(
        command, cwd=paths.TESTS, capture_output=True, text=True, timeout=pace.seconds(7000), check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
