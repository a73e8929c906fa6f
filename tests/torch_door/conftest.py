"""Workers with PyTorch, which is here or in the environment of $KVSTORE_TEST_TORCH."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jobs
import pytest
import servers


@pytest.fixture(scope="session")
def python() -> str:
    """An interpreter that has torch and kvstore."""
    named = os.environ.get("KVSTORE_TEST_TORCH", "")
    if not named and importlib.util.find_spec("torch") is None:
        pytest.skip(
            "PyTorch is not here: pip install torch, or name a python that has it in KVSTORE_TEST_TORCH"
        )
    return named or sys.executable


@pytest.fixture(scope="module")
def torches(python: str) -> Iterator[jobs.Nursery]:
    """Forks workers that have torch already."""
    made = jobs.Nursery("frameworks.procs_torch", python=python)
    yield made
    made.close()


@pytest.fixture(params=["beside", "after"])
def exchanges(request: pytest.FixtureRequest) -> str:
    """When gradients are exchanged: during the backward pass, or after it."""
    return str(request.param)


@pytest.fixture
def work(torches: jobs.Nursery, tmp_path: Path, exchanges: str) -> Callable[..., list[Any]]:
    """Run a function of procs_torch.py, or of another body, in each worker of a job; return the results."""

    def run(
        function: str, *arguments: Any, workers: int = 2, body: str = "frameworks.procs_torch"
    ) -> list[Any]:
        served = any(str(argument).startswith("dist_") for argument in arguments)
        kind = partial(servers.ServedJob, servers=1) if served else jobs.Job
        made = kind(torches, tmp_path, workers)
        try:
            made.start_all(body, function, *arguments, EXCHANGES=exchanges)
            return made.results()
        finally:
            made.close()
            (tmp_path / "meeting").unlink(missing_ok=True)

    return run


@pytest.fixture
def same(work: Callable[..., list[Any]]) -> Callable[..., Any]:
    """The same, where all workers must return the same."""

    def run(function: str, *arguments: Any, **options: Any) -> Any:
        first, *others = work(function, *arguments, **options)
        assert all(other == first for other in others)
        return first

    return run
