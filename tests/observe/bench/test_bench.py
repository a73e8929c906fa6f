"""The command as a whole: real stores and peers on small keys, its output, and its refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner
from launched import Job

from kvstore.launch.cli import main
from kvstore.observe.bench import command
from kvstore.observe.bench.worker_group import WorkerGroup

NBYTES = 4 * (64 * 30 + 64 + 70_000 * 2)


def measured(bench: Callable[..., Any], *arguments: str) -> dict[str, Any]:
    command = bench("--rounds", "2", "--json", "-", *arguments)
    assert command.finish() == 0, command.shown
    found: dict[str, Any] = json.loads(command.out)
    return found


def test_shared(bench: Callable[..., Any]) -> None:
    found = measured(bench, "--peers", "none")
    settings = {name: found[name] for name in ("store", "workers", "servers", "method", "rounds")}
    assert settings == {"store": "shared", "workers": 2, "servers": 0, "method": "pushpull", "rounds": 2}
    assert found["compression"] is found["optimizer"] is None
    assert found["keys"] == {"name": "keys.txt", "count": 3, "bytes": NBYTES, "dtypes": ["float32"]}
    assert {"processor", "cores", "memory", "system"} == found["machine"].keys()
    assert {"kvstore", "Python", "NumPy"} <= found["versions"].keys()
    assert found["left_out"] == {}
    ours, memcpy = found["peers"]
    assert (ours["peer"], memcpy["peer"]) == ("kvstore", "memcpy")
    assert (ours["ratio"], ours["sums_checked"], memcpy["sums_checked"]) == (1.0, True, False)
    for one in found["peers"]:
        assert len(one["seconds"]) == 2
        assert 0 < one["min"] <= one["median"] <= one["max"]
        assert one["bytes_per_second"] == pytest.approx(NBYTES / one["median"])


def test_the_place_in_a_job_around_it_does_not_matter(bench: Callable[..., Any], job: Job) -> None:
    job.environment |= {"KVSTORE_JOB": "x", "KVSTORE_RANK": "1", "KVSTORE_SIZE": "2", "DMLC_ROLE": "server"}
    assert measured(bench, "--peers", "none")["workers"] == 2


ASYNC = ("--store", "dist_async", "--optimizer", "adam")
MANY = ("--store", "dist_sync", "-s", "2", "-n", "3", "--method", "push-pull", "--dtype", "bfloat16")


@pytest.mark.parametrize(
    ("arguments", "workers", "servers"),
    [
        (MANY, 3, 2),
        (("--compression", "2bit=0.3", "--optimizer", "sgd", "-n", "3"), 3, 0),
        (("--store", "local", "--optimizer", "sgd"), 1, 0),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [
                (("--store", "dist_sync"), 2, 1),
                (ASYNC, 2, 1),
                (("--store", "p3", "--compression", "1bit"), 2, 1),
                (("--compression", "fp16", "--method", "push-pull"), 2, 0),
                (("--dtype", "int8", "-n", "3"), 3, 0),
                (("--store", "LOCAL", "-n", "2"), 2, 0),
                (("--store", "device", "--compression", "2bit"), 1, 0),
            ]
        ),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, tuple) else None,
)
def test_other_stores_and_calls(
    bench: Callable[..., Any], arguments: tuple[str, ...], workers: int, servers: int
) -> None:
    found = measured(bench, "--peers", "none", *arguments)
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert [one["peer"] for one in found["peers"]] == ["kvstore", "memcpy"]
    assert (found["workers"], found["servers"]) == (workers, servers)
    assert found["store"] == given.get("--store", "shared").lower()
    assert found["optimizer"] == given.get("--optimizer")
    assert found["method"] == given.get("--method", "pushpull")
    assert found["keys"]["dtypes"] == [given.get("--dtype", "float32")]
    assert any("does not sum" in note for note in found["notes"]) is (arguments is ASYNC)


def test_mpi(bench: Callable[..., Any], mpi: None) -> None:
    found = measured(bench, "--peers", "mpi", "-n", "3")
    assert [one["peer"] for one in found["peers"]] == ["kvstore", "memcpy", "mpi"]
    assert found["peers"][2]["way"] in ("one buffer", "each key")
    assert found["peers"][2]["sums_checked"]
    assert {"mpi4py", "MPI"} <= found["versions"].keys()


def test_gloo(bench: Callable[..., Any], gloo: None) -> None:
    found = measured(bench, "--peers", "gloo")
    assert [one["peer"] for one in found["peers"]] == ["kvstore", "memcpy", "gloo"]
    assert found["peers"][2]["way"] in ("one buffer", "DDP's buckets", "each key")
    assert "torch" in found["versions"]


def test_a_peer_that_cannot_sum_these_keys(bench: Callable[..., Any], mpi: None) -> None:
    found = measured(bench, "--dtype", "bfloat16")
    assert "MPI does not sum bfloat16" in found["left_out"]["mpi"]
    only = bench("--dtype", "bfloat16", "--peers", "mpi")
    assert only.finish() == 1
    assert "MPI does not sum bfloat16" in only.error


def test_the_table_and_the_files(bench: Callable[..., Any], job: Job) -> None:
    command = bench("--rounds", "2", "--peers", "none", "--json", "found.json")
    assert command.finish() == 0
    lines = command.out.splitlines()
    assert any(line.split()[:2] == ["peer", "median"] for line in lines)
    assert [line.split()[0] for line in lines if line.endswith("1.00")] == ["kvstore"]
    assert "store shared, workers: 2, pushpull" in lines
    assert json.loads((job.folder / "found.json").read_text())["peers"][0]["peer"] == "kvstore"
    assert "measuring" in command.shown  # the bar


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--store", "shard"), "did you mean 'shared'"),
        (("--store", "local", "--compression", "2bit"), "CapabilityError: store 'local' does not compress"),
        (("--compression", "2bit", "--dtype", "float64"), "DTypeError"),
    ],
)
def test_an_error_is_one_line(bench: Callable[..., Any], arguments: tuple[str, ...], words: str) -> None:
    command = bench("--peers", "none", *arguments)
    assert command.finish() == 1
    assert words in command.error
    assert command.shown.count("\n") == 1, command.shown
    assert command.out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--store", "mpi"), "--peers mpi"),
        (("--store", "device", "-n", "2"), "for one process"),
        (("-s", "2"), "--servers"),
        (("--compression", "3bit"), "did you mean '2bit'"),
        (("--compression", "2bit=x"), "2bit"),
        (("--optimizer", "sdg"), "did you mean 'sgd'"),
        (("--peers", "gluu"), "'gluu' is none of auto, none, gloo, mpi"),
        (("--peers", "mpi", "-n", "1"), "one worker"),
        (("--dtype", "float31"), "float31"),
        (("--keys", "no-such-file"), "neither a file nor one of resnet50"),
        (("--json", "no-such-folder/found.json"), "no-such-folder"),
        (("--keys", "llama-1b-shapes", "-n", "64"), "of memory"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "keys").write_text("w 2\n")
    called = ["bench", "--keys", str(tmp_path / "keys"), "--peers", "none", *arguments]
    done = CliRunner().invoke(main, called)
    assert done.exit_code == 1
    (line,) = done.output.splitlines()
    assert line.startswith("Error: ")
    assert words in line


def test_a_wrong_sum_is_an_error() -> None:
    class Group:
        name = "gloo"

        def meet(self, patience: float) -> None:
            """All are there."""

        def note_files(self) -> None:
            """They have none."""

        def ask(self, message: dict[str, Any], patience: float) -> list[dict[str, Any]]:
            return [{"wrong": None, "ways": []}, {"wrong": "the sum of key 'w'", "ways": []}]

    with pytest.raises(command.WrongSum, match="gloo, rank 1: the sum of key 'w' is not what NumPy has"):
        command.checked_ways(cast("WorkerGroup", Group()), {}, 1.0, {})
