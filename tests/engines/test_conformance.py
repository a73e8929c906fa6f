"""Every case of conformance.py, in jobs of real processes over every engine that is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import conformance, launchers


def _usual(engine: launchers.Engine) -> int:
    """Return the size of the job that runs every time; a real engine has three processes to sum in order."""
    return 2 if engine.title.startswith("fake-") else 3


JOBS: list[Any] = []
for engine in launchers.ENGINES:
    if engine.missing:
        JOBS.append(pytest.param(engine, 0, "", marks=pytest.mark.skip(engine.missing), id=str(engine)))
        continue
    JOBS += [
        pytest.param(engine, size, case, id=f"{engine}-{size}-{case}", marks=marks)
        for size in (2, 3)
        for marks in [() if size == _usual(engine) else pytest.mark.nightly]
        for case in conformance.CASES
    ]


@pytest.fixture(scope="session")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., launchers.Ended]:
    """Run the cases once for each engine and size, when the first of them is asked for."""
    known: dict[tuple[str, int], launchers.Ended] = {}

    def run(engine: launchers.Engine, size: int) -> launchers.Ended:
        if (engine.title, size) not in known:
            folder = tmp_path_factory.mktemp(f"{engine}-{size}")
            known[engine.title, size] = launchers.run(engine, size, folder, "conformance.py")
        return known[engine.title, size]

    return run


@pytest.mark.parametrize(("engine", "size", "case"), JOBS)
def test_case(engine: launchers.Engine, size: int, case: str, ended: Callable[..., launchers.Ended]) -> None:
    job = ended(engine, size)
    assert sorted(job.told) == list(range(size)), job.output
    problems = [told["outcomes"][case] for _, told in sorted(job.told.items())]
    assert problems == [""] * size, "\n".join(problems)


@pytest.mark.parametrize("engine", launchers.ENGINES, ids=str)
def test_the_job_ends_well_and_says_what_it_ran_on(
    engine: launchers.Engine, ended: Callable[..., launchers.Ended]
) -> None:
    if engine.missing:
        pytest.skip(engine.missing)
    job = ended(engine, _usual(engine))
    assert job.code == 0, job.output
    versions = job.told[0]["versions"]
    print(engine, versions)  # noqa: T201 - for reports: pytest -rP
    assert all(versions.values())
    assert len(versions) > 1


def test_there_are_as_many_cases_as_functions() -> None:
    """A case whose name is used twice would be lost."""
    source = Path(conformance.__file__).read_text()
    assert source.count("\n@case\n") == len(conformance.CASES) > 40
