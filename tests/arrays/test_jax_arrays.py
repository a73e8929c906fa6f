"""Arrays of JAX in the core stores. Needs jax: here, or in the environment of $KVSTORE_TEST_JAX."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jobs
import pytest
import servers

BODIES = "frameworks.procs_jax_arrays"
STORES = pytest.mark.parametrize(("name", "workers"), [("local", 1), ("shared", 2), ("dist_sync", 2)])


@pytest.fixture(scope="module")
def jaxes() -> Iterator[jobs.Nursery]:
    """Forks workers; JAX has threads, so each imports it for itself."""
    named = os.environ.get("KVSTORE_TEST_JAX", "")
    if not named and importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not here: install jax, or name a python that has it in KVSTORE_TEST_JAX")
    made = jobs.Nursery(BODIES, python=named or sys.executable)
    yield made
    made.close()


@pytest.fixture
def work(jaxes: jobs.Nursery, tmp_path: Path) -> Callable[..., list[Any]]:
    """Run a function of procs_jax_arrays.py in each worker of a job; return the results."""

    def run(function: str, *arguments: Any, workers: int = 1) -> list[Any]:
        served = any(str(argument).startswith("dist_") for argument in arguments)
        kind = partial(servers.ServedJob, servers=1) if served else jobs.Job
        made = kind(jaxes, tmp_path, workers)
        try:
            made.start_all(BODIES, function, *arguments)
            return made.results()
        finally:
            made.close()

    return run


@STORES
def test_arrays_of_each_type_are_values(work: Callable[..., Any], name: str, workers: int) -> None:
    work("values", name, workers=workers)


def test_memory_is_shared(work: Callable[..., Any]) -> None:
    work("memory_is_shared")


WORDS = {
    "donated": "deleted or donated",
    "deleted": "deleted or donated",
    "door donated": "deleted or donated",
    "door deleted": "deleted or donated",
    "out float32": r"read-only.*NumPy array.*kvstore\.jax",
    "out bfloat16": r"read-only.*NumPy array.*kvstore\.jax",
    "jit": "traced array",
    "grad": "traced array",
    "vmap": "traced array",
    "key": "must be an array",
}


@STORES
def test_what_has_no_value_or_never_changes_is_refused(
    work: Callable[..., Any], name: str, workers: int
) -> None:
    for errors in work("refused", name, workers=workers):
        assert len(errors) == 15
        for case, texts in errors.items():
            words = WORDS.get(case, "element type|read-only")
            assert all(re.search(words, text) for text in texts), (case, texts)
