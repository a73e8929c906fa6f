"""Arrays on GPUs in the store of several processes: the bits of host arrays, and nothing left behind.

All data passes through the host; test_shared_ipc.py tests the direct way. Each worker has a CUDA driver of
its own that needs no GPU; the tests marked `gpu` use a real one.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pace
import pytest
from fake_cuda.fixtures import some_driver  # noqa: F401
from jobs import Job, Worker
from nightly import each_once, nightly_unless
from references import DTYPES

BODIES = "procs_shared_gpu"
IN_TIME = 3.0  # seconds from a death until every survivor knows: the machine may stand still for one

MakeJob = Callable[..., Job]
pytestmark = pytest.mark.usefixtures("some_driver")


def same(made: Job, function: str, *arguments: object) -> Any:
    """Run a function on all workers; they must agree."""
    first, *others = run(made, function, *arguments)
    assert all(other == first for other in others)
    return first


def run(made: Job, function: str, *arguments: object) -> list[Any]:
    start(made, function, *arguments)
    return made.results()


def start(made: Job, function: str, *arguments: object) -> list[Worker]:
    """Start all workers; their temporary folder is to stay empty, and the fake driver lies elsewhere."""
    return made.start_all(BODIES, function, *arguments, KVSTORE_CUDA_IPC="0")


# ------------------------------------------------------------------------------------------------------ bits


@pytest.mark.parametrize("name", nightly_unless(lambda name: name in ("float16", "int64"), DTYPES))
def test_every_verb_gives_the_bits_of_host_arrays(job: MakeJob, name: str) -> None:
    same(job(2), "sums", name, ["gpu", "gpu"])


@pytest.mark.parametrize(
    "places",
    nightly_unless(
        lambda places: len(places) != 2,
        [["gpu", "host"], ["host", "gpu", "any"], ["any", "any"], ["host", "host"], ["gpu"]],
    ),
)
def test_arrays_on_gpus_beside_arrays_of_the_host(job: MakeJob, places: list[str]) -> None:
    same(job(len(places)), "sums", "float32", places)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("places", [["gpu", "gpu"], ["gpu", "host", "any"]])
def test_every_verb_on_a_real_gpu(job: MakeJob, places: list[str], name: str) -> None:
    same(job(len(places)), "sums", name, places, True)


@pytest.mark.parametrize("rule", nightly_unless(lambda rule: rule != "sgd", ["sgd", "adam", "lamb"]))
def test_weights_are_those_of_local(job: MakeJob, rule: str) -> None:
    same(job(2), "optimizers", rule)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_weights_on_a_real_gpu(job: MakeJob, rule: str) -> None:
    same(job(2), "optimizers", rule, True)


def test_an_updater_sees_host_arrays(job: MakeJob) -> None:
    same(job(2), "updater")


@pytest.mark.parametrize(
    ("codec", "verb"), each_once([{"type": "2bit", "threshold": 0.5}, {"type": "fp16"}], ["push", "pushpull"])
)
def test_compressed_gradients(job: MakeJob, codec: dict[str, Any], verb: str) -> None:
    same(job(2), "compressed", codec, verb)


@pytest.mark.parametrize("seed", nightly_unless(lambda seed: seed < 1, range(3)))
def test_tensors_on_the_caller_s_stream(job: MakeJob, seed: int) -> None:
    same(job(2), "tensors", seed)


def test_broadcast(job: MakeJob) -> None:
    run(job(3), "broadcast")


# ------------------------------------------------------------------------------------- order, memory, errors


def test_operations_that_begin_in_different_orders(job: MakeJob) -> None:
    assert same(job(2), "orders") == [15.0] * 3


@pytest.mark.parametrize(
    "function", ["ahead_of_a_peer", "bounded", "waits_of_the_host", "closed_early", "dropped"]
)
def test_memory_and_waits(job: MakeJob, function: str) -> None:
    run(job(2), function)


def test_a_driver_that_locks_no_pages(job: MakeJob) -> None:
    for rank, lines in enumerate(run(job(2), "pageable", 0)):
        (line,) = lines
        assert line.startswith(f"worker {rank} copies arrays on GPUs through pageable memory")
        assert "operation not supported" in line


def test_a_driver_that_locks_no_more_pages(job: MakeJob) -> None:
    for first, second in run(job(2), "pageable", 1):
        assert "through page-locked memory of the shared region: CUDA IPC is switched off" in first
        assert "not locked" in second
        assert "operation not supported" in second


def test_what_cannot_be_meant(job: MakeJob) -> None:
    same(job(2), "refused")


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuEventRecord", "cuStreamWaitEvent"])
def test_an_error_of_the_driver(job: MakeJob, call: str) -> None:
    run(job(2), "broken_once", call)


def test_a_process_without_arrays_on_gpus_imports_nothing_of_cuda(job: MakeJob) -> None:
    assert run(job(2), "nothing_of_cuda") == [[], []]


# --------------------------------------------------------------------------------------------------- deaths


@pytest.mark.parametrize(
    ("seed", "rule"),
    nightly_unless(
        lambda seed, rule: (seed, rule) in ((0, None), (1, "sgd")), itertools.product(range(4), [None, "sgd"])
    ),
)
def test_a_killed_worker(job: MakeJob, seed: int, rule: str | None) -> None:
    draw = random.Random(seed)
    made = job(draw.choice([2, 3]))
    workers = start(made, "until_lost", seed, rule)
    for worker in workers:
        worker.expect("ready")
    victim = draw.randrange(made.size)
    time.sleep(draw.random() * 0.1)  # the instant
    killed = time.monotonic()
    workers.pop(victim).signal(signal.SIGKILL)
    for worker in workers:
        worker.expect("lost")
    for worker in workers:
        worker.say("read")
    made.finish(30)
    first, *others = [worker.result() for worker in workers]
    assert first["rank"] == victim
    for found in (first, *others):
        assert found["noticed"] - killed < pace.seconds(IN_TIME)
        assert found["values"] == first["values"]


def test_the_living_go_on_where_that_was_asked_for(job: MakeJob) -> None:
    made = job(3)
    workers = start(made, "going_on")
    for worker in workers:
        worker.expect("working")
    time.sleep(0.05)
    workers.pop(1).signal(signal.SIGKILL)
    time.sleep(0.2)
    workers[0].say("stop")
    made.finish(30)
    assert [set(worker.result().values()) for worker in workers] == [{101.0}] * 2
