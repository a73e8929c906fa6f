"""A process of a job dies, never calls, or fails: the others get an error in time, and no process stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pace
import pytest
from engines import launchers
from nightly import nightly_unless

DEADLINE = 2.0
SLACK = 8.0  # seconds of a slow machine, and of the engine's own notice

ENGINES = [
    pytest.param(
        engine,
        id=str(engine),
        marks=[
            *([pytest.mark.skip(engine.missing)] if engine.missing else []),
            *([pytest.mark.nightly] if engine.title.startswith("fake-") else []),
        ],
    )
    for engine in launchers.ENGINES
]
engines = pytest.mark.parametrize("engine", ENGINES)


def job(
    engine: launchers.Engine,
    folder: Path,
    body: str,
    size: int = 2,
    deadline: float = DEADLINE,
    **options: Any,
) -> launchers.Ended:
    arguments = ("faults.py", body, str(deadline))
    return launchers.run(engine, size, folder, *arguments, patient=True, timeout=60, **options)


@engines
def test_the_death_of_a_process_is_noticed(engine: launchers.Engine, tmp_path: Path) -> None:
    if engine.name == "byteps":
        pytest.skip("BytePS tells nobody")
    ended = job(engine, tmp_path, "killed", size=3, deadline=30)  # noticed, not waited for
    assert len(ended.pids) == 3
    assert ended.code != 0
    if engine.ends_jobs:
        assert not ended.told, "MPI ends all processes when one dies"
        assert ended.seconds < DEADLINE + SLACK
        return
    assert sorted(ended.told) == [0, 1], ended.output
    for told in ended.told.values():
        assert told["first"]["error"] == "PeerLostError", told
        assert told["first"]["seconds"] < DEADLINE + SLACK
        assert told["later"]["error"] in ("KVStoreError", "PeerLostError"), told
        assert "start the job again" in told["later"]["text"] or engine.name == "gloo"
        assert told["reads"]


@engines
@pytest.mark.parametrize(
    "body",
    nightly_unless(
        lambda body: body in ("absent", "other_key"),
        ["absent", "absent_from_init", "absent_from_barrier", "other_key"],
    ),
)
def test_a_wait_for_an_absent_worker_ends_at_the_deadline(
    engine: launchers.Engine, body: str, tmp_path: Path
) -> None:
    ended = job(engine, tmp_path, body)
    told = ended.told[0]
    if body == "other_key" and engine.name not in ("horovod", "byteps"):
        assert [ended.told[rank]["first"]["error"] for rank in range(2)] == ["ConfigError"] * 2
        assert ended.code == 0, ended.output
        return
    assert told["first"]["error"] == "TimeoutError", told
    assert DEADLINE <= told["first"]["seconds"] < DEADLINE + SLACK
    if engine.name != "gloo":
        assert "all workers must call it" in told["first"]["text"]
    if body == "absent":
        if engine.name != "gloo":
            assert "worker 0 has waited 1 s for the sum of key a; all workers must call it" in ended.output
        assert told["later"]["error"] in ("KVStoreError", "TimeoutError", "PeerLostError")
        assert told["reads"]
    if engine.ends_jobs:
        assert ended.code != 0, "MPI has memory of what never completed, so the job cannot end well"


@engines
def test_a_timeout_of_mpi_names_the_absent_workers(engine: launchers.Engine, tmp_path: Path) -> None:
    if engine.name != "mpi":
        pytest.skip("MPI's exchange of call counts")
    ended = job(engine, tmp_path, "some_absent", size=4, deadline=8)
    told = ended.told[0]["first"]
    assert told["error"] == "TimeoutError"
    for text in (told["text"], ended.output):
        assert "for the sum of key a: all workers must call it, and workers 1 and 3 have not, or are" in text
    notice = (
        "worker 0 has waited 4 s for the sum of key a; all workers must call it, and workers 1, 2 and 3 have"
    )
    assert notice in ended.output, "worker 2 comes later"


@engines
def test_a_worker_that_is_always_late_is_called_and_disturbs_none(
    engine: launchers.Engine, tmp_path: Path
) -> None:
    if engine.name != "mpi":
        pytest.skip("MPI's exchange of call counts")
    ended = job(engine, tmp_path, "all_but_one_wait", size=3, deadline=50)
    assert ended.code == 0, ended.output
    for rank in (0, 1):
        assert ended.told[rank]["told"] > 2, "it waited, and said so"
    assert ended.told[2]["words"], "words lay there"
    assert min(ended.told[2]["heard"][:2]) > 2, "and were taken in"


@engines
def test_a_store_that_not_all_create_is_not_created(engine: launchers.Engine, tmp_path: Path) -> None:
    if engine.name != "mpi":
        pytest.skip("a process can create a store without the others")
    first = job(engine, tmp_path, "absent_from_create").told[0]["first"]
    assert first["error"] == "TimeoutError"
    assert "all workers to create the store" in first["text"]


@engines
def test_an_error_that_leaves_the_store_is_the_loss_of_a_peer(
    engine: launchers.Engine, tmp_path: Path
) -> None:
    ended = job(engine, tmp_path, "leaves_by_an_error", deadline=50)
    assert ended.code != 0
    assert "an error of the training loop" in ended.output
    assert ended.seconds < pace.seconds(40), "no worker waits for the deadline"
    if engine.name == "byteps" and not ended.told:
        return  # `kvstore run` has ended the other worker before it could tell
    if not engine.ends_jobs:
        assert ended.told[0]["first"]["error"] == "PeerLostError", ended.told


@engines
def test_after_ctrl_c_in_a_push_the_job_goes_on(engine: launchers.Engine, tmp_path: Path) -> None:
    if engine.name in ("gloo", "nccl"):
        pytest.skip("it cannot be interrupted")
    ended = job(engine, tmp_path, "interrupted", deadline=20)
    assert ended.code == 0, ended.output
    assert ended.told == {rank: {"seen": "KeyboardInterrupt", "works": True} for rank in range(2)}


@engines
def test_one_process_without_a_launcher_is_a_job(engine: launchers.Engine, tmp_path: Path) -> None:
    if engine.name == "gloo":
        pytest.skip("the reference engine takes its place from torchrun's variables")
    ended = job(engine, tmp_path, "alone", size=0)
    assert (ended.code, list(ended.told)) == (0, [0]), ended.output


@engines
def test_the_wrong_launcher_is_an_error_that_names_the_right_one(
    engine: launchers.Engine, tmp_path: Path
) -> None:
    if engine.name in ("gloo", "nccl"):
        pytest.skip("any launcher will do")
    place = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "1"}
    ended = job(engine, tmp_path, "is_refused", size=0, variables=place)
    right = {
        "mpi": "mpiexec -n 4",
        "horovod": "horovodrun -np 4",
        "byteps": "DMLC_NUM_WORKER=4 DMLC_WORKER_ID=... bpslaunch",
    }[engine.name]
    assert "torchrun has started 4 processes" in ended.told[0]["text"]
    assert f"`{right} python train.py`" in ended.told[0]["text"]


@engines
def test_an_mpi_for_one_thread_is_refused(engine: launchers.Engine, tmp_path: Path) -> None:
    if engine.name != "mpi":
        pytest.skip("MPI's own")
    ended = job(engine, tmp_path, "one_thread_only", size=0)
    assert "MPI_THREAD_SERIALIZED" in ended.told[0]["text"], ended.output


@engines
def test_an_error_that_leaves_the_only_worker_disturbs_no_other(
    engine: launchers.Engine, tmp_path: Path
) -> None:
    if engine.name == "gloo":
        pytest.skip("the reference engine takes its place from torchrun's variables")
    ended = job(engine, tmp_path, "alone_with_an_error", size=0)
    assert (ended.code, list(ended.told)) == (0, [0]), ended.output
    assert "ending the MPI job" not in ended.output


@engines
def test_a_fork_is_told_and_does_not_disturb_the_worker(engine: launchers.Engine, tmp_path: Path) -> None:
    if engine.name == "gloo":
        pytest.skip("the reference engine does not look")
    ended = job(engine, tmp_path, "forked", deadline=20)
    assert ended.code == 0, ended.output
    for rank in range(2):
        told = ended.told[rank]
        assert told["works"]
        assert told["seen"].pop("reads")
        assert sorted(told["seen"]) == ["barrier", "create", "init", "push"]
        for seen in told["seen"].values():
            assert f"is a fork of process {told['pid']}" in seen["text"], seen
            assert seen["seconds"] < 5, "it does not wait for the deadline"


@engines
def test_mpi_that_has_no_more_communicators(engine: launchers.Engine, tmp_path: Path) -> None:
    if engine.title != "mpich":
        pytest.skip("MPICH has 2048 of them; Open MPI has as many as memory holds")
    ended = job(engine, tmp_path, "too_many", deadline=20)
    assert ended.code == 0, ended.output
    for told in ended.told.values():
        assert 2 < len(told["told"]) < 9, "as many as a store takes"
        for seen in told["told"]:
            assert seen["error"] == "KVStoreError", seen
            assert "close stores that are not needed" in seen["text"]
        assert told["works"]


@engines
def test_mpi_that_was_finalized_is_an_error_and_no_abort(engine: launchers.Engine, tmp_path: Path) -> None:
    if engine.name != "mpi":
        pytest.skip("MPI's own")
    ended = job(engine, tmp_path, "finalized")
    assert ended.code == 0, ended.output
    for rank in range(2):
        told = ended.told[rank]
        for verb in ("first", "init", "barrier"):
            assert told[verb]["error"] == "KVStoreError"
            assert "MPI was finalized before the store was closed" in told[verb]["text"]
        assert told["create"]["error"] == "ConfigError"
        assert "MPI was finalized in this process" in told["create"]["text"]


@engines
def test_mpi_that_was_not_initialised_is_an_error_and_no_abort(
    engine: launchers.Engine, tmp_path: Path
) -> None:
    if engine.name != "mpi":
        pytest.skip("MPI's own")
    ended = job(engine, tmp_path, "not_initialised", size=0)
    assert ended.code == 0, ended.output
    assert "mpi4py.rc.initialize" in ended.told[0]["text"]
