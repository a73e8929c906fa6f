"""The name of a job is the same text in all of its processes."""

from __future__ import annotations

import os

import pytest

from kvstore.settings import launchers, roles
from kvstore.settings.jobs import job_name

RUN = {"KVSTORE_RANK": "0", "KVSTORE_SIZE": "2", "KVSTORE_LOCAL_RANK": "0", "KVSTORE_LOCAL_SIZE": "2"}
SERVERS = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "4711"}


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("KVSTORE_", "DMLC_", "OMPI_", "PMI_", "SLURM_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({**RUN, "KVSTORE_JOB": "mine"}, "mine"),
        ({**RUN, **SERVERS, "KVSTORE_JOB": "mine"}, "mine"),
        (SERVERS, "tcp://127.0.0.1:4711"),
        ({**SERVERS, "RANK": "0", "WORLD_SIZE": "1"}, "tcp://127.0.0.1:4711"),
        ({"KVSTORE_SCHEDULER": "ipc://@name"}, "ipc://@name"),
        (RUN, ""),  # the store that needs the name reports that it is missing
        ({"DMLC_PS_ROOT_URI": "127.0.0.1"}, ""),
    ],
)
def test_the_job_is_named_as_the_stores_name_it(
    variables: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert job_name() == name


def test_a_process_without_a_launcher_is_a_job_of_its_own() -> None:
    assert job_name() == f"none:{os.getpid()}"


def test_servers_and_workers_have_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in SERVERS.items():
        monkeypatch.setenv(variable, value)
    names = set()
    for role in ("worker", "server"):
        monkeypatch.setenv("DMLC_ROLE", role)
        found = roles.find()
        assert found is not None
        names |= {job_name(), found.job}
    assert names == {"tcp://127.0.0.1:4711"}


def test_a_worker_alone_is_a_job_of_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {**RUN, "KVSTORE_JOB": "mine"}.items():
        monkeypatch.setenv(variable, value)
    assert job_name() == launchers.detect_placement().job
