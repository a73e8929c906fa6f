"""Make `bench` importable wherever pytest is started, and leave nothing of it behind."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))

from bench.runner import compiled


@pytest.fixture(scope="session", autouse=True)
def nothing_compiled_is_left() -> Iterator[None]:
    """A test process of pytest-xdist ends without its exit handlers."""
    yield
    compiled.discard()
