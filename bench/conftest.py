"""Make `bench` importable wherever pytest is started, and what the suites have in common."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from bench.runner import machine, suites


@pytest.fixture(scope="module")
def prober() -> machine.Prober:
    return machine.Prober()


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Collect what was measured, and print the tables of the module's `CLAIM` at the end."""
    found: list[Any] = []
    yield found
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n\ntime of the peer ÷ time of kvstore, median [lowest-highest]\n")
        for text in request.module.CLAIM.sections(found):
            print(text)


@pytest.fixture
def turns(measured: list[Any], benchmark: Any, prober: machine.Prober) -> suites.Turns:
    return suites.Turns(measured, benchmark, prober)
