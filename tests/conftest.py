"""Fixtures that all tests may use, and how hypothesis runs here."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pace
import paths
import pytest
import servers
from hypothesis import HealthCheck, settings
from tested_store import STORES

import kvstore as kv
from kvstore.kernels import cpu

# A process that imports NumPy starts a thread for each core, which spins 30 ms for work that no test has.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Nothing here measures time: a slow machine must not fail a test.
settings.register_profile(
    "house", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("house")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "in_reach: not for stores whose weights are on servers")
    for number in (signal.SIGINT, signal.SIGHUP):  # under nohup, in the background: all that is started would
        if signal.getsignal(number) is signal.SIG_IGN:  # ignore them, too; handlers are not inherited
            signal.signal(number, lambda *_: None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the operations that a kind of store does not have; test_dist.py tests its errors."""
    out = [_on_servers(item) and item.get_closest_marker("in_reach") is not None for item in items]
    if any(out):
        config.hook.pytest_deselected(items=list(itertools.compress(items, out)))
        items[:] = [item for item, is_out in zip(items, out, strict=True) if not is_out]


def pytest_collection_finish() -> None:
    """Spare the garbage collector ten thousand tests: it would look at them again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Spare it also the objects of a file of tests: a collection took a second after the compiler's."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def _on_servers(item: pytest.Item) -> bool:
    made = getattr(item, "callspec", None)
    return made is not None and ":" in str(made.params.get("store_name", ""))


@pytest.fixture(params=STORES)
def store_name(request: pytest.FixtureRequest, on_servers: Callable[[str], str]) -> str:
    return on_servers(str(request.param))


@pytest.fixture
def on_servers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Make a name of STORES fit for `kv.create`: its servers run, and the environment says where."""

    def prepare(entry: str) -> str:
        name, _, count = entry.partition(":")
        if count:
            variables = request.getfixturevalue("one_server" if count == "1" else "two_servers")
            for variable, value in variables.items():
                monkeypatch.setenv(variable, value)
        return name

    return prepare


@pytest.fixture(scope="session")
def one_server() -> Iterator[Mapping[str, str]]:
    """Scheduler and server of a job of one worker, this process; the variables of its environment."""
    with servers.service(1) as variables:
        yield variables


@pytest.fixture(scope="session")
def two_servers() -> Iterator[Mapping[str, str]]:
    with servers.service(2) as variables:
        yield variables


@pytest.fixture
def store(store_name: str) -> Iterator[kv.KVStore]:
    with kv.create(store_name) as made:
        yield made


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Any]:
    """Read a file of tests/data: `golden("aggregate.npz")["special_sum"]`."""

    def read(name: str) -> Any:
        path = paths.DATA / name
        return json.loads(path.read_text()) if path.suffix == ".json" else np.load(path)

    return read


@pytest.fixture
def body() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a function of procs.py in a process of its own; it must end well."""

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        code = f"import sys; sys.path[:0] = sys.argv[1].split(':'); import procs; procs.{name}(*sys.argv[2:])"
        command = [sys.executable, "-c", code, paths.IMPORTS, *arguments]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=pace.seconds(100), check=False
        )
        assert ended.returncode == 0, ended.stderr
        return ended

    return run


@pytest.fixture(scope="session")
def nursery() -> Iterator[jobs.Nursery]:
    with jobs.nursery() as made:
        yield made


@pytest.fixture
def job(nursery: jobs.Nursery, tmp_path: Path) -> Iterator[Callable[..., jobs.Job]]:
    """Make a job of so many processes: `job(2).start_all("procs_shared", "sums")`."""
    with contextlib.ExitStack() as stack:

        def make(size: int, name: str = "") -> jobs.Job:
            made = jobs.Job(nursery, tmp_path, size, name)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def served(nursery: jobs.Nursery, tmp_path: Path) -> Iterator[Callable[..., servers.ServedJob]]:
    """Make a job of so many workers and servers: `served(2, 1).start_all("procs_shared", "sums")`."""
    with contextlib.ExitStack() as stack:

        def make(workers: int, count: int = 1, secure: bool = False, **variables: str) -> servers.ServedJob:
            made = servers.ServedJob(nursery, tmp_path, workers, count, secure, **variables)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def kernel_settings() -> Iterator[None]:
    """Put level, threads and stream size back after a test that turns these knobs."""
    level, threads, stream = cpu.level(), cpu.threads(), cpu.stream_bytes()
    yield
    cpu.use_level(level)
    cpu.set_threads(threads)
    cpu.set_stream_bytes(stream)


@pytest.fixture(autouse=True)
def no_variables_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens to be set in the environment must not decide a test."""
    for name in ("KVSTORE_TIMEOUT", "KVSTORE_NUM_THREADS", "MXNET_KVSTORE_REDUCTION_NTHREADS"):
        monkeypatch.delenv(name, raising=False)
