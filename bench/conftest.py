"""Make `bench` importable wherever pytest is started, and what the suites have in common."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from bench.runner import machine


@pytest.fixture(scope="module")
def prober() -> machine.Prober:
    return machine.Prober()


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Collect what was measured, and print the tables of the module's `tables` at the end."""
    found: list[Any] = []
    yield found
    tables: Callable[[list[Any]], Iterator[str]] = request.module.tables
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n\ntime of the peer ÷ time of kvstore, median [lowest-highest]\n")
        for text in tables(found):
            print(text)
