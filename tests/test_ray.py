"""The front door for Ray, on a local one. Needs Ray: in the environment of $KVSTORE_TEST_RAY, or here."""

from __future__ import annotations

import importlib.util
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
from paths import IMPORTS

import kvstore as kv

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "how-to" / "ray.md"
WITHOUT = importlib.util.find_spec("ray") is None


@pytest.fixture(scope="module")
def python() -> str:
    named = os.environ.get("KVSTORE_TEST_RAY", "")
    if not named and WITHOUT:
        pytest.skip("Ray is not here: pip install ray, or name a python that has it in KVSTORE_TEST_RAY")
    return named or sys.executable


@pytest.fixture
def driver(python: str, tmp_path: Path) -> Callable[[str], Any]:
    """Run a driver of procs_ray.py, and return its result."""

    def run(name: str) -> Any:
        paths = os.pathsep.join(filter(None, (IMPORTS, os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            [python, str(HERE / "bodies" / "frameworks" / "procs_ray.py"), name, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": paths, "RAY_DISABLE_IMPORT_WARNING": "1"},
            capture_output=True,
            text=True,
            timeout=pace.seconds(170),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((tmp_path / "result").read_text())

    return run


@pytest.mark.skipif(not WITHOUT, reason="Ray is installed")
def test_without_ray_the_error_says_what_to_install() -> None:
    with pytest.raises(kv.MissingBackendError, match="pip install ray"):
        import kvstore.ray  # noqa: F401


pytestmark = pytest.mark.timeout(200)


def test_workers_sum_and_a_job_runs_again(driver: Callable[[str], Any]) -> None:
    pids = set()
    for results in driver("sums"):
        for rank, (text, said, size, values, variables, pid) in enumerate(results):
            assert (text, said, size) == ("hello", rank, 2)
            assert values == [-9.0]
            assert variables == [str(rank), "2", "0", "1"]
            pids.add(pid)
    assert len(pids) == 4


def test_a_killed_server_is_started_again_with_what_it_held(driver: Callable[[str], Any]) -> None:
    assert driver("server_comes_back") == [[-30.0], [-30.0]]


def test_a_killed_worker_is_started_again_and_trains_on(driver: Callable[[str], Any]) -> None:
    results, held = driver("worker_comes_back")
    assert held == [-9.0]
    # It joins when it may, and its last rounds may be complete when the other has ended; no push is lost.
    assert results[0] in [["0", [value]] for value in (-12.0, -14.0, -16.0, -18.0)]
    assert results[1] == ["1", [-18.0]]


def test_a_wait_that_is_too_short_ends_nothing(driver: Callable[[str], Any]) -> None:
    at_once, late, results, again, closed = driver("waits")
    assert "not finished after 0 s: rank 0, 1; they continue: wait again" in at_once
    assert "not finished after 3 s: rank 0, 1; they continue: wait again" in late
    assert results == again == [[-6.0], [-6.0]]
    assert "closed before its workers had finished" in closed


def test_the_error_that_others_are_a_consequence_of_is_told(driver: Callable[[str], Any]) -> None:
    (rank, text, _, again), (_, nobody, seconds, _) = driver("hidden")
    assert rank == 1
    assert "rank 1 failed" in text
    assert "ZeroDivisionError: on purpose" in text
    assert "PeerLostError" not in text
    assert again
    assert "worker 7 is lost" in nobody
    assert seconds < pace.seconds(30)  # no process waits for a rank that does not exist


def test_what_a_job_cannot_have_is_refused_at_once(driver: Callable[[str], Any]) -> None:
    for name, text in driver("refused"):
        assert text.startswith(name)


@pytest.mark.nightly
def test_the_how_to_s_example_runs(python: str, tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    subprocess.run(
        [python, "-c", code], cwd=tmp_path, check=True, capture_output=True, timeout=pace.seconds(170)
    )


@pytest.mark.nightly
def test_failures_end_all(driver: Callable[[str], Any]) -> None:
    raised, died, lives, no_room, late = driver("failures")
    assert raised[0] == 1
    assert "rank 1 failed" in raised[1]
    assert "ZeroDivisionError: on purpose" in raised[1]
    assert died[0] == 1
    assert not lives
    assert "Ray found no resources for 1 servers with {'CPU': 1} each" in no_room
    assert "not finished after 3 s: rank 0, 1; all are ended" in late


@pytest.mark.nightly
def test_between_nodes_there_are_keys(driver: Callable[[str], Any]) -> None:
    ((scheduler, keys, values),) = driver("encrypted")
    assert scheduler.startswith("tcp://")
    assert keys
    assert values == [-2.0]
