"""Several processes and one store: the same bits everywhere, those of `local`, and the meaning of a round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import Job
from references import DTYPES

TESTS = Path(__file__).parents[1]
BODIES = "procs_shared"

MakeJob = Callable[..., Job]


def same(job: Job, function: str, *arguments: object) -> object:
    """Run a function on all workers; they must agree."""
    job.start_all(BODIES, function, *arguments)
    first, *others = job.results()
    assert all(other == first for other in others)
    return first


# ------------------------------------------------------------------------------------------------------ bits


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("size", [2, 4])
def test_sums_are_those_of_local_bit_for_bit(job: MakeJob, size: int, name: str) -> None:
    same(job(size), "sums", name, 1)


def test_sums_are_the_same_from_run_to_run(job: MakeJob) -> None:
    assert same(job(3), "sums", "float32", 2) == same(job(3), "sums", "float32", 2)


@pytest.mark.parametrize("size", [2, 4])
def test_every_optimizer_gives_the_weights_of_local(job: MakeJob, size: int) -> None:
    same(job(size), "optimizers")


@pytest.mark.parametrize("size", [2, 3])
def test_rules_of_ones_own_give_the_weights_of_local(job: MakeJob, size: int) -> None:
    same(job(size), "own_rule")


@pytest.mark.parametrize("size", [2, 4])
def test_rows_are_those_of_local(job: MakeJob, size: int) -> None:
    same(job(size), "rows")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("function", ["golden_sums", "golden_rows"])
def test_recorded_sums_of_mxnet(job: MakeJob, size: int, function: str) -> None:
    same(job(size), function, str(TESTS / "data" / "aggregate.npz"))


@pytest.mark.parametrize("size", [2, 4])
def test_recorded_optimizers_of_mxnet(job: MakeJob, size: int) -> None:
    same(job(size), "golden_optimizers", str(TESTS / "optimizer"))
