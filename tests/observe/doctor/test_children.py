"""Programs with a deadline: nothing of them is left, and they know nothing of the job around them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pace
import pytest
from launched import MARK, Job, until

from kvstore.observe.doctor import children
from kvstore.observe.doctor.children import ProgramEnd, run

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("begun", flush=True)
time.sleep(600)
"""
#: A program that has started another one, which holds its output.
PARENT = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {STUBBORN!r}])
time.sleep(600)
"""
RUNS = f"""
import sys
from kvstore.observe.doctor.children import run
run([sys.executable, "-c", "open('begun-0', 'w').close()" + {STUBBORN!r}], 600)
"""


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """All that is started from now on is known by a variable."""
    job = Job(tmp_path)
    monkeypatch.setenv(MARK, job.environment[MARK])
    return job


def test_output_and_exit_code() -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    ran = run([sys.executable, "-c", code], 60)
    assert ran == ProgramEnd(3, "out\n", "err\n")
    assert ran.reason == "it ended with exit code 3: err"


def test_a_program_that_ignores_its_deadline_is_killed(marked: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_GRACE", 0.2)
    ran = run([sys.executable, "-c", STUBBORN], 1.0)
    assert ran.code is None
    assert "deadline" in ran.reason
    assert marked.alive() == []


def test_what_holds_the_output_of_a_program_is_not_waited_for(
    marked: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_GRACE", 0.2)
    assert run([sys.executable, "-c", PARENT], 1.0).code is None
    for left in marked.alive():  # of this test: the programs of the command end with their parents
        os.kill(left, 9)
    until(lambda: not marked.alive())


def test_no_place_in_a_job_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = (
        "KVSTORE_RANK",
        "KVSTORE_JOB",
        "KVSTORE_KEYS_FD",
        "RANK",
        "DMLC_ROLE",
        "PMI_RANK",
        "SLURM_STEP_ID",
    )
    for name in (*taken, "KVSTORE_SPIN", "ANOTHER"):
        monkeypatch.setenv(name, "1")
    left = children.alone()
    assert left.keys() & set(taken) == set()
    assert (left["KVSTORE_SPIN"], left["ANOTHER"]) == ("1", "1")


def test_the_program_dies_with_this_process(tmp_path: Path) -> None:
    job = Job(tmp_path)
    parent = job.start("-c", RUNS)
    until(lambda: job.said("begun", 0))
    assert len(job.alive()) == 2
    parent.kill()
    parent.communicate()
    until(lambda: not job.alive())


MAPS = """
import mmap, sys
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    held = mmap.mmap(file.fileno(), 4096)
    sys.stdin.read()  # to the end of its parent
"""


def test_what_an_mpi_leaves_in_shared_memory_is_removed(marked: Job) -> None:
    name = Path(f"/dev/shm/vader_segment_test_{os.getpid()}_0")
    other = name.with_name(f"{name.name}1")
    other.touch()  # of another user
    try:
        command = f"[sys.executable, '-c', {MAPS!r}, {str(name)!r}]"
        start = f"import subprocess, sys; subprocess.Popen({command}, stdin=subprocess.PIPE).wait()"
        assert run([sys.executable, "-c", start], pace.seconds(3.0)).code is None
        assert (name.exists(), other.exists()) == (False, True)
    finally:
        name.unlink(missing_ok=True)
        other.unlink()
    until(lambda: not marked.alive())
