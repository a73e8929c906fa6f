"""Make `bench` importable from any working directory, and define the fixtures of all suites."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from bench.runner import machine, run, suites


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Test each of the module's `CASES`; all cases of one job use the same processes."""
    if "peers" in metafunc.fixturenames:
        pairs = [(metafunc.module.CLAIM.job(case), case) for case in metafunc.module.CASES]
        names = [case.name for _, case in pairs]
        metafunc.parametrize(("peers", "case"), pairs, indirect=["peers"], ids=names, scope="module")


@pytest.fixture(scope="module")
def peers(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Start the processes of all peers of a job, and end them after its last case."""
    claim = request.module.CLAIM
    together = [case for case in request.module.CASES if claim.job(case) == request.param]
    with run.running(claim, claim.settings(together)) as found:
        yield found


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Collect the results, and print the tables of the module's `CLAIM` at the end."""
    found: list[Any] = []
    yield found
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n\ntime of the peer ÷ time of kvstore, median [lowest-highest]\n")
        for text in request.module.CLAIM.sections(found):
            print(text)


@pytest.fixture(scope="module")
def prober() -> machine.Prober:
    return machine.Prober()


@pytest.fixture
def turns(measured: list[Any], benchmark: Any, prober: machine.Prober) -> suites.Turns:
    return suites.Turns(measured, benchmark, prober)
