"""`store.step()`: one call of all pushes of a block, in the stores that have it, and refused elsewhere."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore as kv

KEYS = ["a", "b", "c"]
VERBS = ["push", "pushpull", "push and pull", "none"]


def full(value: float) -> Any:
    return np.full(3, value, np.float32)


def made(**options: Any) -> Any:
    store = kv.create("local", **options)
    store.init(KEYS, [full(0) for _ in KEYS])
    store.set_optimizer(kv.optimizer.SGD(learning_rate=-1.0))
    return store


@pytest.fixture
def steps(store: kv.KVStore) -> kv.KVStore:
    """Every store that has steps, with three keys to which pushes add."""
    if store.type == "dist_async":
        pytest.skip("it has no rounds")
    store.init(KEYS, [full(0) for _ in KEYS])
    store.set_optimizer(kv.optimizer.SGD(learning_rate=-1.0))
    return store


def pulled(store: kv.KVStore) -> list[float]:
    outs = [full(-1) for _ in KEYS]
    store.pull(KEYS, out=outs)
    return [float(out[0]) for out in outs]


def test_what_is_pushed_counts_when_the_block_ends(steps: kv.KVStore) -> None:
    out, later = full(-1), full(-1)
    with steps.step():
        steps.push("a", [full(1), full(1)])
        steps.pushpull("b", full(2), out=out)
        assert pulled_alone(steps, "c") == 0
        steps.pull("a", out=later)
        assert (out == -1).all() and (later == -1).all()
    assert pulled(steps) == [2, 2, 0]
    assert (out == 2).all() and (later == 2).all()


def pulled_alone(store: kv.KVStore, key: str) -> float:
    out = full(-1)
    store.pull(key, out=out)
    return float(out[0])


def test_an_exception_leaves_nothing(steps: kv.KVStore) -> None:
    with pytest.raises(KeyError), steps.step():
        steps.push("a", full(1))
        raise KeyError("in the block")
    with pytest.raises(kv.ShapeError), steps.step():
        steps.push("a", full(1))
        steps.push("b", np.zeros(4, np.float32))
    with pytest.raises(kv.KeyNotFoundError), steps.step():
        steps.push("a", full(1))
        steps.push("unknown", full(1))
    assert pulled(steps) == [0, 0, 0]
    with steps.step():
        steps.push("a", full(1))
    assert pulled(steps) == [1, 0, 0]


@given(st.lists(st.lists(st.sampled_from(VERBS), min_size=3, max_size=3), max_size=6))
def test_steps_give_what_the_calls_give(verbs: list[list[str]]) -> None:
    with made() as store, made() as plain:
        for t, step in enumerate(verbs, 1):
            outs, wanted = [full(0) for _ in KEYS], [full(0) for _ in KEYS]
            with store.step():
                make_calls(store, step, t, outs)
            make_calls(plain, step, t, wanted)
            assert np.array_equal(outs, wanted)
            assert pulled(store) == pulled(plain)


def make_calls(store: Any, verbs: list[str], t: int, outs: list[Any]) -> None:
    for key, verb, out in zip(KEYS, verbs, outs, strict=True):
        if verb == "pushpull":
            store.pushpull(key, full(t), out=out)
        elif verb != "none":
            store.push(key, full(t))
        if verb == "push and pull":
            store.pull(key, out=out)


def test_rows_are_a_part_of_a_step(steps: kv.KVStore) -> None:
    steps.init("rows", kv.RowSparseArray.zeros((4, 2)))
    out, some = kv.RowSparseArray.zeros((4, 2)), kv.RowSparseArray.zeros((4, 2))
    with steps.step():
        steps.push("rows", kv.RowSparseArray(np.ones((2, 2), np.float32), [0, 3], (4, 2)))
        steps.push("a", full(5))
        steps.pull("rows", out=out, ignore_sparse=False)
        steps.row_sparse_pull("rows", out=some, row_ids=np.array([3]))
        assert not out.nnz_rows
    assert out.todense().tolist() == [[1, 1], [0, 0], [0, 0], [1, 1]]
    assert list(some.indices) == [3] and (some.data == 1).all()
    assert pulled(steps) == [5, 0, 0]


def test_misuse_is_refused() -> None:
    with made() as store:
        with pytest.raises(kv.ConfigError, match="do not nest"), store.step(), store.step():
            raise AssertionError
        with pytest.raises(kv.ConfigError, match="'a' is pushed twice"), store.step():
            store.push("a", full(1))
            store.push("a", full(1))
        for call in (
            lambda: store.push("a", full(1), async_op=True),
            lambda: store.pushpull("a", full(1), async_op=True),
            lambda: store.pull("a", out=full(1), async_op=True),
        ):
            with pytest.raises(kv.ConfigError, match="leave async_op out"), store.step():
                call()
        assert pulled(store) == [0, 0, 0]
    with pytest.raises(kv.ClosedError), store.step():
        raise AssertionError


def read_only() -> Any:
    array = full(1)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda store: store.pull("a", out=np.zeros(4, np.float32)), kv.ShapeError),
        (lambda store: store.pull("a", out="x"), kv.ArrayError),
        (lambda store: store.pull("a", out=read_only()), kv.ArrayError),
        (lambda store: store.pull(["a", "zz"], out=[full(0), full(0)]), kv.KeyNotFoundError),
        (lambda store: store.pull("a", out=full(0), priority="x"), kv.ArgumentError),
        (lambda store: store.pushpull("b", full(1), out=np.zeros(4, np.float32)), kv.ShapeError),
        (lambda store: store.pushpull("b", full(1), out=read_only()), kv.ArrayError),
        (lambda store: store.pushpull("b", read_only()), kv.ArrayError),
        (lambda store: store.push("b", np.zeros(4, np.float32)), kv.ShapeError),
        (lambda store: store.push("zz", full(1)), kv.KeyNotFoundError),
    ],
)
def test_a_call_that_is_not_valid_pushes_nothing(steps: kv.KVStore, call: Any, error: type) -> None:
    with pytest.raises(error), steps.step():
        steps.push("a", full(1))
        call(steps)
    assert pulled(steps) == [0, 0, 0]
    with steps.step():
        steps.push("a", full(1))
    assert pulled(steps) == [1, 0, 0]


def test_other_threads_have_no_part_in_a_step() -> None:
    with made() as store:
        with store.step():
            store.push("a", full(1))
            other = threading.Thread(target=store.push, args=("b", full(2)))
            other.start()
            other.join()
            assert pulled_alone(store, "b") == 2
            assert store.view("a")[0] == 0
        assert pulled(store) == [1, 2, 0]


def test_a_plan_is_a_part_of_a_step() -> None:
    with made() as store:
        value, out = full(3), full(0)
        plan = store.bind("a", value, out)
        with store.step():
            plan()
            store.push("b", full(1))
            assert (out == 0).all()
        assert (out == 3).all()
        assert pulled(store) == [3, 1, 0]


def test_a_save_in_a_step_is_of_the_one_before(steps: kv.KVStore, tmp_path: Path) -> None:
    with steps.step():
        steps.push(KEYS, [full(1)] * 3)
    with steps.step():
        steps.push("a", full(1))
        steps.save(tmp_path / "values")
        steps.push(["b", "c"], [full(1)] * 2)
    with made() as other:
        other.load(tmp_path / "values")
        assert pulled(other) == [1, 1, 1]


def refused(store: kv.KVStore, why: str) -> None:
    with store, pytest.raises(kv.CapabilityError, match=why), store.step():
        raise AssertionError


def test_stores_without_rounds_have_no_steps(on_servers: Any) -> None:
    refused(kv.create(on_servers("dist_async:1")), r"no whole steps: each push .* use 'dist_sync'")


@pytest.mark.parametrize("name", ["shared", "dist_sync:1"])
def test_stores_that_go_on_have_no_steps(name: str, on_servers: Any) -> None:
    store = kv.create(on_servers(name), on_peer_loss="continue")
    refused(store, "use on_peer_loss='raise' and a checkpoint")
