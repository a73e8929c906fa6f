"""Compression between processes: what MXNet does between machines, and the same bits on all workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import Job

BODIES = "procs_shared_compression"
DATA = Path(__file__).parents[2] / "data"
TWO, ONE, HALF = {"type": "2bit", "threshold": 0.3}, {"type": "1bit", "threshold": 0.0}, {"type": "fp16"}

MakeJob = Callable[..., Job]


@pytest.mark.parametrize("rule", [None, "sgd", "adam", "lamb"])
@pytest.mark.parametrize("codec", [TWO, ONE, HALF], ids=lambda codec: codec["type"])
def test_every_codec_with_every_kind_of_update(job: MakeJob, codec: dict[str, Any], rule: str | None) -> None:
    agree(job(2), [codec] * 2, rule, "pushpull")


@pytest.mark.parametrize("verb", ["push, then pull", "in place", "from the store", "one at a time"])
def test_every_verb(job: MakeJob, verb: str) -> None:
    agree(job(2), [TWO] * 2, None, verb)


@pytest.mark.parametrize("rule", [None, "sgd"])
def test_workers_may_compress_differently(job: MakeJob, rule: str | None) -> None:
    agree(job(4), [TWO, None, ONE, HALF], rule, "pushpull")


def agree(made: Job, codecs: list[dict[str, Any] | None], rule: str | None, verb: str) -> None:
    made.start_all(BODIES, "rounds", codecs, rule, verb)
    first, *others = made.results()
    assert all(other == first for other in others)


def test_recorded_pulls_of_mxnet_dist_sync(job: MakeJob) -> None:
    made = job(2)
    made.start_all(BODIES, "recorded", str(DATA / "dist.npz"))
    made.results()


@pytest.mark.parametrize("function", ["with_a_callable", "beside_rows"])
def test_sums_that_one_worker_makes(job: MakeJob, function: str) -> None:
    made = job(2)
    made.start_all(BODIES, function)
    made.results()


def test_residuals_in_files(job: MakeJob, tmp_path: Path) -> None:
    made = job(2)
    made.start_all(BODIES, "saved", str(tmp_path))
    made.results()
