"""PyTorch tensors with unusual memory. Needs torch: here, or that of $KVSTORE_TEST_TORCH.

$KVSTORE_TEST_REPEATS is how often the values are checked in each store; see also tests/support/nightly.py.
"""

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
from nightly import portions

BODIES = "frameworks.procs_tensors"
STORES = pytest.mark.parametrize(("name", "workers"), [("local", 1), ("shared", 2), ("dist_sync", 2)])


@pytest.fixture(scope="module")
def torches() -> Iterator[jobs.Nursery]:
    """Forks workers that have torch already."""
    named = os.environ.get("KVSTORE_TEST_TORCH", "")
    if not named and importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not here: install it, or name a python that has it in KVSTORE_TEST_TORCH")
    made = jobs.Nursery(BODIES, python=named or sys.executable)
    yield made
    made.close()


@pytest.fixture
def work(torches: jobs.Nursery, tmp_path: Path) -> Callable[..., list[Any]]:
    """Run a function of procs_tensors.py in each worker of a job; return the results."""

    def run(function: str, *arguments: Any, workers: int = 1, deadline: float = jobs.DEADLINE) -> list[Any]:
        served = any(str(argument).startswith("dist_") for argument in arguments)
        kind = partial(servers.ServedJob, servers=1) if served else jobs.Job
        made = kind(torches, tmp_path, workers)
        try:
            made.start_all(BODIES, function, *arguments)
            return made.results(deadline)
        finally:
            made.close()
            (tmp_path / "meeting").unlink(missing_ok=True)

    return run


@STORES
def test_negative_bits_are_resolved_in_every_verb(work: Callable[..., Any], name: str, workers: int) -> None:
    repeats = int(os.environ.get("KVSTORE_TEST_REPEATS", "4"))
    found = work("signs", name, repeats, workers=workers, deadline=jobs.DEADLINE + repeats)
    assert found == [0] * workers


@pytest.mark.parametrize("name", ["shared", "dist_sync"])
def test_negative_bits_are_resolved_by_the_doors(work: Callable[..., Any], name: str, tmp_path: Path) -> None:
    for single, half, gradient in work("doors", name, str(tmp_path), workers=2):
        assert single == half == [0, 1, 2, 3]
        assert gradient == [[1.5, 3, 4.5]]


@STORES
def test_tensors_without_memory_of_their_own_are_refused(
    work: Callable[..., Any], name: str, workers: int
) -> None:
    for errors in work("no_memory", name, workers=workers):
        assert len(errors) > 30
        for case, texts in errors.items():
            _, words = case.split(" ", 1)
            # The last words that fit are those of arrays; a door names its cause in its own.
            assert all(text != "no error" for text in texts), case
            assert sum(re.search(words, text) is not None for text in texts) >= len(texts) - 2, (case, texts)


def test_tensors_inside_of_transforms_are_refused(work: Callable[..., Any]) -> None:
    (errors,) = work("transforms")
    assert len(errors) == 8
    assert all("it is inside torch.vmap" in text for text in errors.values()), errors


@STORES
def test_unusual_tensors_with_memory_are_values_and_outs(
    work: Callable[..., Any], name: str, workers: int
) -> None:
    work("usable", name, workers=workers)


def test_modes_of_torch_change_no_value(work: Callable[..., Any]) -> None:
    (errors,) = work("modes")
    assert "a tensor with memory" in errors.pop("traced")
    assert len(errors) == 2
    assert all("resolve_neg" in text for text in errors.values()), errors


def test_a_view_keeps_the_memory_that_it_shows(work: Callable[..., Any]) -> None:
    work("memory_stays", 3)


@portions(8)
def test_views_of_any_shape_strides_type_and_sign(work: Callable[..., Any], portion: int) -> None:
    work("drawn", portion, 400)
