"""The values that the store of one process keeps, and its updates: memory, types, counts."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from references import draw, dtype_of, total

import kvstore as kv
from kvstore.arrays import pages
from kvstore.settings.options import StoreConfig
from kvstore.stores.local.backend import LocalBackend


def test_a_training_loop_uses_the_same_memory_over_and_over() -> None:
    with kv.create() as store:
        store.init(["a", "b"], [np.zeros(100_000, np.float32)] * 2)
        store.set_optimizer(kv.optimizer.create("adam"))
        addresses = [store.view(key).ctypes.data for key in "ab"]
        for _ in range(3):
            store.push(["a", "b"], [np.ones(100_000, np.float32)] * 2)
        assert [store.view(key).ctypes.data for key in "ab"] == addresses


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_multi_precision_keeps_what_half_a_weight_loses(name: str) -> None:
    dtype = dtype_of(name)
    with kv.create() as store:
        store.init("w", np.ones(5, dtype))
        store.set_optimizer(kv.optimizer.SGD(learning_rate=1, multi_precision=True))
        for _ in range(64):
            store.push("w", np.full(5, 2.0**-14, dtype))
        assert (store.view("w").astype(float) == float(dtype.type(1 - 2.0**-8))).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("sparse", [False, True])
def test_loaded_values_are_not_undone_by_the_float32_copy(tmp_path: Any, name: str, sparse: bool) -> None:
    dtype, every = dtype_of(name), [0, 1, 2]

    def value(number: float) -> Any:
        array = np.full((3, 2), number, dtype)
        return kv.RowSparseArray(array, every, (3, 2)) if sparse else array

    with kv.create() as store:
        store.init("w", value(1))
        store.save(tmp_path / "ones")
        store.set_optimizer(kv.optimizer.SGD(learning_rate=0.5, multi_precision=True))
        store.push("w", value(1))
        store.load(tmp_path / "ones")
        store.push("w", value(0))
        out = np.zeros((3, 2), dtype)
        store.pull("w", out=out)
        assert (out == 1).all()


def test_loading_keeps_the_bits_of_the_float32_copy_where_it_is_the_weight(tmp_path: Any) -> None:
    def push(store: kv.KVStore) -> None:
        store.push("w", np.full(5, 1.1e-4, np.float16))

    with kv.create() as store, kv.create() as again:
        for each in (store, again):
            each.init("w", np.ones(5, np.float16))
            each.set_optimizer(kv.optimizer.SGD(learning_rate=1, multi_precision=True))
        push(store)
        store.save(tmp_path / "values")
        store.save_optimizer_states(tmp_path / "states")
        again.load_optimizer_states(tmp_path / "states")
        again.load(tmp_path / "values")
        for _ in range(3):
            push(store)
            push(again)
        (one, _), (two, _) = (s._updater.states["w"] for s in (store, again))  # type: ignore[union-attr]
        np.testing.assert_array_equal(one, two)
        assert (one != 1).all()


def test_a_row_sparse_weight_holds_the_rows_that_were_touched() -> None:
    with kv.create() as store:
        store.init("t", kv.RowSparseArray(np.ones((1, 2), np.float32), [1], (4, 2)))
        store.set_optimizer(kv.optimizer.SGD(learning_rate=1))
        store.push("t", kv.RowSparseArray(np.ones((1, 2), np.float32), [3], (4, 2)))
        assert store.view("t").indices.tolist() == [1, 3]
        assert store.view("t").data[:, 0].tolist() == [1, -1]
        out = np.ones((4, 2), np.float32)
        store.pull("t", out=out)
        assert out[:, 0].tolist() == [0, 1, 0, -1]


def test_lazy_updates_leave_the_other_rows_alone() -> None:
    results = {}
    for lazy in (False, True):
        with kv.create() as store:
            store.init("t", kv.RowSparseArray(np.ones((3, 2), np.float32), [0, 1, 2], (3, 2)))
            store.set_optimizer(kv.optimizer.SGD(learning_rate=0.5, wd=0.5, lazy_update=lazy))
            store.push("t", kv.RowSparseArray(np.ones((1, 2), np.float32), [1], (3, 2)))
            results[lazy] = store.view("t").data[:, 0].tolist()
    assert results == {False: [0.75, 0.25, 0.75], True: [1, 0.25, 1]}


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("rule", ["sgd", "adam", "lamb", "ftrl"])
def test_a_list_of_gradients_is_their_sum(name: str, rule: str, k: int) -> None:
    with kv.create() as one, kv.create() as two:
        for store in (one, two):
            store.init("w", draw(name, 300, 1))
            store.set_optimizer(kv.optimizer.create(rule, learning_rate=0.1, multi_precision=True))
        for step in range(3):
            gradients = [draw(name, 300, 100 * step + i) for i in range(k)]
            one.push("w", gradients)
            two.push("w", total(gradients))
        np.testing.assert_array_equal(one.view("w"), two.view("w"))


def test_counts_are_as_before_after_a_call_that_failed() -> None:
    with kv.create() as store:
        store.init([1, 2, 3], [np.ones(3, np.float32), np.ones(3, np.float32), np.ones(3, np.int32)])
        optimizer = kv.optimizer.create("adam", learning_rate=0.1)
        store.set_optimizer(optimizer)
        store.push([1, 2], [np.ones(3, np.float32)] * 2)
        before = dict(optimizer._index_update_count), optimizer.num_update
        for keys, values in (
            ([1, 2], [np.ones(3, np.float32), np.ones(4, np.float32)]),
            ([1, 9], [np.ones(3, np.float32)] * 2),
            ([1, 3], [np.ones(3, np.float32), np.ones(3, np.int32)]),
        ):
            with pytest.raises(kv.KVStoreError):
                store.push(keys, values)
            assert (dict(optimizer._index_update_count), optimizer.num_update) == before
        np.testing.assert_array_equal(store.view(1), store.view(2))


@pytest.mark.parametrize("sparse", [False, True])
def test_states_that_do_not_fit_change_nothing(tmp_path: Any, sparse: bool) -> None:
    def gradients(n: int) -> list[Any]:
        dense = [np.ones((3, 1), np.float32), np.ones((n, 1), np.float32)]
        return [kv.RowSparseArray(g, list(range(len(g))), g.shape) for g in dense] if sparse else dense

    def made(n: int) -> kv.KVStore:
        store = kv.create()
        store.init(["a", "b"], gradients(n))
        store.set_optimizer(kv.optimizer.create("adam", learning_rate=0.1))
        return store

    with made(4) as other, made(5) as store:
        other.push(["a", "b"], gradients(4))
        other.save_optimizer_states(tmp_path / "states")
        with pytest.raises(kv.StateFileError, match="'b'"):
            store.load_optimizer_states(tmp_path / "states")
        assert store._updater is not None
        store._updater.load(tmp_path / "states")  # past the check
        before = store._updater.snapshot_counts()
        with pytest.raises(kv.ShapeError, match="'b'"):
            store.push("b" if sparse else ["a", "b"], gradients(5)[1] if sparse else gradients(5))
        assert store._updater.snapshot_counts() == before
        for key in ("a", "b"):
            value = store.view(key)
            assert ((value.data if sparse else value) == 1).all()


def test_nothing_is_left_after_close() -> None:
    backend = LocalBackend(StoreConfig())
    backend.init([("a", [np.zeros(3)])])
    backend.close()
    assert backend.keys() == []
    assert backend.placement() == {}
    assert backend.updater is None


# ---------------------------------------------------------------------------------------------------- pages


@pytest.mark.parametrize(
    "nbytes", [0, 1, 16 * 1024 - 1, 16 * 1024, 2**20, 2**21 - 1, 2**21, 2**21 + 3, 2**24]
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float64, ml_dtypes.bfloat16])
def test_memory_of_any_size(nbytes: int, dtype: Any) -> None:
    n = nbytes // np.dtype(dtype).itemsize
    arrays = [pages.empty((n,), dtype) for _ in range(3)]
    for number, array in enumerate(arrays):
        assert array.shape == (n,)
        assert array.dtype == dtype
        assert array.flags.c_contiguous
        assert array.flags.aligned
        assert array.flags.writeable
        array[...] = number
    for number, array in enumerate(arrays):
        assert (array == number).all()  # none lies in another


def test_zeros_and_copies() -> None:
    for shape in ((), (0,), (3, 0), (300, 200), (3, 5)):
        source = np.asarray(np.random.default_rng(1).random(shape))
        np.testing.assert_array_equal(pages.copy(source), source)
        np.testing.assert_array_equal(pages.copy(source.T, np.float32), source.T.astype(np.float32))
        zeros = pages.zeros_like(source)
        assert (zeros.shape, zeros.dtype, zeros.any()) == (source.shape, source.dtype, False)


def test_memory_is_used_again_only_when_its_array_is_gone() -> None:
    kept = []
    for number in range(300):
        array = pages.empty((50_000,), np.uint8)
        array[...] = number % 256
        if number % 7 == 0:
            kept.append((number % 256, array))
    assert all((array == number).all() for number, array in kept)


@pytest.mark.parametrize("change", ["learning_rate", "lr_mult", "schedule"])
def test_changes_of_the_optimizer_come_after_pushes_in_the_background(change: str) -> None:
    schedule = kv.lr_scheduler.FactorScheduler(step=1000, base_lr=1.0)
    with kv.create() as store:
        store.init("w", np.zeros(200_000, np.float32))
        optimizer = kv.optimizer.SGD(
            learning_rate=1.0, lr_scheduler=schedule if change == "schedule" else None
        )
        store.set_optimizer(optimizer)
        ones = np.ones(200_000, np.float32)
        for _ in range(6):
            store.push("w", ones, async_op=True)
        if change == "learning_rate":
            optimizer.learning_rate = 100.0
        elif change == "lr_mult":
            optimizer.lr_mult["w"] = 100.0
        else:
            schedule.base_lr = 100.0
        store.push("w", ones)
        out = np.empty_like(ones)
        store.pull("w", out=out)
        assert (out == -106).all()
