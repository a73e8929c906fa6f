"""Sums between the GPUs of several processes by CUDA IPC: the bits of the way by the host, and nothing left.

Each worker has a CUDA driver of its own that needs no GPU, and opens the other workers' memory; the tests
marked `gpu` use a real one.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pace
import pytest
from fake_cuda.fixtures import some_driver  # noqa: F401
from jobs import Job, Worker
from nightly import nightly_unless
from references import DTYPES

import kvstore as kv
from kvstore.settings.options import store_config

BODIES = "procs_shared_ipc"
IN_TIME = 3.0  # seconds from a death until every survivor knows: the machine may stand still for one

MakeJob = Callable[..., Job]
pytestmark = pytest.mark.usefixtures("some_driver")


def start(made: Job, function: str, *arguments: object) -> list[Worker]:
    return made.start_all(BODIES, function, *arguments)


def run(made: Job, function: str, *arguments: object) -> list[Any]:
    start(made, function, *arguments)
    return made.results()


def same(made: Job, function: str, *arguments: object) -> Any:
    """Run a function on all workers; they must agree."""
    first, *others = run(made, function, *arguments)
    assert all(other == first for other in others)
    return first


# ------------------------------------------------------------------------------------------------------ bits


# Some in every run: test_shared_gpu.py runs other ones, test_shared.py all.
@pytest.mark.parametrize("name", nightly_unless(lambda name: name in ("bfloat16", "int32"), DTYPES))
def test_every_verb_gives_the_bits_of_host_arrays(job: MakeJob, name: str) -> None:
    same(job(2), "sums", name, ["gpu", "gpu"])


@pytest.mark.parametrize(
    "places",
    nightly_unless(lambda places: "host" in places, [["gpu"] * 3, ["gpu", "host", "any"], ["any", "any"]]),
    ids="-".join,
)
def test_arrays_of_gpus_beside_arrays_of_the_host(job: MakeJob, places: list[str]) -> None:
    same(job(len(places)), "sums", "float32", places)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("places", [["gpu", "gpu"], ["gpu", "host", "any"]], ids="-".join)
def test_every_verb_on_a_real_gpu(job: MakeJob, places: list[str], name: str) -> None:
    """All processes share one GPU."""
    if same(job(len(places)), "sums", name, places, True) == "refused":
        pytest.skip("the driver refuses CUDA IPC here")


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize(
    "name",
    nightly_unless(
        lambda name: name in ("float32", "int8"),
        [name for name in DTYPES if name not in ("float16", "bfloat16")],
    ),
)
def test_golden_sums(job: MakeJob, name: str, size: int) -> None:
    run(job(size), "golden", name)


def test_several_gpus_of_one_process(job: MakeJob) -> None:
    run(job(2), "several_devices")


# ------------------------------------------------------------------------------------- rounds, order, memory


@pytest.mark.parametrize(
    ("seed", "size"),
    [
        pytest.param(seed, size, marks=() if (seed, size) == (1, 3) else pytest.mark.nightly)
        for seed in range(3)
        for size in (2, 3)
    ],
)
def test_workers_that_run_ahead_of_each_other(job: MakeJob, seed: int, size: int) -> None:
    same(job(size), "unsynchronised", seed)


def test_pulls_on_several_streams(job: MakeJob) -> None:
    run(job(2), "pulls_on_streams")


def test_a_slot_more_for_a_worker_that_is_ahead(job: MakeJob) -> None:
    found = run(job(2), "ahead")
    assert max(found) in (3, 4), found


def test_memory_and_copies_are_bounded(job: MakeJob) -> None:
    run(job(2), "bounded")


# ---------------------------------------------------------------------------------------- with other features


@pytest.mark.parametrize("function", ["optimizer_later", "compression_later"])
def test_what_the_host_must_do(job: MakeJob, function: str) -> None:
    same(job(2), function)


def test_files(job: MakeJob, tmp_path: Path) -> None:
    run(job(2), "files", str(tmp_path))


def test_a_worker_that_has_joined(job: MakeJob) -> None:
    made = job(3)
    workers = start(made, "joined")
    for said, answer in (("through", "read"), ("has read", "close")):
        for worker in workers:
            worker.expect(said)
        for worker in workers:
            worker.say(answer)
    first, *others = made.results()
    assert first == [6.0, 6.0, 5.0]
    assert others == [[6.0, 6.0, 5.0, 5.0, 5.0, 5.0, 5.0]] * 2


# --------------------------------------------------------------------------------------------------- refusals


CANNOT = [
    ("", 0, "operation not supported"),
    ("cuIpcGetMemHandle", 801, "operation not supported"),
    ("cuIpcOpenMemHandle_v2", 205, "mapping of buffer object failed"),
    ("memory", 2, "no memory left"),
]


@pytest.mark.parametrize(
    ("rank", "call", "error", "words"),
    nightly_unless(
        lambda rank, call, *_: rank == [case[0] for case in CANNOT].index(call) % 2,
        [(rank, *case) for rank in (0, 1) for case in CANNOT],
    ),
)
def test_one_that_cannot(job: MakeJob, rank: int, call: str, error: int, words: str) -> None:
    for worker, lines in enumerate(run(job(3), "refused", rank, call, error)):
        _, line = lines
        where = "here" if worker == rank else f"to worker {rank}"
        assert line.startswith(f"worker {worker} copies arrays on GPUs through page-locked memory")
        assert f"CUDA IPC is refused {where}: " in line
        assert words in line


def test_memory_that_is_not_what_it_should_be(job: MakeJob) -> None:
    first, second = run(job(2), "wrong_memory")
    assert "has opened other memory" in first[1]
    assert "refused to worker 0" in second[1]


def test_it_can_be_switched_off(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    for (line,) in run(job(2), "switched_off"):
        assert "CUDA IPC is switched off" in line
    monkeypatch.setenv("KVSTORE_CUDA_IPC", "0")
    assert store_config({}).cuda_ipc == 0
    assert store_config({"cuda_ipc": 1}).cuda_ipc == 1
    with pytest.raises(kv.ConfigError, match="cuda_ipc"):
        store_config({"cuda_ipc": 2})


@pytest.mark.parametrize("call", ["cuLaunchKernelEx", "cuEventRecord", "cuEventSynchronize"])
def test_an_error_of_the_driver(job: MakeJob, call: str) -> None:
    run(job(2), "broken_once", call)


# ----------------------------------------------------------------------------------------------- deaths, ends


@pytest.mark.parametrize("seed", nightly_unless(lambda seed: seed < 2, range(4)))
def test_a_killed_worker(job: MakeJob, seed: int) -> None:
    draw = random.Random(seed)
    made = job(draw.choice([2, 3]))
    workers = start(made, "until_lost", seed)
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


def test_a_stopped_worker(job: MakeJob) -> None:
    made = job(2)
    workers = start(made, "stopped", 0)
    for worker in workers:
        worker.expect("ready")
    workers[0].signal(signal.SIGSTOP)
    workers[1].expect("lost")
    workers[0].signal(signal.SIGCONT)
    workers[0].expect("fenced")
    for worker in workers:
        worker.say("close")
    assert made.results() == ["fenced", "lost"]


def test_memory_that_others_have_open_is_freed_later(job: MakeJob) -> None:
    made = job(2)
    first, second = start(made, "one_closes_late")
    first.expect("open")
    second.expect("left")
    first.say("go")
    first.expect("closed")
    second.say("go")
    made.results()
