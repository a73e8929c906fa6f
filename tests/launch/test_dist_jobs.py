"""Jobs with real servers: however they are started, the workers get the same sums and everything ends."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pace
import pytest
from jobs import names_in_memory
from launched import Job, until
from nightly import nightly_unless

TRAIN = """
import os, sys, time
import numpy as np
import kvstore as kv

store = kv.create("dist_sync")
out = np.empty(3, np.float32)
store.init("w", np.zeros(3, np.float32))
for step in range(4):
    store.pushpull("w", np.full(3, store.rank + 1, np.float32), out=out)
print(store.rank, store.num_workers, *out, flush=True)
"""


def sums(output: bytes, workers: int, mark: bool = True) -> list[bytes]:
    """The output of the workers."""
    total = workers * (workers + 1) / 2
    lines = (b"%d %d %.1f %.1f %.1f" % (rank, workers, total, total, total) for rank in range(workers))
    return [b"[%d] %s" % (rank, line) if mark else line for rank, line in enumerate(lines)]


def finish(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    out, err = process.communicate(timeout=pace.seconds(100))
    return process.returncode, out, err


@pytest.fixture
def script(job: Job) -> str:
    (job.folder / "train.py").write_text(TRAIN)
    return "train.py"


@pytest.mark.parametrize(
    "options",
    nightly_unless(
        lambda options: options[1] == "3" or len(options) > 6,
        [
            ["-n", "1", "-s", "1"],
            ["-n", "3", "-s", "2"],
            ["-n", "2", "-s", "2", "--transport", "ipc"],
            ["-n", "2", "-s", "2", "--secure"],
            ["-n", "2", "-s", "1", "--transport", "ipc", "--secure"],
        ],
    ),
    ids=" ".join,
)
def test_one_command_starts_and_ends_all(job: Job, script: str, options: list[str]) -> None:
    names = names_in_memory()
    job.environment["TMPDIR"] = str(job.folder / "tmp")
    (job.folder / "tmp").mkdir()
    code, out, err = finish(job.run(*options, script))
    assert (code, err) == (0, b"")
    assert sorted(out.splitlines()) == sums(out, int(options[1]))
    assert job.alive() == []
    assert os.listdir(job.folder / "tmp") == []
    assert names_in_memory() <= names


def test_two_jobs_on_one_machine_do_not_meet(job: Job, script: str) -> None:
    processes = [job.run("-n", str(workers), "-s", "1", script) for workers in (1, 2)]
    for workers, process in zip((1, 2), processes, strict=True):
        code, out, err = finish(process)
        assert (code, err) == (0, b"")
        assert sorted(out.splitlines()) == sums(out, workers)


def test_workers_without_such_a_store_need_no_servers_and_are_told_so(job: Job) -> None:
    code, out, err = finish(job.run("-n", "2", "-s", "1", text="print('hello')"))
    assert (code, sorted(out.splitlines())) == (0, [b"[0] hello", b"[1] hello"])
    (line,) = err.splitlines()
    assert line.startswith(b"kvstore run: no worker has created a store on the servers")
    assert b"create 'dist_sync'" in line


def test_a_failure_is_not_followed_by_what_servers_were_for(job: Job) -> None:
    code, _, err = finish(job.run("-n", "1", "-s", "1", text="sys.exit(3)"))
    assert code == 3
    assert b"no worker has created" not in err


APART = """
import kvstore as kv
for _ in range(2):
    kv.create({!r}{}).close()
"""


@pytest.mark.parametrize(
    "options",
    nightly_unless(lambda options: len(options) == 2, [["-n", "2"], ["-n", "2", "-s", "1"]]),
    ids=" ".join,
)
def test_a_store_apart_from_the_other_workers_warns_once(job: Job, options: list[str]) -> None:
    code, _, err = finish(job.run(*options, text=APART.format("device", "")))
    assert code == 0
    for rank in range(2):
        (line,) = [line for line in err.splitlines() if line.startswith(b"[%d]" % rank)]
        assert b"rank %d of 2 trains separately: kvstore has started 2 processes" % rank in line
        for word in (b"store 'device' has 1 of them", b"'shared' or 'dist_sync'", b"processes=1"):
            assert word in line


@pytest.mark.parametrize(
    ("size", "name", "option"),
    nightly_unless(
        lambda size, name, _: size == "2" and name != "local",
        [("2", "device", ", processes=1"), ("2", "shared", ""), ("2", "local", ""), ("1", "device", "")],
    ),
)
def test_a_store_of_all_workers_or_one_that_is_meant_to_be_apart_does_not_warn(
    job: Job, size: str, name: str, option: str
) -> None:
    assert finish(job.run("-n", size, text=APART.format(name, option)))[::2] == (0, b"")


def test_a_worker_that_ends_first_leaves_the_servers_to_the_others(job: Job) -> None:
    text = TRAIN + "\nif store.rank:\n    time.sleep(1)\n    store.pull('w', out=out)\n    print('pulled')\n"
    (job.folder / "train.py").write_text(text)
    code, out, err = finish(job.run("-n", "2", "-s", "1", "train.py"))
    assert (code, err) == (0, b"")
    assert b"[1] pulled" in out


def test_a_failing_worker_ends_the_job(job: Job) -> None:
    (job.folder / "train.py").write_text(TRAIN + "\nif store.rank == 1: sys.exit(5)\nstore.barrier()\n")
    code, _, err = finish(job.run("-n", "2", "-s", "2", "train.py"))
    assert code == 5
    assert b"kvstore run: rank 1 failed with exit code 5" in err
    assert job.alive() == []


def test_servers_import_what_the_workers_use(job: Job) -> None:
    (job.folder / "sub").mkdir()
    (job.folder / "sub" / "own_rules.py").write_text(
        """
import kvstore as kv

@kv.optimizer.register
class Halving(kv.optimizer.Optimizer):
    def create_state(self, index, weight):
        return None
    def update(self, index, weight, grad, state):
        weight[:] = weight / 2 + grad
"""
    )
    text = """
import numpy as np
import own_rules
import kvstore as kv

store = kv.create("dist_sync")
store.init("w", np.full(3, 8, np.float32))
store.set_optimizer(own_rules.Halving())
out = np.empty(3, np.float32)
store.pushpull("w", np.ones(3, np.float32), out=out)
print(*out)
"""
    (job.folder / "sub" / "train.py").write_text(text)
    code, out, err = finish(job.run("-n", "2", "-s", "1", "--import", "own_rules", "sub/train.py"))
    assert (code, err) == (0, b"")
    assert sorted(out.splitlines()) == [b"[0] 6.0 6.0 6.0", b"[1] 6.0 6.0 6.0"]


RULES = {
    "optimizer": """
@kv.optimizer.register
class Third(kv.optimizer.SGD):
    pass
chosen = Third()
""",
    "schedule": """
@kv.optimizer.lr_scheduler.register
class Third(kv.lr_scheduler.FactorScheduler):
    pass
chosen = kv.optimizer.SGD(lr_scheduler=Third(step=2))
""",
    "argument": """
import os
SERVER = os.environ["KVSTORE_ROLE"] == "server"
@kv.optimizer.register
class Third(kv.optimizer.SGD):
    def __init__(self, **kwargs):
        if SERVER:
            raise OSError("Third cannot be made here")
        super().__init__(**kwargs)
chosen = None if SERVER else Third()
""",
}


@pytest.mark.parametrize("kind", RULES)
def test_a_rule_that_a_server_cannot_make_is_told_as_the_server_s(job: Job, kind: str) -> None:
    """The class is in the script, which servers do not import; or in a module, and its constructor fails."""
    own = f"import kvstore as kv\n{RULES[kind]}"
    (job.folder / "own.py").write_text(own)
    text = f"""
import numpy as np
{"from own import *" if kind == "argument" else own}
import kvstore as kv
store = kv.create("dist_sync")
store.init("w", np.zeros(3, np.float32))
try:
    store.set_optimizer(chosen)
except kv.errors.ConfigError as error:
    print(error)
store.push("w", np.ones(3, np.float32))  # the store is as it was
out = np.empty(3, np.float32)
store.pull("w", out=out)
print(*out)
"""
    (job.folder / "train.py").write_text(text)
    imports = ["--import", "own"] if kind == "argument" else []
    code, out, _ = finish(job.run("-n", "2", "-s", "1", "--no-prefix", *imports, "train.py"))
    assert code == 0
    *told, one, other = sorted(out.decode().splitlines(), reverse=True)
    assert one == other == "2.0 2.0 2.0"
    assert len(told) == 2
    for line in told:
        assert line.startswith("server 0: ")
        assert "Third" in line or "third" in line
        assert "--import" in line


# -------------------------------------------------------------------------------------------------- by hand


class Parts:
    """Processes that are started one by one."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        process = self.job.start(*arguments, env={**self.job.environment, **variables})
        self.processes.append(process)
        return process

    def command(self, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        return self.start("-m", "kvstore.launch", *arguments, **variables)


@pytest.fixture
def parts(job: Job) -> Iterator[Parts]:
    made = Parts(job)
    yield made
    for process in made.processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("keys", nightly_unless(lambda keys: keys, [True, False]))
def test_scheduler_servers_and_workers_one_by_one(parts: Parts, script: str, keys: bool) -> None:
    if keys:
        assert parts.command("keys", "-n", "2", "-s", "2", "keys").wait(60) == 0
    own = {name: {"KVSTORE_KEYS_FILE": f"keys/{name}.json"} if keys else {} for name in NAMES}
    scheduler = parts.command("scheduler", "-n", "2", "-s", "2", **own["scheduler"])
    assert scheduler.stdout is not None
    address = scheduler.stdout.readline().decode().strip()
    assert address.startswith("tcp://127.0.0.1:")
    servers = [parts.command("server", "--scheduler", address, **own[f"server-{rank}"]) for rank in (0, 1)]
    workers = [
        parts.start(script, KVSTORE_SCHEDULER=address, DMLC_WORKER_ID=str(rank), **own[f"worker-{rank}"])
        for rank in (0, 1)
    ]
    outputs = [finish(worker) for worker in workers]
    assert [(code, err) for code, _, err in outputs] == [(0, b"")] * 2
    assert [out.strip() for _, out, _ in outputs] == sums(b"", 2, mark=False)
    for process in (scheduler, *servers):
        code, _, err = finish(process)
        notices = [line for line in err.splitlines() if not line.startswith(b"the job has waited ")]
        assert (code, notices) == (0, [])  # on a slow machine it waits for those that start


NAMES = ["scheduler", "server-0", "server-1", "worker-0", "worker-1"]


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("local", nightly_unless(lambda local: local == "0", ["0", "1"]))
def test_one_script_for_all_roles_as_with_mxnet(parts: Parts, script: str, local: str) -> None:
    variables = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "2",
        "DMLC_LOCAL": local,
    }
    roles = ["worker", "server", "worker", "scheduler", "server"]
    processes = [parts.start(script, **variables, DMLC_ROLE=role) for role in roles]
    outputs = [finish(process) for process in processes]
    assert [(code, err) for code, _, err in outputs] == [(0, b"")] * 5
    lines = sorted(out.strip() for _, out, _ in outputs)
    assert lines == [b"", b"", b"", *sums(b"", 2, mark=False)]


def test_a_worker_may_come_long_before_the_others(parts: Parts, script: str) -> None:
    variables = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NUM_WORKER": "1",
        "DMLC_NUM_SERVER": "1",
    }
    worker = parts.start(script, **variables, DMLC_ROLE="worker")
    time.sleep(1.5)
    server = parts.start(script, **variables, DMLC_ROLE="server")
    time.sleep(0.5)
    scheduler = parts.start(script, **variables, DMLC_ROLE="scheduler")
    assert finish(worker) == (0, b"0 1 1.0 1.0 1.0\n", b"")
    assert [finish(process)[0] for process in (server, scheduler)] == [0, 0]


def test_a_port_that_is_taken_is_named(parts: Parts) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, err = finish(parts.command("scheduler", "-n", "1", "-s", "1", "--port", port))
    assert code == 1
    assert err.startswith(b"Error: ")
    assert err.count(b"\n") == 1
    assert port.encode() in err
    assert b"with --port" in err


def test_without_a_scheduler_a_worker_says_so_in_time(parts: Parts, script: str) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    worker = parts.start(script, KVSTORE_SCHEDULER=address, KVSTORE_TIMEOUT="2")
    code, _, err = finish(worker)
    assert code == 1
    last = err.splitlines()[-1]
    assert re.match(rb"kvstore\.errors\.TimeoutError: this process has waited \d+ s for ", last)


def test_the_launcher_s_servers_are_gone_when_it_is_killed(job: Job, script: str) -> None:
    (job.folder / script).write_text(TRAIN + "\nprint('there', flush=True)\ntime.sleep(1000)\n")
    with open(job.folder / "out", "wb") as out:
        process = job.run("-n", "2", "-s", "2", script, stdout=out)
    until(lambda: (job.folder / "out").read_bytes().count(b"there") == 2)
    process.kill()
    process.communicate(timeout=pace.seconds(60))
    until(lambda: not job.alive())


@pytest.mark.parametrize(
    "folder", nightly_unless(lambda folder: folder == "file/shots", ["file", "file/shots", "/proc/nothing"])
)
def test_a_folder_for_snapshots_that_cannot_be_written_ends_the_job_at_its_start(
    job: Job, script: str, folder: str
) -> None:
    (job.folder / "file").touch()
    code, out, err = finish(job.run("-n", "1", "-s", "1", "--snapshot", folder, script))
    told = err.decode().splitlines()
    assert (code, out) == (1, b"")
    assert "kvstore run: server 0 failed with exit code 1" in told[-2]
    text = rf"Error: server 0 cannot write snapshots to \S*{folder}/server-0: (Not|No) .*--snapshot"
    assert re.match(text, told[-1])
    assert b"Traceback" not in err


def test_a_server_that_is_killed_starts_again_and_the_job_goes_on(job: Job) -> None:
    text = """
import time
from pathlib import Path
import numpy as np
import kvstore as kv

store = kv.create("dist_sync")
store.init("w", np.zeros(3, np.float32))
out = np.empty(3, np.float32)
for step in range(8):
    store.pushpull("w", np.full(3, step + store.rank, np.float32), out=out)
    if step == 3 and store.rank == 0:
        Path("half").touch()
    time.sleep(0.3)
print(*out)
"""
    (job.folder / "train.py").write_text(text)
    options = [
        "-n",
        "2",
        "-s",
        "1",
        "--snapshot",
        "shots",
        "--snapshot-interval",
        "0.2",
        "--server-restarts",
        "1",
    ]
    process = job.run(*options, "train.py")
    until(lambda: (job.folder / "half").exists())
    (server,) = [pid for pid in job.alive() if b"\0server\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(server, 9)
    code, out, err = finish(process)
    assert b"server 0 was ended by SIGKILL" in err
    assert b"restarting it (1 of 1)" in err
    assert code == 0, err.decode()
    assert sorted(out.splitlines()) == [b"[0] 15.0 15.0 15.0", b"[1] 15.0 15.0 15.0"]


def test_the_demo_ends_with_the_weights_of_as_many_processes_without_servers(job: Job) -> None:
    demo = ["-m", "kvstore.launch", "demo", "--epochs", "1"]
    alone = finish(job.start(*demo, "-n", "2"))[1].decode()
    options = ["--store", "dist_sync", "--replicas", "1", "--epochs", "1"]
    process = job.run("-n", "2", "-s", "2", "--no-prefix", "-m", "kvstore.launch", "demo", *options)
    served = finish(process)[1].decode()
    first, second = (re.search(r"weights +([0-9a-f]{12})\n", text) for text in (alone, served))
    assert first is not None, alone
    assert second is not None, served
    assert first[1] == second[1]


def test_all_listen_at_ports_of_the_range(job: Job) -> None:
    first = 21_000 + os.getpid() % 20_000
    job.environment["KVSTORE_PORTS"] = f"{first}-{first + 40}"
    text = f"""
import json, os
from pathlib import Path
store = kv.create("dist_sync")
listening = []
for table in ("tcp", "tcp6"):
    for line in Path("/proc/net/" + table).read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A":
            listening.append((int(words[1].rpartition(":")[2], 16), words[9]))
mine = set()
for process in filter(str.isdecimal, os.listdir("/proc")):
    try:
        if {job.environment["KVSTORE_TEST_MARK"]!r} not in Path("/proc", process, "environ").read_text():
            continue
        links = [os.readlink(link) for link in Path("/proc", process, "fd").iterdir()]
    except OSError:
        continue
    mine |= {{port for port, inode in listening if f"socket:[{{inode}}]" in links}}
if store.rank == 0:
    print(*sorted(mine), os.environ["MASTER_PORT"])
store.barrier()
"""
    (job.folder / "looks.py").write_text(f"import kvstore as kv\n{text}")
    code, out, err = finish(job.run("-n", "2", "-s", "2", "--no-prefix", "looks.py"))
    assert (code, err) == (0, b"")
    ports = [int(word) for word in out.split()]
    assert len(set(ports)) == len(ports) >= 6  # each server two, the scheduler, MASTER_PORT
    assert set(ports) <= set(range(first, first + 41))
