"""The command line: its output, and its exit on an error."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pace
import pytest
from click.testing import CliRunner, Result

import kvstore
from kvstore.launch.cli import main

COMMAND = [sys.executable, "-c", "from kvstore.launch.cli import main; main()"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_version_is_the_distribution_s() -> None:
    assert invoke("--version").output == f"kvstore {metadata.version('kvstore-train')}\n"
    assert metadata.version("kvstore-train") == kvstore.__version__


def test_help_lists_the_commands() -> None:
    assert "demo" in invoke("-h").output


def test_the_package_is_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstore", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=pace.seconds(60))
    assert done.returncode == 0
    assert done.stdout == invoke("--version").stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_told_of_and_there(shell: str) -> None:
    assert f"{shell}_source" in invoke("--help").stdout
    script = CliRunner().invoke(main, env={"_KVSTORE_COMPLETE": f"{shell}_source"}, prog_name="kvstore")
    assert f"_KVSTORE_COMPLETE={shell}_complete" in script.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--store", "nccl"], "nccl"),
        (["--store", "lokal"], "local"),  # the nearest name
        (["--store", "teststore"], "optimizer"),
        (["--optimizer", "sdg"], "sgd"),
    ],
)
def test_an_error_is_one_clean_line(arguments: list[str], words: str) -> None:
    result = invoke("demo", *arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)  # and no traceback
    (line,) = [line for line in result.output.splitlines() if line.startswith("Error")]
    assert words in line


@pytest.mark.parametrize(
    "arguments", [["--replicas", "0"], ["--epochs", "0"], ["--lr", "0"], ["--seed", "-1"]]
)
def test_options_out_of_range_are_refused(arguments: list[str]) -> None:
    assert invoke("demo", *arguments).exit_code == 2


@pytest.mark.parametrize("module", ["sklearn", "rich"])
def test_a_missing_extra_names_the_command_that_installs_it(module: str, tmp_path: Path) -> None:
    hide = f"import sys; sys.modules[{module!r}] = None; "
    arguments = [*COMMAND[:2], hide + COMMAND[2], "demo"]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=pace.seconds(60))
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert module in done.stderr
    assert "pip install 'kvstore-train[demo]'" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        *(["top", "--interval", seconds] for seconds in ("nan", "inf", "1e10")),
        *(["top", ""], ["timeline", ".", "-o", "-"], ["demo", "--lr", "nan"]),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Error: Invalid value for" in result.output


def test_output_that_cannot_be_written_is_one_clean_line() -> None:
    arguments = [*COMMAND, "doctor", "--no-tests"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            arguments, stdout=full, stderr=subprocess.PIPE, text=True, timeout=pace.seconds(100), check=False
        )
    assert done.returncode == 1
    assert done.stderr == "Error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("option", ["--nproc-per-node", "--machinefile"])
def test_an_option_of_another_launcher_is_a_usage_error(option: str) -> None:
    result = invoke("run", option, "4", "train.py")
    assert result.exit_code == 2
    assert f"No such option '{option}'" in result.output


def test_what_stands_behind_the_program_is_the_program_s(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "run", "-n", "1", "--no-prefix", "echo", "-np", "3", "--rdzv-endpoint"],
        cwd=tmp_path, capture_output=True, text=True, timeout=pace.seconds(60), check=True,
    )  # fmt: skip
    assert done.stdout == "-np 3 --rdzv-endpoint\n"
    result = invoke("run", "-n", "x", "train.py", "-np", "3")
    assert "Invalid value for '-n' / '--workers': 'x'" in result.output


def test_the_number_of_workers_has_no_default() -> None:
    result = invoke("run", "train.py")
    assert result.exit_code == 2
    assert "Missing option '-n' / '--workers'" in result.output


@pytest.mark.parametrize(
    ("command", "options"),
    [("server", ("--scheduler",)), ("scheduler", ("-n 2 -s 1", "KVSTORE_NUM_WORKERS"))],
)
def test_a_command_names_its_options_and_no_variable_that_is_not_set(
    command: str, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KVSTORE_ROLE", "DMLC_ROLE", "KVSTORE_SCHEDULER", "DMLC_PS_ROOT_URI"):
        monkeypatch.delenv(name, raising=False)
    result = invoke(command)
    assert result.exit_code == 1
    assert f"`kvstore {command}`" in result.output
    assert "KVSTORE_ROLE" not in result.output
    assert all(option in result.output for option in options)
