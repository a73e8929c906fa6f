"""Tables of which only the touched rows are held, against tables that hold all of them: the same bits."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvstore as kv
from kvstore.optimizer import create

N = 12
SHAPE = (N, 2)
Array = npt.NDArray[Any]

RULES: list[tuple[str, dict[str, Any]] | None] = [
    None,
    ("sgd", {}),
    ("sgd", {"momentum": 0.9, "lazy_update": True}),
    ("sgd", {"momentum": 0.9, "wd": 0.1}),
    ("nag", {"momentum": 0.9}),
    ("adam", {"lazy_update": True, "wd": 0.1}),
    ("adam", {}),
    ("adamw", {"wd": 0.1}),
    ("adagrad", {}),
    ("adadelta", {}),
    ("adamax", {}),
    ("nadam", {}),
    ("rmsprop", {"centered": True}),
    ("ftrl", {}),
    ("ftml", {}),
    ("signum", {"momentum": 0.9}),
    ("sgld", {}),
    ("dcasgd", {"momentum": 0.5}),
    ("lamb", {}),
    ("lars", {"momentum": 0.9}),
    ("groupadagrad", {}),
]

some_rows = st.dictionaries(st.integers(0, N - 1), st.integers(-9, 9), max_size=5)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.lists(some_rows, min_size=1, max_size=3)),
        st.tuples(st.just("push dense"), st.integers(-9, 9)),
        st.tuples(st.just("assign"), some_rows),
        st.tuples(st.just("again"), st.none()),
        st.tuples(st.just("fill"), st.none()),
        st.tuples(st.just("states"), st.none()),
    ),
    max_size=8,
)


def rows(values: dict[int, int], dtype: Any = np.float32) -> kv.RowSparseArray:
    data = np.array([[v, 0.5 * v] for v in values.values()], dtype).reshape(-1, 2)
    return kv.RowSparseArray(data, list(values), SHAPE)


def dense_of(store: kv.KVStore) -> bytes:
    out = np.full(SHAPE, 7, store.view("t").dtype)
    store.pull("t", out=out)
    return out.tobytes()


def states_of(store: kv.KVStore) -> Any:
    backend: Any = store._backend
    tree = None if backend.updater is None else backend.gather_states().states.get("t")
    arrays = tree if isinstance(tree, tuple) else (tree,)
    return [None if array is None else np.asarray(array).tobytes() for array in arrays]


def do(store: kv.KVStore, verb: str, argument: Any, rule: Any, path: Path, dtype: Any) -> None:
    if verb == "push":
        store.push("t", [rows(one, dtype) for one in argument])
    elif verb == "push dense":
        store.push("t", np.full(SHAPE, argument, dtype))
    elif verb == "assign":
        store._backend.assign([("t", [rows(argument, dtype)])])
    elif rule is None:
        return
    elif verb == "again":
        store.set_optimizer(create(rule[0], **rule[1]))
    elif verb == "fill":
        store.push("t", [rows({}, dtype), np.zeros(SHAPE, dtype)])
    else:
        store.save_optimizer_states(path)
        store.load_optimizer_states(path)


def made(values: dict[int, int], rule: Any, dtype: Any) -> kv.KVStore:
    store = kv.create()
    store.init("t", rows(values, dtype))
    if rule is not None:
        store.set_optimizer(create(rule[0], **rule[1]))
    return store


def check_rows(store: kv.KVStore, other: kv.KVStore) -> None:
    ids = [1, 4, 11]
    ours, theirs = (kv.RowSparseArray.zeros(SHAPE, store.view("t").dtype) for _ in range(2))
    store.row_sparse_pull("t", out=ours, row_ids=ids)
    other.row_sparse_pull("t", out=theirs, row_ids=ids)
    assert ours.data.tobytes() == theirs.data.tobytes()
    store.pull("t", out=ours, ignore_sparse=False)
    assert (np.diff(ours.indices) > 0).all()
    np.testing.assert_array_equal(ours.todense(), np.frombuffer(dense_of(other), ours.dtype).reshape(SHAPE))


@pytest.mark.filterwarnings("ignore:.*lose small updates")
@pytest.mark.parametrize("rule", RULES, ids=str)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=some_rows, steps=steps, half=st.booleans(), precise=st.booleans())
def test_absent_rows_change_no_number(
    tmp_path: Path, rule: Any, first: dict[int, int], steps: Any, half: bool, precise: bool
) -> None:
    dtype = np.float16 if half else np.float32
    if rule is not None and rule[0] != "groupadagrad":
        rule = (rule[0], {**rule[1], "multi_precision": precise})
    elif rule is not None:
        dtype = np.float32
    every = {row: first.get(row, 0) for row in range(N)}
    with made(first, rule, dtype) as some, made(every, rule, dtype) as whole:
        for verb, argument in steps:
            for store in (some, whole):
                do(store, verb, argument, rule, tmp_path / "states", dtype)
            assert dense_of(some) == dense_of(whole)
            check_rows(some, whole)
            assert states_of(some) == states_of(whole) or None in states_of(some) + states_of(whole)


HUGE = 10**13
BY_ROWS = [rule for rule in RULES if rule is None or rule[0] not in ("sgld", "lamb", "lars")]


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("name", ["local", "device"])
@pytest.mark.parametrize("rule", BY_ROWS, ids=str)
def test_a_huge_table_costs_the_rows_that_are_touched(name: str, rule: Any) -> None:
    ids = np.arange(0, HUGE, HUGE // 1000)
    gradient = kv.RowSparseArray(np.ones((len(ids), 4), np.float32), ids, (HUGE, 4))
    with kv.create(name) as store:
        store.init("t", kv.RowSparseArray.zeros((HUGE, 4)))
        if rule is not None:
            store.set_optimizer(create(rule[0], **rule[1]))
        before = peak()
        for _ in range(3):
            store.push("t", gradient)
        assert (peak() - before) * 1024 < 2**25
        out = kv.RowSparseArray.zeros((HUGE, 4))
        store.row_sparse_pull("t", out=out, row_ids=[0, 1, HUGE - 1])
        assert out.indices.tolist() == [0, 1, HUGE - 1]
        assert out.data[0].any()
        assert not out.data[1:].any()
        assert store.view("t").indices.tolist() == ids.tolist()
        assert store.placement()["t"][0][1] < 2**16


@pytest.mark.parametrize("name", ["local", "device"])
def test_what_needs_all_rows_of_a_huge_table_is_refused(name: str, tmp_path: Path) -> None:
    gradient = kv.RowSparseArray(np.ones((1, 4), np.float32), [7], (HUGE, 4))
    with kv.create(name) as store:
        store.init("t", gradient)
        store.set_optimizer(kv.optimizer.SGLD())
        with pytest.raises(kv.KVStoreError, match=r"key 't' holds 1 of 10000000000000 rows.* no memory"):
            store.push("t", gradient)
        assert store.view("t").data.tolist() == [[1] * 4]
        store.set_optimizer(kv.optimizer.LAMB())
        with pytest.raises(kv.KVStoreError, match="needs all of them"):
            store.push("t", gradient)
        store.set_optimizer(kv.optimizer.SGD(momentum=0.5, lazy_update=True, learning_rate=1))
        store.push("t", gradient)
        with pytest.raises(kv.KVStoreError, match="states of table 't' with all its"):
            store.save_optimizer_states(tmp_path / "states")
        store.set_updater(lambda _key, _merged, _stored: None)
        with pytest.raises(kv.KVStoreError, match="needs all of them"):
            store.push("t", gradient)
        store.save(tmp_path / "values")
        assert store.view("t").data.tolist() == [[0] * 4]
    with kv.create(name) as again:
        again.load(tmp_path / "values")
        assert again.view("t").indices.tolist() == [7]


def test_an_update_that_fails_holds_no_new_rows() -> None:
    gradient = kv.RowSparseArray(np.ones((1, 2), np.float32), [3], SHAPE)

    def stop(_: int) -> float:
        raise RuntimeError("no rate")

    with made({1: 5}, ("sgd", {"momentum": 0.9, "lazy_update": True}), np.float32) as store:
        store.push("t", gradient)
        before = store.view("t").indices.tolist(), dense_of(store), states_of(store)
        store.update_optimizer(lr_scheduler=stop)
        with pytest.raises(kv.UpdaterError, match="no rate"):
            store.push("t", kv.RowSparseArray(np.ones((1, 2), np.float32), [8], SHAPE))
        assert (store.view("t").indices.tolist(), dense_of(store), states_of(store)) == before


def test_a_table_is_a_source_of_its_own_push() -> None:
    with made({1: 5, 3: 2}, None, np.float32) as store:
        store.push("t", [store.view("t"), rows({0: 1, 3: 4})])
        assert store.view("t").indices.tolist() == [0, 1, 3]
        assert store.view("t").data[:, 0].tolist() == [1, 5, 6]
