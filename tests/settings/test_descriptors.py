"""Processes that are started without standard streams: no line that a C library prints destroys anything."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pace
import pytest
from launched import until

from kvstore.stores.shared.native.rendezvous import RegionRendezvous

#: The command in a shell: each of these descriptors is closed before Python starts.
CLOSED = ["<&-", ">&-", ">&- 2>&-", "<&- >&- 2>&-"]

#: Begin of a program that is started so: `tell` writes a line to a file, not to a stream.
PRELUDE = """
import ctypes, json, os, signal, sys, traceback
import numpy as np
HERE = os.path.dirname(os.path.abspath(__file__))
def print_in_c():
    libc = ctypes.CDLL(None)
    for _ in range(20):
        libc.puts(b"x" * 4000)
        libc.fflush(None)
        libc.dprintf(2, b"%s", b"y" * 4000)
def standard():
    return [os.readlink(f"/proc/self/fd/{n}") for n in range(3)]
def tell(**found):
    with open(os.path.join(HERE, "told"), "a") as file:
        file.write(json.dumps(found) + chr(10))
def train(name):
    import kvstore as kv
    store = kv.create(name, timeout=60)
    store.init("w", np.zeros(200_000, np.float32))
    out, wrong = np.empty(200_000, np.float32), 0
    for step in range(3):
        print_in_c()
        os.kill(os.getpid(), signal.SIGUSR2)  # writes stacks to stderr
        store.push("w", np.full(200_000, step + 1, np.float32))
        store.pull("w", out=out)
        wrong += int((out != (step + 1) * store.num_workers).sum())
    tell(wrong=wrong, workers=store.num_workers, standard=standard())
    store.close()
def attempt(name):
    try:
        train(name)
    except Exception:
        tell(error=traceback.format_exc())
        raise
"""


def started(
    folder: Path, text: str, closed: str, *arguments: str, **variables: str
) -> subprocess.Popen[bytes]:
    """Start Python on a program, or with `arguments` before its name, without some standard streams."""
    script = folder / "program.py"
    script.write_text(PRELUDE + text)
    command = [sys.executable, *arguments, str(script)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "DMLC_"))}
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    return subprocess.Popen(shell, env={**kept, **variables}, cwd=folder, stderr=subprocess.DEVNULL, **quiet)


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "told").read_text().splitlines()]


def check(folder: Path, workers: int, *processes: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    codes = [process.wait(pace.seconds(100)) for process in processes]
    found = told(folder)
    assert codes == [0] * len(processes), found
    assert [(one["wrong"], one["workers"]) for one in found] == [(0, workers)] * workers
    return found


@pytest.mark.parametrize("closed", CLOSED)
def test_workers_of_one_machine(closed: str, tmp_path: Path) -> None:
    job = secrets.token_hex(8)
    workers = []
    for rank in range(2):
        place = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2, "JOB": job}
        variables = {f"KVSTORE_{name}": str(value) for name, value in place.items()}
        workers.append(started(tmp_path, 'attempt("shared")', closed, **variables))
    for one in check(tmp_path, 2, *workers):
        assert one["standard"] == ["/dev/null"] * 3


@pytest.mark.parametrize("closed", CLOSED[1::2])
@pytest.mark.parametrize(
    "options", [["-n", "2"], ["-n", "2", "-s", "1", "--secure"]], ids=["shared", "servers"]
)
def test_the_command_that_runs_a_job(options: list[str], closed: str, tmp_path: Path) -> None:
    name = "dist_sync" if "-s" in options else "shared"
    arguments = ["-m", "kvstore.launch", "run", *options]
    check(tmp_path, 2, started(tmp_path, f"attempt({name!r})", closed, *arguments))


@pytest.mark.parametrize("closed", CLOSED[-1:])
def test_scripts_that_are_scheduler_server_and_workers(closed: str, tmp_path: Path) -> None:
    """As MXNet's launchers start them: each role is the same script."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    root = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port)}
    job = {**root, "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1"}
    roles = ["scheduler", "server", "worker", "worker"]
    text = 'attempt("dist_sync")'
    check(tmp_path, 2, *[started(tmp_path, text, closed, **job, DMLC_ROLE=role) for role in roles])


SPAWN = """
import kvstore as kv
if __name__ == "__main__":
    kv.spawn(attempt, 2, ("shared",), timeout=60)
"""


@pytest.mark.parametrize("closed", CLOSED[-1:])
def test_workers_that_a_function_starts(closed: str, tmp_path: Path) -> None:
    check(tmp_path, 2, started(tmp_path, SPAWN, closed))


COUNTERS = """
import kvstore as kv
links = {int(n): f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")}
found = {n: os.readlink(link) for n, link in links.items() if os.path.lexists(link)}
tell(ours=[n for n, path in found.items() if path.startswith("/memfd:kvstore")])
"""


@pytest.mark.parametrize("closed", CLOSED)
def test_what_the_import_opens_has_no_number_of_a_stream(closed: str, tmp_path: Path) -> None:
    assert started(tmp_path, COUNTERS, closed).wait(pace.seconds(60)) == 0
    (found,) = told(tmp_path)
    assert found["ours"]
    assert min(found["ours"]) > 2


LATER = """
import kvstore as kv
from kvstore.settings.descriptors import new_memory
kv.create("local").close()
for number in range(3):
    os.close(number)
memory = new_memory("kvstore-test")
tell(memory=memory, wrong=0)
kv.create("local").close()
tell(standard=standard())
"""


def test_a_daemon_that_closes_its_streams_later(tmp_path: Path) -> None:
    """Memory stays clear of their numbers at once, and the next store occupies them."""
    assert started(tmp_path, LATER, "").wait(pace.seconds(60)) == 0
    first, second = told(tmp_path)
    assert first["memory"] > 2
    assert second["standard"] == ["/dev/null"] * 3


SHORT = """
import kvstore as kv
import kvstore.stores.shared.backend, kvstore.stores.local.backend
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = []
def fill():
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
try:
    fill()
    for _ in range(LEFT):
        os.close(held.pop())
    kv.create(NAME, timeout=200)
except kv.KVStoreError as error:
    os.close(held.pop())
    tell(error=type(error).__name__, text=str(error))
"""
WAITING = """
import kvstore as kv
try:
    kv.create("shared", timeout=200)
except kv.KVStoreError as error:
    tell(error=type(error).__name__, text=str(error))
"""
NONE_LEFT = "all of the 64 files that it may have open are open. Close some, or raise the limit"


@pytest.mark.parametrize("name", ["local", "shared"])
def test_a_process_without_descriptors_says_so(name: str, tmp_path: Path) -> None:
    """Before, it got the system's error as it was."""
    text = SHORT.replace("LEFT", "0").replace("NAME", repr(name))
    assert started(tmp_path, text, "").wait(pace.seconds(60)) == 0
    (found,) = told(tmp_path)
    assert found["error"] == "ConfigError"
    assert f"cannot create store {name!r}: {NONE_LEFT}" in found["text"]


@pytest.mark.parametrize("left", [1, 2])
def test_others_are_told_of_a_worker_without_descriptors(left: int, tmp_path: Path) -> None:
    """Before, they waited to their deadline; with two left it said that its rank was taken."""
    job = secrets.token_hex(8)
    place = {"KVSTORE_JOB": job, "KVSTORE_SIZE": "2", "KVSTORE_LOCAL_SIZE": "2"}
    folders = [tmp_path / "waits", tmp_path / "fails"]
    for folder in folders:
        folder.mkdir()
    name = RegionRendezvous(job, "default", 0, 0, 2).name
    waits = started(folders[0], WAITING, "", **place, KVSTORE_RANK="0", KVSTORE_LOCAL_RANK="0")
    until(lambda: f"@kvstore/{name}/0/start" in Path("/proc/net/unix").read_text())
    text = SHORT.replace("LEFT", str(left)).replace("NAME", "'shared'")
    fails = started(folders[1], text, "", **place, KVSTORE_RANK="1", KVSTORE_LOCAL_RANK="1")
    for process in (fails, waits):
        assert process.wait(pace.seconds(100)) == 0
    (found,), (heard,) = told(folders[1]), told(folders[0])
    assert (found["error"], heard["error"]) == ("ConfigError", "KVStoreError")
    assert NONE_LEFT in found["text"]
    assert heard["text"].startswith("worker 1 of 2 cannot take part in this store: [Errno 24]")
