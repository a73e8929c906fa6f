"""The front door for JAX. Needs jax and optax: here, or in the environment of $KVSTORE_TEST_JAX."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pace
import pytest
import servers


@pytest.fixture(scope="session")
def python() -> str:
    """An interpreter that has JAX, optax and kvstore."""
    named = os.environ.get("KVSTORE_TEST_JAX", "")
    if not named and not all(map(importlib.util.find_spec, ("jax", "optax"))):
        pytest.skip(
            "JAX is not here: install jax and optax, or name a python that has them in KVSTORE_TEST_JAX"
        )
    return named or sys.executable


@pytest.fixture(scope="module")
def jaxes(python: str) -> Iterator[jobs.Nursery]:
    """Forks workers; JAX has threads, so each imports it for itself."""
    made = jobs.Nursery("frameworks.procs_jax", python=python)
    yield made
    made.close()


@pytest.fixture
def work(jaxes: jobs.Nursery, tmp_path: Path) -> Callable[..., list[Any]]:
    """Run a function of procs_jax.py in each worker of a job; return their results."""

    def run(function: str, *arguments: Any, workers: int = 2) -> list[Any]:
        served = any(str(argument).startswith("dist_") for argument in arguments)
        kind = partial(servers.ServedJob, servers=1) if served else jobs.Job
        made = kind(jaxes, tmp_path, workers)
        try:
            made.start_all("frameworks.procs_jax", function, *arguments)
            return made.results()
        finally:
            made.close()

    return run


@pytest.fixture
def digits(tmp_path: Path) -> str:
    """A folder with the images that workers learn from."""
    pytest.importorskip("sklearn")
    from kvstore.demo import load_digits

    data = load_digits()
    np.savez(tmp_path / "digits.npz", images=data.images, labels=data.labels)
    return str(tmp_path)


MORE = [("optax", "dist_sync"), ("jit", "dist_sync"), ("store", "dist_sync")]


@pytest.mark.parametrize(
    ("how", "name"),
    [("optax", "shared"), ("jit", "shared"), ("store", "shared")]
    + [pytest.param(*way, marks=pytest.mark.nightly) for way in MORE],
)
def test_two_workers_learn_what_one_learns_from_the_whole_batch(
    how: str, name: str, work: Callable[..., list[Any]], digits: str
) -> None:
    (expected,) = work("learn", "alone", "local", digits, 40, workers=1)
    first, second = work("learn", how, name, digits, 40)
    assert first == second
    np.testing.assert_allclose(first, expected, rtol=1e-3, atol=1e-4)
    assert len(first) == 64 * 24 + 24 + 24 * 10 + 10


@pytest.mark.parametrize("name", ["shared", pytest.param("dist_sync", marks=pytest.mark.nightly)])
def test_trees(name: str, work: Callable[..., list[Any]]) -> None:
    first, second = work("trees", name)
    assert first == second
    one, half, whole = [[1.0] * 3] * 2, [0.5], [0.0, 1.0, 2.0]
    assert first["first"] == {"f": [one, half], "i": whole, "none": None, "number": 2.0}
    three = [[3.0] * 3] * 2
    assert first["sum"] == {"f": [three, [2.0]], "i": [1.0, 3.0, 5.0], "none": None, "number": 4.0}
    assert first["types"] == ["float32", "bfloat16", "int32", "float32"]
    mean = {"f": [[[1.5] * 3] * 2, [1.0]], "none": None, "number": 2.0}
    assert first["again"] == first["compiled"] == mean
    assert first["large"] == [{"large": [40000.0] * 3}] * 2
    assert re.match(
        r"the value of 'i' holds int32, and the mean of integers is no integer", first["integers"]
    )
    assert first["empty"] == {}
    assert first["array"] == 2.0
    keys = ["f/0", "f/1/0", "i", "number"]
    assert first["keys"] == sorted([*keys, *(f"first/{key}" for key in keys), "alone", "large"])
    assert first["big"] == pytest.approx(600.0, rel=1e-3)


@pytest.mark.parametrize("name", ["shared", pytest.param("dist_sync", marks=pytest.mark.nightly)])
def test_metrics_and_objects_need_no_key(name: str, work: Callable[..., list[Any]]) -> None:
    first, second = work("without_keys", name)
    assert first == second
    assert first["sums"] == {"loss": 11.0, "counts": [[1.0, 3.0], [2.0, 2.0]], "long": 10000.0}
    assert first["means"] == first["compiled"] == {"loss": 5.5, "half": [40000.0, 40000.0]}
    assert first["every"] == [[0, [0]], [1, [0, 1]]]
    assert first["one"] == ["of", 1]
    assert first["weights"] == {"w": [-1.0] * 3}
    assert first["keys"] == ["w"]


def test_without_optax_it_is_a_pair_of_the_same_names(work: Callable[..., list[Any]]) -> None:
    assert work("plain_pair") == [[[1.5, 1.5], []]] * 2


MISTAKES = {
    "sparse": r"ArrayError: 't' is a BCOO: pass leaf\.todense\(\)",
    "twice": r"ArgumentError: .*'a/b'",
    "traced": r"ArrayError: broadcast does not work inside",
    "type": r"DTypeError: .*'c'.*complex64",
    "shape": r"ShapeError: .*'s'",
    "compiled": r"(?s)JaxRuntimeError: .*ShapeError: value of key 's'",
    "float0": r"DTypeError: 'step' is of type float0.*None in its place",
    "random": r"DTypeError: 'r' .*jax\.random\.key_data",
    "text": r"ArrayError: 't' must be an array or a number, not 'x'",
    "prefix": r"ArgumentError: prefix must be a str, '' for none, not None",
    "prefix of weights": r"ArgumentError: prefix must be a str, '' for none, not 5",
    "no store": r"ArgumentError: .*kvstore\.create.*None",
    "no store of weights": r"ArgumentError: .*kvstore\.create.*None",
    "store": r"ArgumentError: .*kvstore\.create",
    "optimizer": r"ConfigError: this 'local' store already has an optimizer",
    "weights": r"KeyNotFoundError: .*'w'.*kvstore\.jax\.broadcast",
    "average": r"ConfigError: this 'local' store has an optimizer, so pushpull returns weights.*rescale_grad",
    "later": r"ConfigError: this 'local' store already has an optimizer",
}


def test_mistakes_are_told(work: Callable[..., list[Any]]) -> None:
    (found,) = work("mistakes", workers=1)
    assert found.keys() == MISTAKES.keys()
    for name, pattern in MISTAKES.items():
        assert re.match(pattern, found[name]), found[name]


def test_sums_need_rounds(work: Callable[..., list[Any]]) -> None:
    for *refused, weights in work("without_rounds", "dist_async"):
        assert len(refused) == 2
        for text in refused:
            assert re.match(r"store 'dist_async' has no rounds.*'dist_sync'.*set_optimizer", text)
        assert weights == [6.0, 6.0]


def test_arrays_over_several_devices(work: Callable[..., list[Any]]) -> None:
    (found,) = work("devices", workers=1)
    assert found["copied"] == [0.0, 1.0, 2.0, 3.0]
    assert re.match(r"'cut' is sharded over 2 devices.*addressable_data", found["cut"])


def test_without_jax_the_door_says_how_to_get_it() -> None:
    code = """
import sys
sys.modules["jax"] = None  # as if it were not installed
import kvstore
assert "kvstore.jax" not in sys.modules
try:
    import kvstore.jax
except kvstore.MissingBackendError as error:
    print(error)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=pace.seconds(60), check=True)
    assert re.match(r"kvstore\.jax needs JAX: pip install jax", done.stdout)
