"""Optimizers of several workers: they change alike, or on one worker, or they differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import tested_store
from jobs import Job
from servers import ServedJob, start_on_hosts

STORES = ("shared", "local", "dist_sync", "hosts")


@pytest.fixture(params=STORES)
def run(
    request: pytest.FixtureRequest, job: Callable[..., Job], served: Callable[..., ServedJob]
) -> Callable[..., list[Any]]:
    """Run a body on two workers of a store; return the result of each."""
    kind = request.param

    def on_workers(function: str, *arguments: Any) -> list[Any]:
        made: Job = job(2) if kind in ("shared", "local") else served(2, 1)
        if isinstance(made, ServedJob) and kind == "hosts":
            variables = {tested_store.NAME: "dist_sync"}
            start_on_hosts(made, [0, 0], "procs", function, *arguments, **variables)
        else:
            made.start_all("procs", function, *arguments, **{tested_store.NAME: kind})
        return made.results()

    return on_workers


@pytest.mark.parametrize("who", ["all", "one"])
def test_a_change_of_the_object_travels(run: Callable[..., list[Any]], who: str) -> None:
    first, second = run("changed", who)
    assert first == second


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({"lr_mult": {"w": 3}}, r"lr_mult\['w'\] 2.0 on worker 0 and 3.0 on worker 1"),
        ({"lr_mult": {}}, r"lr_mult\['w'\] 2.0 on worker 0 and not set on worker 1"),
        ({"momentum": 0.9}, "momentum 0.0 on worker 0 and 0.9 on worker 1"),
        ({"learning_rate": 0.5}, "lr_scheduler.base_lr 0.1 on worker 0 and 0.5 on worker 1"),
        ({"rule": "nag"}, "'sgd' on worker 0 and 'nag' on worker 1"),
    ],
)
def test_the_error_of_two_optimizers_names_the_setting(
    run: Callable[..., list[Any]], other: dict[str, Any], found: str
) -> None:
    settings = {name: value for name, value in other.items() if name != "rule"}
    first, second = run("differ", settings, other.get("rule", "sgd"))
    assert first == ""
    assert re.search(found, second), second
    assert "wd " not in second
