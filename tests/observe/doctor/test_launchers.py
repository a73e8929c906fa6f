"""Variables of launchers by their names only; a wrong MPI, and one that does not load."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from observation.checks import finding

from kvstore.observe.doctor import launchers
from kvstore.observe.doctor.checks import CheckFinding
from kvstore.observe.doctor.table import CHECKS

SECRET = "a-text-that-nobody-may-read"
JOB = {"KVSTORE_RANK": "1", "KVSTORE_SIZE": "2", "KVSTORE_LOCAL_RANK": "1", "KVSTORE_LOCAL_SIZE": "2"}


def test_no_launcher() -> None:
    found = finding(launchers.launcher, {})
    assert found.level == "ok"
    assert found.text.startswith("none")


def test_a_launcher_is_named_and_its_job_is_not() -> None:
    found = finding(launchers.launcher, {**JOB, "KVSTORE_JOB": SECRET})
    assert (found.level, "rank 1 of 2" in found.text, "KVSTORE_RANK" in found.text) == ("ok", True, True)
    assert SECRET not in found.text


def test_a_contradiction_is_an_error_without_values() -> None:
    found = finding(launchers.launcher, {"RANK": SECRET, "WORLD_SIZE": "2"})
    assert found.level == "error"
    assert "RANK, WORLD_SIZE are set" in found.text
    incomplete = finding(launchers.launcher, {"RANK": SECRET})
    assert incomplete.cure == "RANK is set and WORLD_SIZE is not: set it as torchrun does, or unset RANK"
    assert "RANK is not an integer" in found.cure
    # The message has a number as it was read, and a name that ends with the name of an empty variable.
    numbers = {"RANK": "007", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "SIZE": ""}
    assert finding(launchers.launcher, numbers).cure.startswith("RANK contradicts WORLD_SIZE: ")
    assert SECRET not in str(found)


def test_a_job_with_servers() -> None:
    assert finding(launchers.parameter_server, {}).level == "ok"
    complete = {"KVSTORE_ROLE": "server", "KVSTORE_SCHEDULER": "tcp://127.0.0.1:4711", "DMLC_NUM_SERVER": "3"}
    found = finding(launchers.parameter_server, complete)
    assert found.level == "ok"
    assert "a server of a job with ? workers and 3 servers, not encrypted" in found.text
    assert "4711" not in found.text
    wrong = finding(launchers.parameter_server, {"KVSTORE_ROLE": SECRET})
    assert (wrong.level, SECRET in str(wrong)) == ("error", False)
    assert "KVSTORE_ROLE" in wrong.text


def test_variables_are_listed_by_name_and_useless_ones_are_a_warning() -> None:
    assert finding(launchers.variables, {"HOME": SECRET}).text == "none of kvstore's is set"
    found = finding(launchers.variables, {"KVSTORE_JOB": SECRET})
    assert (found.level, found.text) == ("ok", "set: KVSTORE_JOB")
    useless = finding(launchers.variables, {"MXNET_KVSTORE_USETREE": SECRET})
    assert useless.level == "warning"
    assert "without effect: MXNET_KVSTORE_USETREE" in useless.text
    assert "trees" in useless.cure
    assert SECRET not in str(useless)


def test_a_misspelt_variable_is_a_warning_that_names_the_right_one() -> None:
    found = finding(
        launchers.variables, {"KV_STORE_NUM_THREADS": SECRET, "KVSTORE_QQQ": SECRET, "KVSTORE_JOB": SECRET}
    )
    assert found.level == "warning"
    assert "without effect: KVSTORE_QQQ, KV_STORE_NUM_THREADS" in found.text
    assert "no such variable, did you mean KVSTORE_NUM_THREADS?" in found.cure
    assert SECRET not in str(found)


def test_wrong_values_are_errors_without_the_values() -> None:
    assert finding(launchers.settings, {"KVSTORE_TIMEOUT": "5"}).level == "ok"
    found = finding(launchers.settings, {"KVSTORE_TIMEOUT": SECRET, "KVSTORE_LOG": SECRET})
    assert found.level == "error"
    assert found.text == "values that cannot be used: KVSTORE_TIMEOUT, KVSTORE_LOG"
    assert "`info` or `debug`" in found.cure
    assert SECRET not in str(found)


OPEN_MPI, MPICH = "Open MPI v5.0.3, package: Debian", "MPICH Version:      4.3.1"
INTEL = "Intel(R) MPI Library 2021.13 for Linux* OS"
ORTE, PRTE, HYDRA = (
    "mpiexec (OpenRTE) 4.1.4",
    "mpirun (Open MPI) 5.0.3",
    "HYDRA build details:\n  Version: 4.3.1",
)


@pytest.mark.parametrize(
    ("library", "command", "level"),
    [
        (OPEN_MPI, ORTE, "ok"),
        (OPEN_MPI, PRTE, "ok"),
        (MPICH, HYDRA, "ok"),
        (INTEL, HYDRA, "ok"),  # the same launcher, and the same variables
        (OPEN_MPI, HYDRA, "warning"),
        (MPICH, ORTE, "warning"),
        (MPICH, "srun 23.11", "ok"),  # nothing is known of it
    ],
)
def test_a_wrong_mpi_is_a_warning(library: str, command: str, level: str) -> None:
    [row] = [one for one in CHECKS if one.function is launchers.mpi]
    found = row._replace(function=lambda: launchers.fitting_mpi(library, command)).run()
    assert found.level == level
    assert ("mpi4py" in found.cure) is (level == "warning")


def with_mpi4py(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> CheckFinding:
    (folder / "mpi4py").mkdir()
    (folder / "mpi4py/__init__.py").write_text("class rc: pass\n")
    (folder / "mpi4py/MPI.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    return finding(launchers.mpi)


def test_an_mpi_that_does_not_load_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "raise RuntimeError('cannot load MPI library')"
    found = with_mpi4py(tmp_path, text, monkeypatch)
    assert found.level == "warning"
    assert "RuntimeError: cannot load MPI library" in found.text
    assert "install an MPI" in found.cure


def test_the_mpi_of_mpi4py_is_compared_with_mpiexec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    mpiexec = tmp_path / "bin/mpiexec"
    mpiexec.write_text(f"#!/bin/sh\necho '{PRTE}'\n")
    mpiexec.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    found = with_mpi4py(tmp_path, f"def Get_library_version(): return {MPICH!r} + chr(0)", monkeypatch)
    assert found.level == "warning"
    assert found.text.startswith("mpi4py uses MPICH Version: 4.3.1, but mpiexec is that of Open MPI")
