"""Sums, means and objects without a key, in several processes and all stores that sum over them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pace
import pytest
import tested_store
from fake_cuda.fixtures import some_driver  # noqa: F401
from jobs import Job, Worker
from references import DTYPES
from servers import ServedJob, start_on_hosts

BODIES = "together.procs_collective"

#: Name, number of workers and servers, and the host of each worker where they sum by hosts.
JOBS = {
    "shared": ("shared", 2, 0, []),
    "shared of 3": ("shared", 3, 0, []),
    "dist_sync": ("dist_sync", 2, 1, []),
    "dist_sync on 2 servers": ("dist_sync", 3, 2, []),
    "p3": ("p3", 2, 2, []),
    "by hosts": ("dist_sync", 3, 1, [0, 0, 1]),
}
FEW = ["shared", "dist_sync on 2 servers", "by hosts"]


class Run:
    """Starts a function on all workers of a job."""

    def __init__(self, kind: str, job: Callable[..., Job], served: Callable[..., ServedJob]) -> None:
        self.name, self.size, self.servers, self.hosts = JOBS[kind]
        self._job, self._served = job, served

    def start(self, function: str, *arguments: object, **variables: str) -> tuple[Job, list[Worker]]:
        variables = {tested_store.NAME: self.name, **variables}
        if not self.servers:
            made = self._job(self.size)
            return made, made.start_all(BODIES, function, *arguments, **variables)
        served = self._served(self.size, self.servers, KVSTORE_SLICE_BYTES="65536", **variables)
        if self.hosts:
            return served, start_on_hosts(served, self.hosts, BODIES, function, *arguments)
        return served, served.start_all(BODIES, function, *arguments)

    def __call__(self, function: str, *arguments: object) -> list[Any]:
        made, workers = self.start(function, *arguments)
        try:
            return made.results()
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *(one.errors() for one in workers)])) from None
        finally:
            made.close()


@pytest.fixture(params=JOBS)
def run(request: pytest.FixtureRequest, job: Callable[..., Job], served: Callable[..., ServedJob]) -> Run:
    return Run(request.param, job, served)


@pytest.fixture
def run_in(job: Callable[..., Job], served: Callable[..., ServedJob]) -> Callable[[str], Run]:
    return lambda kind: Run(kind, job, served)


@pytest.mark.parametrize("name", ["float16", "float32", "int64"])
def test_sums_and_means_have_the_bits_of_the_order_of_ranks(run: Run, name: str) -> None:
    run("sums_and_means", name)


@pytest.mark.parametrize("name", DTYPES)
def test_sums_and_means_of_all_types(run_in: Callable[[str], Run], name: str) -> None:
    run_in("shared of 3")("sums_and_means", name)


def test_lists_strides_and_large_numbers(run: Run) -> None:
    run("shapes")


@pytest.mark.parametrize("kind", ["exact", "int", "str"])
def test_a_training_is_the_same_with_it_and_without(run: Run, kind: str) -> None:
    """Weights, states, clocks, files and the store's properties; and sums are exact during this."""
    assert run("training", kind, True) == run("training", kind, False)


def test_keys_may_be_of_either_kind(run: Run) -> None:
    run("kinds_of_keys")


def test_workers_that_differ_are_all_told(run: Run) -> None:
    first, *others = run("differences")
    assert all(told == first for told in others)
    kinds = [text.partition(":")[0] for text in first]
    arrays = ["ShapeError", "DTypeError", "ShapeError", "ShapeError", "ShapeError", "DTypeError"]
    assert kinds == [*arrays * 2, "DTypeError", "ArgumentError", "ArgumentError"]
    assert "worker 0 has called all_reduce of float32 (3,), worker " in first[0]
    assert " all_reduce of float32 (4,): all workers make the same calls" in first[0]


def test_calls_in_the_background_keep_their_order(run: Run) -> None:
    run("in_the_background")


def test_objects(run: Run) -> None:
    run("objects")


def test_many_shapes_take_few_keys(run_in: Callable[[str], Run]) -> None:
    for kind in FEW[:2]:
        for count in run_in(kind)("many_shapes"):
            assert count < 12


def test_threads_that_keep_an_order(run_in: Callable[[str], Run]) -> None:
    for kind in FEW:
        run_in(kind)("several_threads")


def test_first_calls_of_two_threads(run_in: Callable[[str], Run]) -> None:
    for kind in FEW:
        run_in(kind)("first_calls_of_threads")


def test_a_mean_after_a_join_is_that_of_the_others(run_in: Callable[[str], Run]) -> None:
    for kind in ("shared of 3", "dist_sync on 2 servers", "by hosts"):
        made, workers = run_in(kind).start("after_a_join")
        for worker in workers:
            worker.expect("done")
        for worker in workers:
            worker.say("go")
        made.results()
        made.close()


def test_it_is_refused_in_an_updater(run_in: Callable[[str], Run]) -> None:
    run_in("shared")("in_an_updater")


@pytest.mark.parametrize("count", [3, 20_000])
@pytest.mark.parametrize("on_peer_loss", ["raise", "continue"])
@pytest.mark.parametrize("kind", ["shared of 3", "dist_sync on 2 servers"])
def test_a_killed_worker(run_in: Callable[[str], Run], kind: str, on_peer_loss: str, count: int) -> None:
    """All other workers get PeerLostError, or sums without it."""
    made, workers = run_in(kind).start("until_lost", on_peer_loss, count, KVSTORE_DEAD_AFTER="2")
    for worker in workers:
        worker.expect("ready")
    time.sleep(0.2)
    workers[1].signal(signal.SIGKILL)
    made.finish()
    found = [worker.result() for worker in (workers[0], workers[2])]
    if on_peer_loss == "raise":
        assert [one["told"] for one in found] == ["worker 1"] * 2
    else:
        assert [(one["living"], one["present"]) for one in found] == [(2, [0, 2])] * 2
    made.close()


@pytest.mark.parametrize("count", [3, 20_000])
@pytest.mark.parametrize("kind", ["shared of 3", "dist_sync on 2 servers"])
def test_a_worker_that_comes_back(run_in: Callable[[str], Run], kind: str, count: int) -> None:
    """Sums continue without it, and then with it."""
    run = run_in(kind)
    made, workers = run.start("goes_on_with_who_comes_back", count, KVSTORE_DEAD_AFTER="2")
    workers[0].expect("now [3]")
    workers[2].signal(signal.SIGKILL)
    workers[0].expect("now [3, 2]")
    again = {tested_store.NAME: run.name, "KVSTORE_RESTART": "1", "KVSTORE_DEAD_AFTER": "2"}
    workers = workers[:2]
    workers.append(made.start(BODIES, "goes_on_with_who_comes_back", count, rank=2, **again))
    workers[0].expect("now [3, 2, 3]")
    workers[0].say("stop")
    made.finish()
    assert [worker.result()["seen"][-1] for worker in workers] == [3] * 3
    made.close()


@pytest.mark.usefixtures("some_driver")
@pytest.mark.parametrize("kind", ["shared", "dist_sync"])
def test_arrays_on_gpus(run_in: Callable[[str], Run], kind: str) -> None:
    run_in(kind)("on_gpus")


def test_rules_that_need_whole_keys(run_in: Callable[[str], Run]) -> None:
    first, *others = run_in("dist_sync on 2 servers")("beside_rules_that_need_whole_keys")
    assert all(other == first for other in others)
    assert first[0] == first[1] < 1


def test_many_changes_of_the_settings(run_in: Callable[[str], Run]) -> None:
    run_in("dist_sync")("after_many_settings")


def test_servers_that_come_back(served: Callable[..., ServedJob], tmp_path: Path) -> None:
    """No worker gets the sum of some workers for that of all."""
    snapshots = {"KVSTORE_SNAPSHOT": str(tmp_path / "shots"), "KVSTORE_SNAPSHOT_INTERVAL": "0.2"}
    made = served(2, 1, **snapshots, KVSTORE_SERVER_RESTARTS="3", **{tested_store.NAME: "dist_sync"})
    workers = made.start_all(BODIES, "while_servers_come_back")
    for worker in workers:
        worker.expect("ready")
    for count in range(3):
        time.sleep(0.5)
        made.servers[-1].signal(signal.SIGKILL)
        made.servers[-1].finish(pace.deadline(20))
        made.start_server(0, KVSTORE_RESTART=str(count + 1))
    time.sleep(1)
    workers[0].say("stop")
    assert all(right > 0 for right, _ in made.results())
    made.close()


def test_a_store_without_rounds_refuses(served: Callable[..., ServedJob]) -> None:
    made = served(2, 1, **{tested_store.NAME: "dist_async"})
    made.start_all(BODIES, "refused")
    for told in made.results():
        assert [text.partition("(")[0] for text in told] == ["CapabilityError: a store without rounds "] * 3
    made.close()
