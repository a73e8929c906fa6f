"""Contexts and keys of a small job."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import paths
import pytest
import zmq

from kvstore.settings.keys import JobKeys
from kvstore.stores.parameter_server.transport.context import ZmqContext

_NAMES = itertools.count()


@pytest.fixture
def context() -> Iterator[Callable[..., ZmqContext]]:
    """Make contexts that are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(keys: JobKeys | None = None, **options: object) -> ZmqContext:
            made = ZmqContext(keys, **options)  # type: ignore[arg-type]
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture(params=["tcp", "ipc"])
def address(request: pytest.FixtureRequest) -> str:
    """Where a router can bind: a free port, and a unix socket without a file."""
    return "tcp://127.0.0.1:0" if request.param == "tcp" else unix_name()


def unix_name() -> str:
    return f"ipc://@kvstore/test/{os.getpid()}/{next(_NAMES)}"


@pytest.fixture(scope="session")
def job_keys() -> dict[str, JobKeys]:
    """Keys of a scheduler, a server, a worker, and of a stranger that knows the public parts."""
    pairs = {name: zmq.curve_keypair() for name in ("scheduler", "server", "worker", "stranger")}
    public = {name: pair[0] for name, pair in pairs.items()}
    allowed = tuple(public[name] for name in ("scheduler", "server", "worker"))
    return {
        name: JobKeys(*pair, public["scheduler"], (public["server"],), allowed)
        for name, pair in pairs.items()
    }


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start functions of procs_wire.py as processes, `start("dealer", address)`, and kill them at the end."""
    started = []
    code = (
        "import sys; sys.path[:0] = sys.argv[1].split(':'); import procs_wire; "
        "getattr(procs_wire, sys.argv[2])(*sys.argv[3:])"
    )

    def run(name: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, paths.IMPORTS, name, *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, text=True, **pipes))  # type: ignore[call-overload]
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait(20)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
