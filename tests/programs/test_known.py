"""Programs that showed a fault once show none, whichever worker is late, and for how long."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
from programs import crews as playing
from programs.crews import PLACES
from programs.hunting import told
from programs.known import KNOWN, late, script

LATE = (0.0, 0.001, 0.01, 0.1)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def crews() -> Iterator[playing.Crews]:
    with playing.crews() as made:
        yield made


@pytest.mark.parametrize("times", [1, pytest.param(100, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", KNOWN)
def test_a_known_program(crews: playing.Crews, name: str, times: int) -> None:
    def play(store: str, seed: int) -> str:
        one = late(script(name), LATE[seed % 4], random.Random(seed))
        found = crews.differs(one, store)
        return "" if found is None else told(f"{name}, time {seed}", one, found)

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda case: play(*case), product(PLACES, range(times))))
    assert not any(texts), next(filter(None, texts))
