"""A job that must be gone after the test, whatever the test did to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import Job, gone_after


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with gone_after(tmp_path) as made:
        yield made
