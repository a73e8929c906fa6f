"""Training with the front door for PyTorch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pace
import paths
import pytest
import servers


@pytest.fixture
def digits(tmp_path: Path) -> str:
    """A folder with the images that torch's workers learn from."""
    pytest.importorskip("sklearn")
    from kvstore.demo import load_digits

    data = load_digits()
    np.savez(tmp_path / "digits.npz", images=data.images, labels=data.labels)
    return str(tmp_path)


SERVED = pytest.param("dist_sync", marks=pytest.mark.nightly)

# ------------------------------------------------------------------------------------------- training


WAYS = [("hook", "shared"), ("optimizer", "shared"), ("store", "shared"), ("optimizer", "dist_sync")]
MORE_WAYS = [("hook", "dist_sync"), ("store", "dist_sync"), ("hook", "dist_p3"), ("optimizer", "dist_p3")]


@pytest.mark.parametrize(
    ("how", "name"), [*WAYS, *(pytest.param(*way, marks=pytest.mark.nightly) for way in MORE_WAYS)]
)
def test_digits_are_learned_as_with_ddp_and_gloo(
    how: str, name: str, same: Callable[..., Any], digits: str
) -> None:
    expected = np.array(same("learn", "gloo", "shared", digits, 60))
    found = np.array(same("learn", how, name, digits, 60))
    if how == "store":  # another formula of momentum, equal but for rounding
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("how", ["hook", "optimizer", "store"])
def test_one_worker_learns_what_it_would_learn_alone(how: str, same: Callable[..., Any], digits: str) -> None:
    expected = same("learn", "gloo", "local", digits, 20, workers=1)
    found = same("learn", how, "local", digits, 20, workers=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("on_store", [False, True])
@pytest.mark.parametrize("name", ["shared", SERVED])
def test_whole_steps_learn_the_same(name: str, on_store: bool, same: Callable[..., Any]) -> None:
    assert same("whole_steps", name, on_store, True) == same("whole_steps", name, on_store, False)


@pytest.mark.parametrize("on_store", [False, True])
@pytest.mark.parametrize("name", ["shared", SERVED])
def test_a_killed_job_goes_on_with_the_same_bits(
    name: str, on_store: bool, same: Callable[..., Any], torches: jobs.Nursery, tmp_path: Path
) -> None:
    expected = same("resumed", name, on_store, str(tmp_path / "undisturbed"), 9, 0)
    folder = tmp_path / "killed"
    for at in (3, 5):
        made = (
            jobs.Job(torches, tmp_path, 2) if name == "shared" else servers.ServedJob(torches, tmp_path, 2, 1)
        )
        workers = made.start_all("frameworks.procs_torch", "resumed", name, on_store, str(folder), 9, at)
        for worker in workers:
            worker.finish(pace.deadline(60))
        assert -signal.SIGKILL in {worker.code for worker in workers}
        made.close()
    assert same("resumed", name, on_store, str(folder), 9, 0) == expected


@pytest.fixture
def under_mpi(tmp_path: Path) -> Callable[..., list[Any]]:
    """Run a function of procs_torch.py under mpiexec, where there is an MPI with torch."""
    python = os.environ.get("KVSTORE_TEST_OPENMPI", "")
    if not python or subprocess.run([python, "-c", "import torch"], capture_output=True).returncode:
        pytest.skip("KVSTORE_TEST_OPENMPI names no python with mpi4py, Open MPI and torch")

    def run(function: str, *arguments: Any) -> list[Any]:
        code = (
            "import json, sys; sys.path[:0] = sys.argv[1].split(':'); from frameworks import procs_torch; "
            "found = getattr(procs_torch, sys.argv[2])(*json.loads(sys.argv[3])); "
            "open(f'{sys.argv[4]}/found-{procs_torch.RANK}', 'w').write(json.dumps(found))"
        )
        command = [str(Path(python).parent / "mpiexec"), "-n", "2", "--oversubscribe", "--bind-to", "none"]
        command += [python, "-c", code, paths.IMPORTS, function, json.dumps(arguments), str(tmp_path)]
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=pace.seconds(100),
            env={**os.environ, **root},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads((tmp_path / f"found-{rank}").read_text()) for rank in (0, 1)]

    return run


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["hook", "optimizer"])
def test_mpi_learns_the_same(
    how: str, under_mpi: Callable[..., list[Any]], same: Callable[..., Any], digits: str
) -> None:
    first, second = under_mpi("learn", how, "mpi", digits, 60)
    assert first == second
    np.testing.assert_array_equal(first, same("learn", "gloo", "shared", digits, 60))


@pytest.mark.nightly
def test_workers_of_mpi_push_in_one_order_whatever_they_have(under_mpi: Callable[..., list[Any]]) -> None:
    first, second = under_mpi("parts_of_a_model", "mpi")
    assert first == second
    check_parts(first)


# -------------------------------------------------------------------------------------- parts of a step


def check_parts(found: dict[str, Any]) -> None:
    assert found["found"] == [[1.5, 1.5], [2.0, 2.0], None, None]
    assert found["thawed"] == [None, None, None, [1.5, 1.5]]
    moved = np.array(found["before"]) != np.array(found["after"])
    assert moved.reshape(4, 2).tolist() == [[True] * 2, [True] * 2, [False] * 2, [False] * 2]


@pytest.mark.parametrize("name", ["shared", SERVED])
@pytest.mark.parametrize("how", ["hook", "optimizer", "store"])
def test_steps_and_buckets_are_in_a_timeline(
    how: str, name: str, same: Callable[..., Any], tmp_path: Path
) -> None:
    found = same("recorded", how, name, str(tmp_path))
    assert [number for number, _ in found] == [1, 2, 3, 4]
    assert all(buckets >= 1 for _, buckets in found)


@pytest.mark.parametrize("name", ["shared", SERVED])
def test_an_unused_parameter_stays_as_it_is(name: str, same: Callable[..., Any]) -> None:
    """Weight decay would move it, if it had a gradient of zeros."""
    check_parts(same("parts_of_a_model", name))


@pytest.mark.parametrize("value", [-0.0, -1.4e-45], ids=["zero", "too-small-to-halve"])
@pytest.mark.parametrize("name", ["shared", SERVED])
def test_a_gradient_of_zeros_below_zero_is_one(name: str, value: float, same: Callable[..., Any]) -> None:
    (found,), moved = same("minus_zero", name, value)
    assert found == [0.0, 0.0]
    assert len(moved) == 2


def test_gradients_add_up_over_passes_and_may_be_clipped(same: Callable[..., Any]) -> None:
    found, _ = same("passes", "shared")
    # passes 0, 1, 2 of worker 0 and 10, 11, 12 of worker 1; the bias counts passes
    assert found == [[[36.0] * 3, [6.0]], [[36.0] * 3, [6.0]], [[22.0] * 3, [4.0]]]


@pytest.mark.parametrize("on_store", [False, True])
@pytest.mark.parametrize("name", ["shared", SERVED])
def test_ctrl_c_as_gradients_are_sent(name: str, on_store: bool, work: Callable[..., list[Any]]) -> None:
    for first, *later in work("interrupted_as_it_sends", name, on_store):
        assert re.match(r"KVStoreError: worker [01]: zero_grad while", first)
        assert len(later) == 2
        assert all("such as Ctrl-C" in text for text in later)


def test_a_parameter_may_be_used_twice_in_a_pass(same: Callable[..., Any]) -> None:
    expected, found = (same("twice_in_a_pass", "shared", overlap) for overlap in (True, False))
    for one, other in zip(expected, found, strict=True):
        for values, others in zip(one, other, strict=True):
            np.testing.assert_allclose(values, others, rtol=1e-6, atol=1e-7)


def test_closures_are_evaluated_with_averages(same: Callable[..., Any]) -> None:
    calls, weights = same("closures", "shared")
    assert calls == 3
    assert np.isfinite(weights).all()


@pytest.mark.parametrize("name", ["shared", SERVED])
def test_schedules_of_torch_reach_the_store(name: str, same: Callable[..., Any]) -> None:
    expected = same("schedules", name, False)
    np.testing.assert_allclose(same("schedules", name, True), expected, rtol=1e-5, atol=1e-6)


def test_a_state_goes_on_where_it_was_saved(same: Callable[..., Any]) -> None:
    whole, cut = same("states", "shared")
    assert whole == cut


@pytest.mark.parametrize("name", ["shared", SERVED])
def test_a_rule_may_be_used_again(name: str, same: Callable[..., Any]) -> None:
    """Its gradients are averaged each time, and it stays as it was."""
    assert same("one_rule_twice", name) == [[[-1.5, -1.5]] * 2, 1.0]


def test_a_parameter_has_one_optimizer(work: Callable[..., list[Any]]) -> None:
    (found,) = work("owners", workers=1)
    for name in ("second", "in the store"):
        assert re.match(r"ConfigError: parameter '0\.weight' already has a Distrib.*close\(\)", found[name])
    assert re.match(r"ArgumentError: optimizer is already a DistributedOptimizer", found["wrapped"])
    assert re.match(r"ClosedError: this DistributedOptimizer is closed", found["closed"])
    assert found["halves"] == [True, True]
    assert re.match(r"ConfigError: parameter '2\.weight' already has a Distrib", found["group"])
    assert found["groups"] == [1, 1]


def test_a_group_that_is_refused_changes_nothing(same: Callable[..., Any]) -> None:
    text, groups, after, gradients, stranger = same("a_group_too_many", "shared")
    assert re.match(r"ConfigError: a parameter of the optimizer, of shape \(2,\)", text)
    assert groups == [1, 1]
    assert after == 2
    assert gradients == [[1.5, 1.5]] * 2
    assert stranger == [0.0, 0.0]


# --------------------------------------------------------------------------------- types, layouts, rows


@pytest.mark.parametrize("name", ["shared", SERVED])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_types(dtype: str, name: str, same: Callable[..., Any]) -> None:
    found, kept, _ = same("types", name, dtype)
    assert found == [[2.015625] * 6, [2.0] * 2]
    assert kept == f"torch.{dtype}"


def test_channels_last(same: Callable[..., Any]) -> None:
    found, mixed, _ = same("layouts", "shared")
    assert [len(part) for part in found] == [108, 4, 32, 2, 8, 1]
    assert mixed == (np.arange(108.0) * 1.5).tolist()


@pytest.mark.parametrize("name", ["shared", SERVED])
@pytest.mark.parametrize("on_store", [False, True])
def test_sparse_gradients_are_sums_of_rows(name: str, on_store: bool, same: Callable[..., Any]) -> None:
    expected = same("rows", name, False, on_store)
    np.testing.assert_allclose(same("rows", name, True, on_store), expected, rtol=1e-6)


def test_sparse_gradients_by_hook(same: Callable[..., Any], tmp_path: Path) -> None:
    expected = same("rows_by_hook", "shared", str(tmp_path), False)
    np.testing.assert_allclose(same("rows_by_hook", "shared", str(tmp_path), True), expected, rtol=1e-6)


@pytest.mark.parametrize("kind", ["types", "rows"])
def test_static_graphs(kind: str, same: Callable[..., Any], tmp_path: Path) -> None:
    """In their first pass all buckets arrive at the end, none of them as the last."""
    expected = same("static_graph", "shared", str(tmp_path), kind, False)
    found = same("static_graph", "shared", str(tmp_path), kind, True)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_static_graph_of_one_worker(same: Callable[..., Any], tmp_path: Path) -> None:
    expected = same("static_graph", "local", str(tmp_path), "types", False, workers=1)
    assert same("static_graph", "local", str(tmp_path), "types", True, workers=1) == expected


def test_a_copied_hook_has_the_same_store(same: Callable[..., Any], tmp_path: Path) -> None:
    gradients, pickled, prefix = same("hook_copied", "shared", str(tmp_path))
    assert gradients == [[3.0, 3.0]]
    assert re.match(r"ArgumentError: a HookState cannot be pickled.*state_dict\(\)", pickled)
    assert re.match(r"ArgumentError: prefix must be a str, not builtins\.NoneType", prefix)


def test_uneven_batches_under_ddp(same: Callable[..., Any], tmp_path: Path) -> None:
    expected = same("uneven", str(tmp_path), False)
    np.testing.assert_allclose(same("uneven", str(tmp_path), True), expected, rtol=1e-6)


def test_compression_keeps_residuals_of_parameters(same: Callable[..., Any]) -> None:
    assert same("compressed", "shared") == [[[0.0] * 4] * 2, [[1.0] * 4, [0.0] * 4]]


def test_buffers_are_those_of_rank_0(same: Callable[..., Any]) -> None:
    assert same("buffers", "shared") == [[0.0] * 3, [1.0] * 3, 0, [True, True]]


# ----------------------------------------------------------------------------------------------- errors

MISTAKES = {
    "kind": r"ArgumentError: .*torch\.optim\.Optimizer, not kvstore\.optimizer\..*SGD.*update_on_kvstore",
    "kind on store": r"ArgumentError: .*kv\.optimizer\.SGD\(.*not torch\.optim\.sgd\.SGD",
    "store": r"ArgumentError: .*kvstore\.create",
    "bytes": r"ConfigError: bucket_bytes",
    "passes": r"ConfigError: backward_passes_per_step",
    "bytes type": r"ArgumentError: bucket_bytes must be an int, not builtins\.str: 'x'",
    "passes type": r"ArgumentError: backward_passes_per_step must be an int, not builtins\.str: '2'",
    "passes half": r"ArgumentError: backward_passes_per_step must be an int, not builtins\.float: 1\.5",
    "sparse type": r"ArgumentError: sparse must be names of parameters, not 5",
    "sparse names": r"ArgumentError: sparse must be names of parameters, not 5",
    "prefix": r"ArgumentError: prefix must be a str, not builtins\.int: 5",
    "prefix none": r"ArgumentError: prefix must be a str, not builtins\.NoneType: None",
    "parameters": r"ArgumentError: named_parameters .*pass model\.named_parameters\(\).*Parameter",
    "dict": r"ArgumentError: named_parameters .*pass model\.named_parameters\(\), not builtins\.dict",
    "module": r"ArgumentError: named_parameters .*pass model\.named_parameters\(\), not .*Linear",
    "linear": r"ArgumentError: named_parameters .*pass model\.named_parameters\(\), not .*Linear",
    "numbers": r"ArgumentError: named_parameters .*, not builtins\.int with torch\.nn\.parameter\.Parameter",
    "arrays": r"ArgumentError: named_parameters .*, not builtins\.str with numpy\.ndarray",
    "none": r"ConfigError: named_parameters is empty",
    "names": r"ConfigError: .*shape \(10, 24\).*model\.named_parameters\(\)",
    "twice": r"ConfigError: .*two parameters have the name 'w'",
    "sparse": r"ConfigError: .*'nobody'",
    "complex": r"DTypeError: 'c' is torch\.complex64.*view_as_real",
    "meta": r"ArrayError: 'e' has no memory yet",
    "lazy": r"ArrayError: 'weight' has no memory yet: first run a batch",
    "away": r"MissingBackendError: 'far' is on cuda:0, but store 'local'.*create 'shared'",
    "nested": r"ArgumentError: 'state' is not a tensor but builtins\.dict",
    "float8": r"DTypeError: 'eight' is torch\.float8_e4m3fn",
    "broadcast prefix": r"ArgumentError: prefix must be a str, not builtins\.NoneType",
    "no state": r"ArgumentError: allreduce_hook needs a HookState, not kvstore\.store.*HookState\(store\)",
    "none as state": r"ArgumentError: allreduce_hook needs a HookState, not builtins\.NoneType",
    "optimizer": r"ConfigError: this 'local' store already has an optimizer",
    "sparse gradient": r"ConfigError: parameter 'table\.weight' has a sparse.*sparse=\['table\.weight'\]",
    "sparse gradient again": r"ConfigError: parameter 'table\.weight' has a sparse",
    "dense gradient": r"ConfigError: parameter 'table\.weight' is in `sparse`",
    "states": r"CapabilityError: .*save_optimizer_states",
    "copy": r"ArgumentError: a DistributedOptimizer cannot be copied or pickled.*state_dict\(\)",
    "pickle": r"ArgumentError: a DistributedOptimizer cannot be copied or pickled.*state_dict\(\)",
    "group": r"CapabilityError: .*set_lr_mult",
}


def test_mistakes_are_told(work: Callable[..., list[Any]]) -> None:
    (found,) = work("mistakes", workers=1)
    assert found.keys() == MISTAKES.keys()
    for name, pattern in MISTAKES.items():
        assert re.match(pattern, found[name]), found[name]


@pytest.mark.parametrize("name", ["shared", SERVED])
def test_models_that_differ_are_told_apart(name: str, work: Callable[..., list[Any]]) -> None:
    first, second = work("other_models", name)
    assert re.match("KVStoreError: worker 0: worker 1 has closed its store", first)
    assert re.match(r"ConfigError: worker 1 has another model than worker 0.*'1\.weight'", second)


def test_a_store_without_rounds_is_for_updates_only(same: Callable[..., Any], tmp_path: Path) -> None:
    for text in same("no_rounds", "dist_async", str(tmp_path)):
        assert re.match(r"ConfigError: store 'dist_async' has no rounds.*update_on_kvstore=True", text)


@pytest.mark.parametrize("how", ["optimizer", "hook"])
def test_an_optimizer_that_the_store_gets_later_is_noticed(
    how: str, same: Callable[..., Any], tmp_path: Path
) -> None:
    (text,) = same("optimizer_later", "shared", str(tmp_path), how)
    assert re.match(r"ConfigError: this 'shared' store already has an optimizer", text)


def test_complex_parameters_under_ddp(same: Callable[..., Any], tmp_path: Path) -> None:
    text = same("complex_under_hook", "shared", str(tmp_path))
    assert re.match(r"DTypeError: 'ddp\.0' is torch\.complex64.*view_as_real", text)


@pytest.mark.parametrize("how", ["optimizer", "hook"])
def test_a_lost_worker_is_told_from_step_or_backward(
    how: str, exchanges: str, torches: jobs.Nursery, tmp_path: Path
) -> None:
    with contextlib.closing(jobs.Job(torches, tmp_path, 2)) as job:
        first, second = job.start_all(
            "frameworks.procs_torch", "a_loss", "shared", how, str(tmp_path), EXCHANGES=exchanges
        )
        second.expect("here")
        assert job.finish() == [0, -9]
        assert first.result() == "worker 1"


def test_a_store_of_another_size_than_the_process_group(same: Callable[..., Any], tmp_path: Path) -> None:
    text = same("worlds_differ", str(tmp_path))
    assert re.match(r"ConfigError: the process group has 2 .*'local' has 1", text)


@pytest.mark.parametrize("name", ["shared", "dist_sync"])
def test_metrics_and_objects_need_no_key(torches: jobs.Nursery, tmp_path: Path, name: str) -> None:
    served = partial(servers.ServedJob, servers=1) if name == "dist_sync" else jobs.Job
    made = served(torches, tmp_path, 2)
    made.start_all("frameworks.procs_torch", "without_keys", name)
    first, second = made.results()
    made.close()
    assert first == second
    assert first["counts"] == [[1, 1], [1, 1]]
    assert (first["loss"], first["half"]) == (5.5, [40000.0] * 2)
    assert (first["strided"], first["brain"], first["long"]) == ([0.5], [3.0] * 3, [1.0])
    assert first["every"] == [[0, [0], [3.0] * 3], [1, [0, 1], [3.0] * 3]]
    assert first["one"] == {"epoch": 1}
    assert (first["weights"], first["keys"]) == ([-1.0] * 3, ["w"])
    assert re.match(r"all_reduce takes tensors, not builtins\.float \(number 1\)", first["refused"])


def test_a_worker_that_came_back_is_not_given_gradients_for_weights(work: Callable[..., list[Any]]) -> None:
    for rank, text in enumerate(work("came_back")):
        assert re.match(rf"CapabilityError: worker {rank} was restarted.*checkpoint", text)


def test_without_torch_the_door_says_how_to_get_it() -> None:
    code = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import kvstore
assert not any(name.startswith("kvstore.torch") for name in sys.modules)
try:
    import kvstore.torch
except kvstore.MissingBackendError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=pace.seconds(60), check=True
    )
    assert re.match(r"kvstore\.torch needs PyTorch: pip install torch", done.stdout)
