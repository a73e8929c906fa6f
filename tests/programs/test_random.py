"""Random programs give in all stores the results of one process, with any worker late."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest
from programs import crews as playing
from programs.hunting import hunted

#: Seeds of the usual run, from 0; at night, from a number that is drawn; the variable sets them: FIRST:END.
USUAL, NIGHTLY = 20, 10_000
SEEDS = "KVSTORE_PROGRAMS"

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def crews() -> Iterator[playing.Crews]:
    with playing.crews() as made:
        yield made


def seeds(first: int, count: int) -> range:
    chosen = os.environ.get(SEEDS)
    found = range(*map(int, chosen.split(":"))) if chosen else range(first, first + count)
    print(f"{SEEDS}={found.start}:{found.stop}")  # noqa: T201 - shown with a failure
    return found


def hunt(crews: playing.Crews, some: range) -> None:
    found = next(hunted(crews, some, list(playing.PLACES)), "")
    assert not found, found


def test_programs(crews: playing.Crews) -> None:
    hunt(crews, seeds(0, USUAL))


@pytest.mark.nightly
@pytest.mark.timeout(6 * 3600)
def test_many_programs(crews: playing.Crews) -> None:
    hunt(crews, seeds(secrets.randbelow(1 << 40), NIGHTLY))
