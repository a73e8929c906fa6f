"""Several workers and servers: the bits of `local` whatever the number of servers, and the meaning of a round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stores
from references import DTYPES
from servers import ServedJob

BODIES, ROUNDS, OWN = "procs_shared", "procs_shared_rounds", "procs_dist"
TESTS = Path(__file__).parents[1]

Served = Callable[..., ServedJob]
SYNC = {stores.NAME: "dist_sync"}
#: Slices of an eighth of the usual size: the values of the tests are cut into many.
SMALL = {**SYNC, "KVSTORE_SLICE_BYTES": "131072"}
BY_FRAME = {**SMALL, "KVSTORE_SAME_HOST_SHM": "0"}
P3 = {stores.NAME: "p3"}
#: Workers and servers.
LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 2)]


def run(job: ServedJob, module: str, function: str, *arguments: object) -> list[Any]:
    """Run a function on all workers, which check for themselves; then the whole job must end."""
    try:
        job.start_all(module, function, *arguments)
        results = job.results()
        assert job.ended() == [0] * (1 + len(job.servers))
    except AssertionError as error:
        told = "".join(one.errors() for one in (job.scheduler, *job.servers))
        raise AssertionError(f"{error}\n{told}") from None
    return results


def same(job: ServedJob, function: str, *arguments: object) -> object:
    """Run a function on all workers; they must agree."""
    first, *others = run(job, BODIES, function, *arguments)
    assert all(other == first for other in others)
    return first


# ------------------------------------------------------------------------------------------------------ bits


@pytest.mark.parametrize(("workers", "servers"), LAYOUTS)
def test_sums_are_those_of_local_bit_for_bit(served: Served, workers: int, servers: int) -> None:
    same(served(workers, servers, **SMALL), "sums", "float32", 1)


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "float32"])
def test_sums_of_every_type(served: Served, name: str) -> None:
    same(served(2, 2, **SMALL), "sums", name, 1)
