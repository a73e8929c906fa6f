"""Process limits that leave too little for a part of a job: the start fails, and names the process."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pace
import pytest
from launched import Job, gone_after

import kvstore as kv
from kvstore.settings.roles import Roles
from kvstore.stores.parameter_server import role_process
from kvstore.stores.parameter_server.transport.process_limits import resource_shortage

WORKER = """
import numpy as np
import kvstore as kv
held = [os.dup(0) for _ in range({held})]
with kv.create("dist_sync") as store:
    store.init("w", np.zeros(3, np.float32))
"""
THREADS = """
import resource
from pathlib import Path
from kvstore.stores.parameter_server.transport.process_limits import check_threads
check_threads(4)
used, more = int(Path("/proc/self/statm").read_text().split()[0]) * 4096, 1 << 20
resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))
check_threads(400)
"""


SERVER = Roles("server", 3, 1, 1, "job", "tcp://127.0.0.1:9", "127.0.0.1", 0, None, False)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (MemoryError(), "too little memory (MemoryError): raise the limit on addresses (ulimit -v)"),
        (OSError(errno.ENOMEM, "no"), "too little memory"),
        (ImportError("x.so: failed to map segment from shared object"), "too little memory (x.so: failed"),
        (caused(ImportError("numpy is broken"), MemoryError("here")), "too little memory (here)"),
        (RuntimeError("can't start new thread"), "too few threads"),
        (OSError(errno.EMFILE, "no"), "too few open files"),
    ],
)
def test_what_the_system_does_not_give_is_named_with_its_limit(
    error: Exception, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise error

    assert word in str(resource_shortage(error))
    monkeypatch.setattr(role_process, "begin", fail)
    with pytest.raises(kv.KVStoreError if not isinstance(error, ImportError) else ImportError) as caught:
        role_process.serve_server(SERVER)
    assert isinstance(error, ImportError) or f"server 3 has {word}" in str(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("no"), OSError(errno.EPIPE, "no"), ImportError("no")])
def test_other_errors_stay_as_they_are(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise error

    assert resource_shortage(error) is None
    monkeypatch.setattr(role_process, "begin", fail)
    with pytest.raises(type(error)) as caught:
        role_process.serve_server(SERVER)
    assert caught.value is error


def test_a_server_without_address_space_says_so_in_one_line() -> None:
    """It ended with a traceback of the thread that could not be started, for instance."""
    command = [sys.executable, "-m", "kvstore", "server", "--rank", "0", "--scheduler", "tcp://127.0.0.1:9"]
    variables = {**os.environ, "KVSTORE_TIMEOUT": "1"}
    for megabytes in (160, 240, 320, 400, 480):

        def limit(most: int = megabytes << 20) -> None:
            resource.setrlimit(resource.RLIMIT_AS, (most, most))

        done = subprocess.run(command, env=variables, preexec_fn=limit, capture_output=True, text=True)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert done.stderr.splitlines()[-1].startswith("Error: "), done.stderr


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with gone_after(tmp_path) as made:
        yield made


def failure(job: Job, files: int, held: int = 0) -> str:
    """Run a job of two workers and two servers that may open so many files; return its output."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    job.environment["KVSTORE_TIMEOUT"] = pace.variable(200)
    text = WORKER.format(held=held)
    process = job.run("-n", "2", "-s", "2", text=text, preexec_fn=limit)
    _, err = process.communicate(timeout=pace.seconds(60))
    assert process.returncode == 1
    return err.decode()


def test_servers_and_scheduler_say_how_many_files_they_need(job: Job) -> None:
    told = failure(job, 40).splitlines()[-1]
    assert told.startswith(("Error: server 0 may have 40 open files", "Error: server 1 may have 40 open"))
    assert "more, for 2 workers. Raise the limit where the job is started: ulimit -n 1024" in told
    assert "Error: the scheduler may have 24 open files" in failure(job, 24)


def test_a_worker_counts_what_it_has_open(job: Job) -> None:
    told = failure(job, 300, held=270).splitlines()[-1]
    assert "ConfigError: worker " in told
    assert "more, for 2 servers" in told


def test_a_process_that_can_start_no_threads_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADS],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=pace.seconds(60),
        check=False,
    )
    assert "of the 400 threads that its connections need" in done.stderr.splitlines()[-1], done.stderr
