"""``kvstore env``: for people and as JSON, in and out of a job, and where variables contradict each other."""

from __future__ import annotations

import json

import pace
import pytest
from click.testing import CliRunner, Result
from launched import Job

from kvstore.launch.cli import main

NONE = dict.fromkeys(("KVSTORE_JOB", "KVSTORE_RANK", "RANK", "WORLD_SIZE", "PMI_RANK", "SLURM_STEP_ID"))
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def env(*arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(main, ["env", *arguments], env={**NONE, **variables})


def test_it_names_the_launcher_the_reason_and_the_others() -> None:
    result = env(**TORCHRUN, PMI_RANK="0")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["launcher", "torchrun"]
    assert "RANK=1 and WORLD_SIZE=2 are set" in result.stdout
    others = lines[lines.index("not chosen") + 1 :]
    assert [line.split()[0] for line in others] == ["kvstore", "openmpi", "mpich", "horovodrun", "slurm"]
    assert "PMI_SIZE is not" in others[2]


def test_json() -> None:
    result = env("--json", **TORCHRUN)
    found = json.loads(result.stdout)
    assert (found["launcher"], found["rank"], found["size"]) == ("torchrun", 1, 2)
    assert {"job", "local_rank", "local_size", "why"} <= set(found)
    assert [set(other) for other in found["others"]] == [{"launcher", "verdict"}] * 5


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_contradiction_is_shown_with_all_that_was_found(arguments: list[str]) -> None:
    result = env(*arguments, RANK="3")
    assert result.exit_code == 1
    assert "RANK=3 is set and WORLD_SIZE is not" in result.stdout
    assert "SLURM_STEP_ID" in result.stdout
    assert not arguments or "error" in json.loads(result.stdout)


def test_outside_of_a_job() -> None:
    assert json.loads(env("--json").stdout)["launcher"] == "none"


def test_in_a_job_of_kvstore_run(job: Job) -> None:
    process = job.run("-n", "2", "--no-prefix", "-m", "kvstore.launch", "env")
    out, _ = process.communicate(timeout=pace.seconds(60))
    assert process.returncode == 0
    lines = [line.split() for line in out.decode().splitlines()]
    assert lines.count(["launcher", "kvstore"]) == 2
    assert sorted(line for line in lines if line[:1] == ["rank"]) == [["rank", "0"], ["rank", "1"]]
    assert len({line[1] for line in lines if line[:1] == ["job"]}) == 1


def test_a_value_that_no_store_takes_is_shown() -> None:
    result = env(KVSTORE_TIMEOUT="abc")
    assert result.exit_code == 1
    assert "KVSTORE_TIMEOUT must be of type float, not 'abc'" in result.stdout
    found = json.loads(env("--json", KVSTORE_TIMEOUT="abc").stdout)
    assert set(found["wrong_settings"]) == {"KVSTORE_TIMEOUT"}


def test_a_misspelt_variable_is_shown_and_is_no_error() -> None:
    result = env(KVSTORE_NUM_THREAD="2", DMLC_NUM_WORKERS="3")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    first = lines.index("unknown variables, without effect")
    assert [line.split(maxsplit=1) for line in lines[first + 1 : first + 3]] == [
        ["DMLC_NUM_WORKERS", "did you mean DMLC_NUM_WORKER?"],
        ["KVSTORE_NUM_THREAD", "did you mean KVSTORE_NUM_THREADS?"],
    ]
    assert set(json.loads(env("--json", KVSTORE_FOO="2").stdout)["unknown_variables"]) == {"KVSTORE_FOO"}
