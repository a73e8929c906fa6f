"""Timelines of real jobs: every process writes its file, in one time, and a trace of all keeps the rules."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pace
import pytest
from click.testing import CliRunner, Result
from launched import Job, until
from observation.trace_rules import broken, loaded

from kvstore.launch.cli import main
from kvstore.observe.timeline.process_trace import ProcessTrace, read_trace

TRAIN = """
import numpy as np
import kvstore as kv
store = kv.create(os.environ["STORE"])
store.init("w", np.zeros(1000, np.float32))
out = np.empty(1000, np.float32)
for step in range(20):
    if RANK == 1:
        time.sleep(0.01)
    store.pushpull("w", np.ones(1000, np.float32), out=out)
"""

#: A worker that does not fail when another is lost, and ends by a signal only.
WAITS = """
def pushpull(key, value, out):
    try:
        store.pushpull(key, value, out=out)
    except kv.PeerLostError:
        time.sleep(1000)
"""


@pytest.fixture
def folder(job: Job, tmp_path: Path) -> Path:
    job.environment["KVSTORE_TIMELINE"] = str(tmp_path / "out")
    return tmp_path / "out"


def timeline(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["timeline", *map(str, arguments)])


def done(job: Job, kind: str, *arguments: str, text: str = TRAIN) -> None:
    job.environment |= {"STORE": kind, "KVSTORE_DEAD_AFTER": "60"}  # no process is lost, even if busy
    launcher = job.run(*arguments, text=text)
    _, err = launcher.communicate(timeout=pace.seconds(100))
    assert launcher.returncode == 0, err


def files(folder: Path) -> dict[str, ProcessTrace]:
    found = [read_trace(path) for path in folder.glob("*.json")]
    return {f"{file.role} {file.rank}": file for file in found}


def test_all_processes_of_a_job_with_servers_write(job: Job, folder: Path, tmp_path: Path) -> None:
    done(job, "dist_sync", "-n", "2", "-s", "2")
    found = files(folder)
    assert sorted(found) == ["scheduler 0", "server 0", "server 1", "worker 0", "worker 1"]
    assert {file.job for file in found.values()} == {found["scheduler 0"].job}
    names = {name: file.stores[0].slices for name, file in found.items()}
    held = {name: set(slices.values()) for name, slices in names.items()}
    assert held.pop("server 0") | held.pop("server 1") == {"w"}
    assert held == {"scheduler 0": set(), "worker 0": {"w"}, "worker 1": {"w"}}
    result = timeline(folder, "-o", tmp_path / "job.json", "--report")
    assert result.exit_code == 0, result.output
    assert broken(loaded(tmp_path / "job.json")) == {}
    assert "no file of" not in result.output


def test_clocks_are_compared_with_the_schedulers(job: Job, folder: Path) -> None:
    """All processes of this machine have one clock: the measured difference is 0, within its bounds."""
    done(job, "dist_sync", "-n", "2", "-s", "1")
    for name, file in files(folder).items():
        assert bool(file.scheduler) == (name != "scheduler 0")
        for _, offset, uncertainty in file.scheduler:
            assert abs(offset) <= uncertainty


def test_workers_without_servers_write(job: Job, folder: Path, tmp_path: Path) -> None:
    done(job, "shared", "-n", "3")
    found = files(folder)
    assert sorted(found) == ["worker 0", "worker 1", "worker 2"]
    assert {file.size for file in found.values()} == {3}
    result = timeline(folder, "-o", tmp_path / "job.json")
    assert result.exit_code == 0 and result.stdout == "", result.output
    assert broken(loaded(tmp_path / "job.json")) == {}


KILLED = """
import numpy as np
import kvstore as kv
store = kv.create("dist_sync", on_peer_loss="continue")
store.init("w", np.zeros(1000, np.float32))
out = np.empty(1000, np.float32)
for step in range(10):
    if step == 5 and RANK == 1 and not RESTART:
        os.kill(os.getpid(), signal.SIGKILL)
    if step < 5 or RANK != 1:
        store.pushpull("w", np.ones(1000, np.float32), out=out)
        time.sleep(0.01)
"""


def test_of_a_process_that_is_killed_there_is_no_file(job: Job, folder: Path) -> None:
    launcher = job.run("-n", "3", "-s", "1", text=KILLED)
    launcher.communicate(timeout=pace.seconds(100))
    assert launcher.returncode == 128 + signal.SIGKILL
    assert "worker 1" not in files(folder)
    # The launcher has ended servers and scheduler by a signal; they write before they end.
    assert {"scheduler 0", "server 0"} <= set(files(folder))


def test_workers_that_sigterm_ends_write_and_the_missing_are_named(job: Job, folder: Path) -> None:
    """Worker 1 is killed; the launcher ends the other workers while they wait for it."""
    text = TRAIN + "    if step == 9 and RANK == 1: os.kill(os.getpid(), 9)\n"
    job.environment |= {"STORE": "shared", "KVSTORE_TIMEOUT": "200"}
    waiting = text.replace("store.pushpull(", "pushpull(").replace("for step", WAITS + "for step")
    launcher = job.run("-n", "3", text=waiting)
    launcher.communicate(timeout=pace.seconds(100))
    assert launcher.returncode == 137
    assert sorted(files(folder)) == ["worker 0", "worker 2"]
    told = timeline(folder).stdout
    assert "no file of worker 1: killed" in told
    assert "worker 0" in told and "worker 2" in told


@pytest.mark.parametrize("left", [("server 0",), ("scheduler 0",), ("worker 1",)])
def test_the_missing_of_all_roles_are_named(job: Job, folder: Path, left: tuple[str, ...]) -> None:
    done(job, "dist_sync", "-n", "2", "-s", "1")
    for path in folder.glob("*.json"):
        file = read_trace(path)
        if f"{file.role} {file.rank}" not in left:
            path.unlink()
    told = timeline(folder).stdout
    for name, text in (("server 0", "server 0"), ("scheduler 0", "the scheduler")):
        assert (f"no file of {text}: " in told) is (name not in left)
    ranks = [str(rank) for rank in range(2) if f"worker {rank}" not in left]
    assert f"no file of worker {', '.join(ranks)}: " in told


def test_the_report_as_json(job: Job, folder: Path) -> None:
    done(job, "shared", "-n", "2")
    result = timeline(folder, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["notes"][:0] == [] and set(found) == {
        "job", "seconds", "uncertainty", "workers", "servers", "last", "keys", "notes",
    }  # fmt: skip


def test_a_folder_without_timelines_is_one_clean_line(tmp_path: Path) -> None:
    result = timeline(tmp_path)
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {tmp_path} has no timeline of any process: run the job with")
    assert timeline(tmp_path / "missing").exit_code == 1


def test_a_trace_that_cannot_be_written_is_one_clean_line(job: Job, folder: Path, tmp_path: Path) -> None:
    done(job, "shared", "-n", "2")
    result = timeline(folder, "-o", tmp_path / "missing" / "job.json")
    assert result.exit_code == 1
    assert "there is no folder" in result.output


def test_sigusr1_of_the_launcher_has_all_write(job: Job, folder: Path) -> None:
    job.environment["STORE"] = "dist_sync"
    launcher = job.run("-n", "1", "-s", "1", text=TRAIN + "say('here'); wait_for('go', 9)")
    until(lambda: job.said("here", 0))
    launcher.send_signal(signal.SIGUSR1)
    until(lambda: len(list(folder.glob("*-*.json"))) == 3)
    (job.folder / "go-9").touch()
    launcher.communicate(timeout=pace.seconds(100))
    assert launcher.returncode == 0
