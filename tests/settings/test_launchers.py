"""Each launcher is recognised by the variables that it sets; an incomplete set is an error with advice."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore as kv
from kvstore.settings.launchers import WorkerPlacement, detect_placement

OWN = {
    "KVSTORE_JOB": "5a0e",
    "KVSTORE_RANK": "1",
    "KVSTORE_SIZE": "4",
    "KVSTORE_LOCAL_RANK": "1",
    "KVSTORE_LOCAL_SIZE": "4",
}
# Recorded: torchrun --nproc-per-node 2 --standalone --max-restarts 1
STANDALONE = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "33159",
    "TORCHELASTIC_RUN_ID": "c79453be-a0df-4501-9651-a4d1bfcfc62c",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "1",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_qwshxdq7/c79453be_z8c431tz/attempt_0/1/error.json",
}
# Recorded: torchrun --nproc-per-node 2 --master-port 29777, which names its run "none".
UNNAMED = {
    **STANDALONE,
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29777",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_sioiyevo/none_a11pgsfd/attempt_0/1/error.json",
}
# Recorded: Open MPI 5, -n 2
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-8812@1",
    "PMIX_RANK": "1",
}
# Recorded: MPICH 5, -n 2
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "vm",
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
# Recorded: Intel MPI 2021.18, -n 2
INTEL = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "11",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "I_MPI_HYDRA_UUID": "ab220000-e281-3e60-c660-0600b27f6224",
}
# Recorded: horovodrun -np 2, Horovod 0.28.1
HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_HOSTNAME": "localhost",
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
    "HOROVOD_GLOO_IFACE": "lo",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "41517",
}
# The manual of srun: six tasks on three nodes, the sixth task.
SLURM = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "3,2,1",
}
# The shell of salloc where clusters open it as a step of its own; one process for an allocation of eight.
INTERACTIVE = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "8",
}
BATCH = {"SLURM_JOB_ID": "42", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
ALL = {
    "kvstore": OWN,
    "torchrun": STANDALONE,
    "openmpi": OPENMPI,
    "mpich": INTEL,
    "horovodrun": HOROVODRUN,
    "slurm": SLURM,
}


def numbers(found: WorkerPlacement) -> tuple[int, int, int, int]:
    return found.rank, found.size, found.local_rank, found.local_size


@pytest.mark.parametrize(
    ("environment", "launcher", "expected"),
    [
        (OWN, "kvstore", (1, 4, 1, 4)),
        (STANDALONE, "torchrun", (1, 2, 1, 2)),
        (UNNAMED, "torchrun", (1, 2, 1, 2)),
        (OPENMPI, "openmpi", (1, 2, 1, 2)),
        (MPICH, "mpich", (1, 2, 1, 2)),
        (INTEL, "mpich", (1, 2, 1, 2)),
        (HOROVODRUN, "horovodrun", (1, 2, 1, 2)),
        (SLURM, "slurm", (5, 6, 0, 1)),
        ({}, "none", (0, 1, 0, 1)),
        (INTERACTIVE, "none", (0, 1, 0, 1)),
        (BATCH, "none", (0, 1, 0, 1)),
        ({"RANK": "", "KVSTORE_RANK": ""}, "none", (0, 1, 0, 1)),
        ({"KVSTORE_JOB": "mine"}, "none", (0, 1, 0, 1)),
    ],
)
def test_launchers_are_recognised(
    environment: dict[str, str], launcher: str, expected: tuple[int, int, int, int]
) -> None:
    found = detect_placement(environment)
    assert found.launcher == launcher
    assert numbers(found) == expected
    assert found.job


def test_the_order_of_launchers() -> None:
    merged = {name: value for environment in reversed(ALL.values()) for name, value in environment.items()}
    merged.pop("KVSTORE_JOB")
    for launcher, environment in ALL.items():
        assert detect_placement({**merged, **environment}).launcher == launcher
        for name in environment:
            merged.pop(name, None)


@pytest.mark.parametrize("environment", [*ALL.values(), UNNAMED, MPICH])
def test_all_processes_of_a_job_name_it_alike(environment: dict[str, str]) -> None:
    other = {
        name: "0" if name.endswith(("RANK", "RANKID", "PROCID", "LOCALID", "NODEID")) else value
        for name, value in environment.items()
    }
    if "TORCHELASTIC_ERROR_FILE" in other:
        other["TORCHELASTIC_ERROR_FILE"] = other["TORCHELASTIC_ERROR_FILE"].replace("/1/error", "/0/error")
    assert detect_placement(other).rank != detect_placement(environment).rank
    assert detect_placement(other).job == detect_placement(environment).job


@pytest.mark.parametrize(
    ("environment", "change"),
    [
        (OWN, {"KVSTORE_JOB": "77"}),
        (STANDALONE, {"TORCHELASTIC_RUN_ID": "another"}),
        (STANDALONE, {"TORCHELASTIC_RESTART_COUNT": "1"}),
        (UNNAMED, {"TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_x/none_y/attempt_0/1/error.json"}),
        (UNNAMED, {"MASTER_PORT": "29778"}),
        (OPENMPI, {"PMIX_NAMESPACE": "prterun-vm-8813@1"}),
        (INTEL, {"I_MPI_HYDRA_UUID": "b2220000-fea5-3f60-c660-0600c5c62d75"}),
        (HOROVODRUN, {"HOROVOD_GLOO_RENDEZVOUS_PORT": "41518"}),
        (HOROVODRUN, {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.2"}),
        (SLURM, {"SLURM_STEP_ID": "4"}),
        (SLURM, {"SLURM_JOB_ID": "43"}),
        (SLURM, {"SLURM_RESTART_COUNT": "1"}),
    ],
)
def test_another_job_has_another_name(environment: dict[str, str], change: dict[str, str]) -> None:
    assert detect_placement({**environment, **change}).job != detect_placement(environment).job


def test_over_several_machines_torchrun_s_own_folder_and_count_do_not_matter() -> None:
    wide = {**STANDALONE, "WORLD_SIZE": "4"}
    elsewhere = {
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_ERROR_FILE": "/x/y/z/0/error.json",
        "RANK": "3",
    }
    assert detect_placement({**wide, **elsewhere}).job == detect_placement(wide).job
    assert detect_placement({**wide, "MASTER_PORT": "1"}).job != detect_placement(wide).job


def test_mpich_s_job_is_its_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    first = detect_placement(MPICH).job
    assert str(os.getppid()) in first
    monkeypatch.setattr(os, "getppid", lambda: -1)
    assert detect_placement(MPICH).job != first


def test_two_processes_on_their_own_have_two_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    first = detect_placement({}).job
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert detect_placement({}).job != first


@pytest.mark.parametrize("launcher", ALL)
def test_the_user_may_name_the_job(launcher: str) -> None:
    found = detect_placement({**ALL[launcher], "KVSTORE_JOB": "mine"})
    assert found == dataclasses.replace(detect_placement(ALL[launcher]), job="mine")


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "1"}, ["RANK=1", "WORLD_SIZE", "unset"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK", "unset"]),
        (without(STANDALONE, "LOCAL_RANK"), ["LOCAL_RANK is not", "set it as torchrun does"]),
        (without(OWN, "KVSTORE_JOB"), ["KVSTORE_JOB", "same in all processes"]),
        (without(OWN, "KVSTORE_LOCAL_SIZE"), ["KVSTORE_LOCAL_SIZE is not"]),
        ({**OWN, "KVSTORE_RANK": "4"}, ["KVSTORE_RANK=4", "KVSTORE_SIZE=4", "unset"]),
        ({**OWN, "KVSTORE_SIZE": "0"}, ["KVSTORE_RANK=1", "KVSTORE_SIZE=0"]),
        ({**OWN, "KVSTORE_LOCAL_RANK": "4"}, ["KVSTORE_LOCAL_RANK=4"]),
        ({**OWN, "KVSTORE_LOCAL_SIZE": "5"}, ["KVSTORE_LOCAL_SIZE=5", "KVSTORE_SIZE=4"]),
        ({**OWN, "KVSTORE_RANK": "one"}, ["KVSTORE_RANK='one'", "correct"]),
        ({**OWN, "KVSTORE_RANK": "-1"}, ["KVSTORE_RANK='-1'"]),
        ({**OWN, "KVSTORE_RANK": "\u0661"}, ["KVSTORE_RANK"]),  # a digit, but not to the other processes
        ({**OWN, "KVSTORE_RANK": "1" * 5000}, ["KVSTORE_RANK"]),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, ["KVSTORE_JOB"]),
        (without(OPENMPI, "PMIX_NAMESPACE"), ["PMIX_NAMESPACE", "KVSTORE_JOB"]),
        ({**MPICH, "PMI_SIZE": "4"}, ["I_MPI_HYDRA_UUID", "KVSTORE_JOB"]),
        (without(HOROVODRUN, "HOROVOD_GLOO_RENDEZVOUS_PORT"), ["RENDEZVOUS_ADDR", "KVSTORE_JOB"]),
        (without(HOROVODRUN, "HOROVOD_LOCAL_SIZE"), ["HOROVOD_LOCAL_SIZE is not", "as horovodrun does"]),
        (without(SLURM, "SLURM_JOB_ID"), ["SLURM_JOB_ID"]),
        (without(SLURM, "SLURM_PROCID"), ["SLURM_PROCID is not"]),
        ({**SLURM, "SLURM_STEP_ID": "x"}, ["SLURM_STEP_ID='x'"]),
        ({**SLURM, "SLURM_NODEID": "3"}, ["SLURM_NODEID=3", "3,2,1"]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3(2x)"}, ["SLURM_STEP_TASKS_PER_NODE='3(2x)'"]),
    ],
)
def test_half_of_the_variables_is_an_error(environment: dict[str, str], words: list[str]) -> None:
    with pytest.raises(kv.ConfigError) as raised:
        detect_placement(environment)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("node", "tasks", "expected"),
    [("0", "4(x2),1", 4), ("1", "4(x2),1", 4), ("2", "4(x2),1", 1), ("0", "4", 4), ("1", "1(x999999999)", 1)],
)
def test_slurm_s_list_of_tasks(node: str, tasks: str, expected: int) -> None:
    changed = {"SLURM_NODEID": node, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_STEP_NUM_TASKS": "9"}
    assert detect_placement({**SLURM, **changed}).local_size == expected


def test_a_pmi_rank_from_srun_is_slurm_s() -> None:
    assert detect_placement({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "6", "PMI_FD": "3"}).launcher == "slurm"


VARIABLES = sorted({name for environment in (*ALL.values(), MPICH) for name in environment})
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(["0", "1", "2", "4(x2),1", ""]), st.text(max_size=5)
)


@given(st.dictionaries(st.sampled_from(VARIABLES), VALUES))
def test_anything_else_is_a_placement_or_an_error(environment: dict[str, str]) -> None:
    try:
        found = detect_placement(environment)
    except kv.ConfigError as error:
        assert re.search("[A-Z]{3}", str(error))  # it names a variable
    else:
        assert 0 <= found.local_rank < found.local_size <= found.size
        assert 0 <= found.rank < found.size


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OWN.items():
        monkeypatch.setenv(name, value)
    assert detect_placement() == detect_placement(OWN)
