"""A job that must have ended after each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import Job, gone_after


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with gone_after(tmp_path) as made:
        yield made
