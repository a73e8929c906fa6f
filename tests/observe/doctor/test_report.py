"""The command as a whole: its output, its exit code, and the secrets it does not print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pace
import pytest
from click.testing import CliRunner
from launched import Job, until

from kvstore.launch.cli import main
from kvstore.observe.doctor import report, table
from kvstore.observe.doctor.checks import CheckFinding, DoctorCheck, ok, warning

LEVELS = ("ok", "warning", "error")
#: Subjects that depend on the machine or on what else is installed, and may be warnings on a healthy one.
MAY_WARN = {
    *("processors", "memory", "shared memory folder", "huge pages", "locked memory", "open files"),
    *("address space", "ptrace", "reads between processes", "instruction set", "host name"),
    *("MPI", "CUDA", "NCCL", "encryption", "variables", "extra cuda", "extra nccl", "kvstore"),
}


def test_a_healthy_machine(tmp_path: Path) -> None:
    job = Job(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", "doctor"],
        cwd=tmp_path,
        env=job.environment,
        capture_output=True,
        text=True,
        timeout=pace.seconds(200),
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    *lines, empty, last = done.stdout.splitlines()
    found = [re.match(r"(ok|warning|error) +(\S.*?)  +(\S.*)", line) for line in lines]
    assert all(found), lines
    levels = {match[2]: match[1] for match in found if match}
    assert {subject for subject, level in levels.items() if level != "ok"} <= MAY_WARN, done.stdout
    assert {f"test {name}" for name in ("local", "device", "shared", "dist_sync")} <= set(levels)
    assert len({match.start(3) for match in found if match}) == 1, "the texts are aligned"
    warnings = list(levels.values()).count("warning")
    assert empty == ""
    assert last.startswith(f"0 errors, {warnings} warning")
    assert "\x1b" not in done.stdout
    assert str(Path.home()) == "/" or str(Path.home()) + "/" not in done.stdout
    until(lambda: not job.alive())


def test_json_without_tests(doctor: Callable[..., Any]) -> None:
    code, found = doctor("--no-tests")
    assert code == 0
    assert all(set(one) == {"subject", "level", "text", "cure"} for one in found.values())
    assert all(
        one["level"] in LEVELS and bool(one["cure"]) >= (one["level"] != "ok") for one in found.values()
    )
    assert not [subject for subject in found if subject.startswith(("test ", "speed "))]


def invoke(monkeypatch: pytest.MonkeyPatch, *checks: DoctorCheck, arguments: tuple[str, ...] = ()) -> Any:
    monkeypatch.setattr(report, "CHECKS", checks)
    return CliRunner().invoke(main, ["doctor", "--no-tests", *arguments])


def broken() -> CheckFinding:
    raise OSError("nobody expected this")


FINE = DoctorCheck("fine", lambda: ok("as it is"))
SLOW = DoctorCheck("slow", lambda: warning("could be faster"), "hurry")
BROKEN = DoctorCheck("broken", broken)


def test_a_broken_check_is_one_line_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    done = invoke(monkeypatch, FINE, BROKEN, SLOW)
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [
        ["ok", "fine"],
        ["error", "broken"],
        ["warning", "slow"],
    ]
    assert "OSError: nobody expected this" in lines[1]
    assert lines[2].endswith("could be faster. Cure: hurry")
    assert lines[-1].startswith("1 error, 1 warning. ")


def test_what_an_exception_tells_is_cleaned(monkeypatch: pytest.MonkeyPatch) -> None:
    def telling() -> CheckFinding:
        raise OSError("the secret-job in /home/me/keys")

    monkeypatch.setenv("KVSTORE_JOB", "secret-job")
    monkeypatch.setenv("HOME", "/home/me")
    check = DoctorCheck("one", telling)
    monkeypatch.setattr(report, "self_test_checks", lambda: [check])
    for name in ("CHECKS", "SPEEDS"):
        monkeypatch.setattr(report, name, (check,))
    done = CliRunner().invoke(main, ["doctor", "--speed"])
    assert done.stdout.count("the $KVSTORE_JOB in ~/keys") == 3
    assert "secret-job" not in done.stdout


def test_warnings_alone_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    done = invoke(monkeypatch, FINE, SLOW, arguments=("--json",))
    assert done.exit_code == 0
    assert [one["level"] for one in json.loads(done.stdout)] == ["ok", "warning"]


def test_broken_self_tests_do_not_break_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "CHECKS", (FINE,))
    monkeypatch.setattr(report, "self_test_checks", lambda: [BROKEN, FINE])
    done = CliRunner().invoke(main, ["doctor", "--json"])
    assert done.exit_code == 1
    found = {one["subject"]: one["text"] for one in json.loads(done.stdout)}
    assert "OSError: nobody expected this" in found["broken"]


def test_an_mpiexec_that_cannot_be_run_is_no_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mpiexec").write_text("no program")
    (tmp_path / "mpiexec").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    subjects = [check.subject for check in table.self_test_checks()]
    assert "test dist_sync" in subjects and "test mpi" not in subjects


def test_with_wrong_settings_nothing_is_tested(doctor: Callable[..., Any]) -> None:
    wrong = "import os; os.environ |= {'KVSTORE_TIMEOUT': 'abc', 'KVSTORE_NUM_THREADS': 'x'}"
    code, found = doctor(before=wrong)
    assert code == 1
    assert [name for name, one in found.items() if one["level"] == "error"] == ["settings"]
    assert found["self-tests"]["text"] == "not run: settings are wrong"
    assert not [name for name in found if name.startswith("test ")]


def test_broken_speeds_do_not_break_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "SPEEDS", (BROKEN, FINE))
    done = invoke(monkeypatch, FINE, arguments=("--speed", "--json"))
    assert done.exit_code == 1
    assert [one["subject"] for one in json.loads(done.stdout)] == ["fine", "broken", "fine"]


def test_values_of_variables_and_the_home_directory_are_hidden() -> None:
    told = "the secret-job of /home/me/keys, not /home/medium, as worker"
    variables = {"KVSTORE_JOB": "secret-job", "KVSTORE_ROLE": "worker", "KVSTORE_SIZE": "2", "OTHER": "as"}
    found = report.without_secrets(CheckFinding("one", "error", told, f"ask {told}"), variables, "/home/me")
    clean = "the $KVSTORE_JOB of ~/keys, not /home/medium, as worker"
    assert (found.text, found.cure) == (clean, f"ask {clean}")
    assert report.without_secrets(CheckFinding("one", "ok", "/dev/shm"), {}, "/").text == "/dev/shm"


def test_no_secret_is_in_a_report_of_a_job_with_keys(tmp_path: Path) -> None:
    secret = "a-text-that-nobody-may-read"
    keys = tmp_path / secret
    keys.write_text(secret)
    keys.chmod(0o644)
    variables = {
        "KVSTORE_JOB": secret,
        "KVSTORE_KEYS_FILE": str(keys),
        "KVSTORE_SCHEDULER": f"tcp://{secret}.invalid:1",
        "KVSTORE_HOST": secret,
        "RANK": secret,
    }
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", "doctor", "--no-tests"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=pace.seconds(200),
        check=False,
    )
    assert done.returncode == 1  # of these variables
    assert "KVSTORE_JOB" in done.stdout
    assert secret not in done.stdout + done.stderr


def test_the_width_is_that_of_the_longest_subject() -> None:
    long = "reads between processes"
    assert report.finding_line(CheckFinding(long, "ok", "text")).index("text") == report.finding_line(
        FINE.run()
    ).index("as it is")


def test_help_says_what_the_exit_code_means() -> None:
    text = " ".join(CliRunner().invoke(main, ["doctor", "--help"]).output.split())
    assert "exits with 0 if there is no error, and with 1 if there is one" in text
