"""The origin of the jobs of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.faulty_jobs import Faults, SharedNursery


@pytest.fixture(scope="module")
def shared_nursery() -> Iterator[SharedNursery]:
    made = SharedNursery()
    yield made
    made.close()


@pytest.fixture
def faults(shared_nursery: SharedNursery, tmp_path: Path) -> Faults:
    return Faults(shared_nursery, tmp_path)
