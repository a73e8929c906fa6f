"""The contract of every kind of store, as one matrix: each test runs on each name in support/tested_store.py.

One worker; several values for a key stand for several devices. What only the store of one process can do is
in test_store.py.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from own_rules import Halving

import kvstore as kv

Array = npt.NDArray[Any]

#: Tests of operations that need the weights in this process: live views, and functions as updaters.
in_reach = pytest.mark.in_reach

FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["int8", "uint8", "int32", "int64"]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def full(value: float, shape: tuple[int, ...] = (2, 3), dtype: Any = np.float32) -> Array:
    return np.full(shape, value, dtype)


def pulled(store: kv.KVStore, key: Any, like: Array | None = None) -> Array:
    out = full(-77) if like is None else np.full_like(like, 77)
    store.pull(key, out=out)
    return out


def stored_rows(store: kv.KVStore, key: Any) -> kv.RowSparseArray:
    """The rows that a row-sparse key holds."""
    out = rows([], 0)
    store.pull(key, out=out, ignore_sparse=False)
    return out


def rows(ids: list[int], value: float, shape: tuple[int, ...] = (6, 2), dtype: Any = np.float32) -> Any:
    return kv.RowSparseArray(full(value, (len(ids), *shape[1:]), dtype), ids, shape)


def equal(array: Any, value: float) -> bool:
    return bool((array == value).all())


# ------------------------------------------------------------------------------------------------- identity


@pytest.mark.parametrize("spelling", [str.lower, str.upper, str.title])
def test_type_is_the_name_in_lower_case(store_name: str, spelling: Callable[[str], str]) -> None:
    with kv.create(spelling(store_name)) as store:
        assert store.type == store_name


def test_a_job_of_one(store: kv.KVStore) -> None:
    assert (store.rank, store.local_rank, store.num_workers) == (0, 0, 1)
    assert store.num_dead_nodes() == store.num_dead_nodes(timeout=1) == 0
    assert store.barrier() is store._barrier() is None
    assert store.send_command_to_servers(7, "x") is store._send_command_to_servers(7, "x") is None
    store.join()


@pytest.mark.parametrize("name", ["optimizer", "OPTIMIZER", kv.KVStoreBase.OPTIMIZER])
def test_capability(store: kv.KVStore, name: str) -> None:
    assert store.is_capable(name) is True


@pytest.mark.parametrize("name", ["foo", "", None, 3])
def test_unknown_capability(store: kv.KVStore, name: Any) -> None:
    with pytest.raises(ValueError, match="unknown capability"):
        store.is_capable(name)


def test_a_store_is_a_kvstorebase(store: kv.KVStore) -> None:
    assert isinstance(store, kv.KVStoreBase)
    assert isinstance(store, kv.KVStore)


# ----------------------------------------------------------------------------------------------------- init


def test_init_then_pull(store: kv.KVStore) -> None:
    store.init("a", full(4))
    assert equal(pulled(store, "a"), 4)


def test_init_copies(store: kv.KVStore) -> None:
    value = full(4)
    store.init("a", value)
    value[...] = 9
    assert equal(pulled(store, "a"), 4)


def test_init_takes_a_value_in_a_list(store: kv.KVStore) -> None:
    store.init(3, [full(4)])
    store.init([5], [(full(6),)])
    assert equal(pulled(store, 3), 4)
    assert equal(pulled(store, 5), 6)


def test_init_of_a_list_is_all_or_nothing(store: kv.KVStore) -> None:
    store.init("a", full(1))
    with pytest.raises(kv.DuplicateKeyError):
        store.init(["b", "a", "c"], [full(2)] * 3)
    with pytest.raises(kv.ArrayError):
        store.init(["b", "c"], [full(2), "no array"])
    assert store.keys() == ["a"]
    store.init(["b", "c"], [full(2), full(3)])
    assert store.keys() == ["a", "b", "c"]


def test_init_of_nothing(store: kv.KVStore) -> None:
    store.init([], [])
    store.init("a", [])
    assert store.keys() == []
    store.init("a", full(1))


def test_keys_stand_in_the_order_of_their_init(store: kv.KVStore) -> None:
    store.init([9, -3], [full(1)] * 2)
    store.init(5, full(1))
    assert store.keys() == [9, -3, 5]


# ----------------------------------------------------------------------------------------------- push, pull


def test_a_push_replaces(store: kv.KVStore) -> None:
    store.init("a", full(4))
    store.push("a", full(1))
    store.push("a", full(2))
    assert equal(pulled(store, "a"), 2)


@pytest.mark.parametrize("container", [list, tuple])
def test_a_push_of_several_values_sums_them(store: kv.KVStore, container: type) -> None:
    store.init("a", full(100))
    store.push("a", container([full(1), full(2), full(4)]))
    assert equal(pulled(store, "a"), 7)


def test_numbers_of_values_may_change_from_push_to_push(store: kv.KVStore) -> None:
    store.init("a", full(0))
    for k in (2, 1, 8, 3, 40, 1):
        store.push("a", [full(1)] * k)
        assert equal(pulled(store, "a"), k)


def test_a_sum_goes_from_left_to_right(store: kv.KVStore) -> None:
    values = [1.0, 2.0**24, 1.0, -(2.0**24), 3.0]
    store.init("a", full(0))
    store.push("a", [full(v) for v in values])
    total = np.float32(0)
    for value in values:
        total = np.float32(total + np.float32(value))
    assert equal(pulled(store, "a"), total)
    assert total != sum(values)


def test_pushed_arrays_are_not_changed_and_not_kept(store: kv.KVStore) -> None:
    store.init(["a", "b"], [full(0), full(0)])
    one, two = full(1), full(2)
    store.push("a", one)
    store.push("b", [one, two])
    assert equal(one, 1)
    assert equal(two, 2)
    one[...] = two[...] = 99
    assert equal(pulled(store, "a"), 1)
    assert equal(pulled(store, "b"), 3)


def test_pulled_arrays_are_not_kept(store: kv.KVStore) -> None:
    store.init("a", full(1))
    out = pulled(store, "a")
    out[...] = 99
    assert equal(pulled(store, "a"), 1)
    store.push("a", full(2))
    assert equal(out, 99)


@pytest.mark.parametrize("container", [list, tuple])
def test_a_pull_fills_every_out(store: kv.KVStore, container: type) -> None:
    store.init("a", full(3))
    outs = container([full(0), full(0), full(0)])
    store.pull("a", out=outs)
    assert all(equal(out, 3) for out in outs)


def test_one_array_may_be_several_values_and_several_outs(store: kv.KVStore) -> None:
    store.init("a", full(0))
    one = full(1.5)
    store.push("a", [one, one, one])
    out = full(0)
    store.pull("a", out=[out, out])
    assert equal(out, 4.5)


def test_empty_lists_do_nothing(store: kv.KVStore) -> None:
    store.init(["a", "b"], [full(1), full(2)])
    store.push("a", [])
    store.push([], [])
    store.pull("a", out=[])
    store.pull([], out=[])
    store.pushpull([], [])
    store.push(["a", "b"], [[], full(5)])
    assert equal(pulled(store, "a"), 1)
    assert equal(pulled(store, "b"), 5)


@pytest.mark.parametrize("target", [*FLOATS, *INTEGERS])
def test_a_pull_converts(store: kv.KVStore, target: str) -> None:
    store.init("a", np.array([1.75, 2.25, 100], np.float32))
    out = np.zeros(3, dtype_of(target))
    store.pull("a", out=out)
    np.testing.assert_array_equal(out, np.array([1.75, 2.25, 100], np.float32).astype(out.dtype))


def test_a_failed_pull_writes_nothing(store: kv.KVStore) -> None:
    store.init(["a", "b"], [full(1), full(2)])
    good, bad = full(-1), full(-1, (3, 2))
    for keys, outs in ((["a", "b"], [good, bad]), (["a", "zzz"], [good, good]), ("a", [good, None])):
        with pytest.raises(kv.KVStoreError):
            store.pull(keys, out=outs)
    assert equal(good, -1)
    assert equal(bad, -1)


def test_a_failed_push_changes_nothing(store: kv.KVStore) -> None:
    store.init(["a", "b"], [full(1), full(2)])
    wrong = [full(5, (6,)), full(5, dtype=np.float64), full(5, dtype=np.int32), "text", None, [full(5)], 5.0]
    for value in wrong:
        with pytest.raises(kv.KVStoreError):
            store.push(["a", "b"], [full(5), value if not isinstance(value, list) else [value]])
    assert equal(pulled(store, "a"), 1)
    assert equal(pulled(store, "b"), 2)


# -------------------------------------------------------------------------------------------- element types


@pytest.mark.parametrize("name", [*FLOATS, *INTEGERS])
def test_every_type_is_summed_and_pulled(store: kv.KVStore, name: str) -> None:
    dtype = dtype_of(name)
    store.init("a", full(1, dtype=dtype))
    assert store.empty("a").dtype == dtype
    store.push("a", [full(2, dtype=dtype), full(3, dtype=dtype)])
    out = full(0, dtype=dtype)
    store.pull("a", out=out)
    assert equal(out, 5)


@pytest.mark.parametrize(
    ("name", "a", "b"), [("int8", 100, 100), ("uint8", 200, 100), ("int32", 2**31 - 1, 1)]
)
def test_integers_wrap(store: kv.KVStore, name: str, a: int, b: int) -> None:
    store.init("a", np.zeros(2, name))
    store.push("a", [np.full(2, a, name), np.full(2, b, name)])
    out = np.zeros(2, name)
    store.pull("a", out=out)
    bits = np.iinfo(name).bits
    assert (out.astype(object) % 2**bits == (a + b) % 2**bits).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_sixteen_bit_floats_are_summed_in_float32_and_rounded_once(store: kv.KVStore, name: str) -> None:
    dtype = dtype_of(name)
    ulp = 2.0**-10 if name == "float16" else 2.0**-7  # of 1
    store.init("a", full(0, dtype=dtype))
    store.push("a", [full(1, dtype=dtype), *[full(ulp / 4, dtype=dtype)] * 4])
    assert equal(pulled(store, "a", like=full(0, dtype=dtype)).astype(np.float64), 1 + ulp)


@pytest.mark.parametrize(
    "dtype", [bool, np.int16, np.uint16, np.uint32, np.uint64, np.complex64, "S3", object]
)
def test_other_types_are_refused(store: kv.KVStore, dtype: Any) -> None:
    with pytest.raises(kv.DTypeError, match="element type"):
        store.init("a", np.zeros(3, dtype))
    store.init("a", np.zeros(3, np.float32))
    with pytest.raises(kv.DTypeError, match="element type"):
        store.push("a", np.zeros(3, dtype))
    with pytest.raises(kv.DTypeError, match="element type"):
        store.pull("a", out=np.zeros(3, dtype))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (1, 1, 1, 1, 1), (5, 7)])
def test_every_shape(store: kv.KVStore, shape: tuple[int, ...]) -> None:
    store.init("a", full(1, shape))
    store.push("a", [full(2, shape), full(3, shape)])
    out = full(0, shape)
    store.pushpull("a", [full(4, shape), full(5, shape)], out=out)
    np.testing.assert_array_equal(out, full(9, shape))


@pytest.mark.parametrize("shape", [(6,), (3, 2), (1, 2, 3), (2, 3, 1), ()])
def test_shapes_are_never_changed_silently(store: kv.KVStore, shape: tuple[int, ...]) -> None:
    store.init("a", full(1))
    with pytest.raises(kv.ShapeError, match="'a'"):
        store.push("a", full(1, shape))
    with pytest.raises(kv.ShapeError, match="'a'"):
        store.pull("a", out=full(1, shape))


# ----------------------------------------------------------------------------------------------------- keys

KEYS: list[list[Any]] = [
    [0, 1, 2],
    [-1, -(2**63), 2**63 - 1],
    [2**31, -(2**31) - 1, 2**40],
    [np.int8(1), np.uint64(2), np.int32(-3)],
    ["", "a", "ä/日本 \n\0"],
    ["1", "01", " 1"],
    [np.str_("x"), "y", "z"],
]


@pytest.mark.parametrize("keys", KEYS, ids=str)
def test_every_key(store: kv.KVStore, keys: list[Any]) -> None:
    store.init(keys, [full(1), full(2), full(3)])
    assert store.keys() == keys
    assert {*map(type, store.keys())} <= {int, str}
    for i, key in enumerate(keys):
        store.push(key, full(10 * (i + 1)))
    assert [float(pulled(store, key)[0, 0]) for key in keys] == [10, 20, 30]


@pytest.mark.parametrize("key", [True, np.True_, 1.5, np.float32(1), b"a", None, object(), {1: 2}, {1, 2}])
def test_what_is_no_key(store: kv.KVStore, key: Any) -> None:
    store.init(1, full(1))
    for call in (
        lambda: store.init(key, full(1)),
        lambda: store.push(key, full(1)),
        lambda: store.pull([1, key], out=[full(1), full(1)]),
        lambda: store.pushpull([key], [full(1)]),
        lambda: store.view(key),
        lambda: store.row_sparse_pull(key, out=rows([], 0), row_ids=np.array([0])),
    ):
        with pytest.raises(TypeError, match="a key must be an int or a str"):
            call()


@pytest.mark.parametrize(
    "key", [2**63, -(2**63) - 1, np.uint64(2**63), 10**5000], ids=["63", "-63", "np", "huge"]
)
def test_integers_of_more_than_64_bits_are_no_keys(store: kv.KVStore, key: Any) -> None:
    with pytest.raises(kv.KeyKindError, match="64 bits"):
        store.init(key, full(1))


def test_kinds_of_keys_do_not_mix(store: kv.KVStore) -> None:
    store.init(1, full(1))
    out = rows([], 0)
    for call in (
        lambda: store.init("1", full(1)),
        lambda: store.push("1", full(1)),
        lambda: store.pull("1", out=full(1)),
        lambda: store.pushpull(["1"], [full(1)]),
        lambda: store.broadcast("1", full(1), out=full(1)),
        lambda: store.row_sparse_pull("1", out=out, row_ids=np.array([0])),
        lambda: store.push([1, "1"], [full(1), full(1)]),
    ):
        with pytest.raises(kv.KeyKindError):
            call()
    assert store.keys() == [1]


def test_a_failed_call_does_not_settle_the_kind_of_keys(store: kv.KVStore) -> None:
    with pytest.raises(kv.KeyNotFoundError):
        store.push(1, full(1))
    store.init("a", full(1))


def test_list_order_does_not_matter(store: kv.KVStore) -> None:
    store.init([5, 3, 9], [full(5), full(3), full(9)])
    outs = [full(0), full(0), full(0)]
    store.pull([9, 5, 3], out=outs)
    assert [out[0, 0] for out in outs] == [9, 5, 3]
    store.push((3, 9, 5), (full(30), full(90), full(50)))
    assert [pulled(store, key)[0, 0] for key in (3, 5, 9)] == [30, 50, 90]


def test_a_repeated_key_sums_in_a_push_and_fills_in_a_pull(store: kv.KVStore) -> None:
    store.init(["a", "b"], [full(0), full(0)])
    store.push(["a", "b", "a"], [full(1), full(10), [full(2), full(4)]])
    assert equal(pulled(store, "a"), 7)
    assert equal(pulled(store, "b"), 10)
    outs = [full(0) for _ in range(4)]
    store.pull(["a", "b", "a"], out=[outs[0], outs[1], [outs[2], outs[3]]])
    assert [out[0, 0] for out in outs] == [7, 10, 7, 7]


def test_a_repeated_key_leaves_the_caller_s_lists_alone(store: kv.KVStore) -> None:
    store.init("a", full(0))
    first, second = [full(1)], [full(2)]
    store.push(["a", "a"], [first, second])
    assert (len(first), len(second)) == (1, 1)


def test_keys_nest(store: kv.KVStore) -> None:
    keys = [["a", "b"], "c", [["d"], ["e", ("f",)]]]
    store.init(keys, [[full(1), full(2)], full(3), [[full(4)], [full(5), (full(6),)]]])
    assert store.keys() == list("abcdef")
    outs = [full(0) for _ in range(7)]
    store.pull(keys, out=[[outs[0], outs[1]], [outs[2], outs[3]], [[outs[4]], [outs[5], [outs[6]]]]])
    assert [out[0, 0] for out in outs] == [1, 2, 3, 3, 4, 5, 6]


def test_lists_may_be_ragged(store: kv.KVStore) -> None:
    store.init([1, 2, 3], [full(0)] * 3)
    store.push([1, 2, 3], [[full(1)] * 3, full(1), (full(1), full(1))])
    assert [pulled(store, key)[0, 0] for key in (1, 2, 3)] == [3, 1, 2]


@pytest.mark.parametrize("values", [[1], [1, 2, 3], [], 1, None, "ab", {"a": 1}])
def test_lengths_must_match(store: kv.KVStore, values: Any) -> None:
    store.init(["a", "b"], [full(1), full(2)])
    if isinstance(values, list):
        values = [full(v) for v in values]
    with pytest.raises(kv.ShapeError, match="2 keys"):
        store.push(["a", "b"], values)
    with pytest.raises(kv.ShapeError, match="keys"):
        store.push([["a", "b"], "a"], [values, full(1)])


# -------------------------------------------------------------------------------------- pushpull, broadcast


def test_pushpull_in_place(store: kv.KVStore) -> None:
    store.init("a", full(50))
    values = [full(1), full(2)]
    store.pushpull("a", values)
    assert all(equal(value, 3) for value in values)
    assert equal(pulled(store, "a"), 3)


def test_pushpull_with_out_leaves_the_values_alone(store: kv.KVStore) -> None:
    store.init("a", full(50))
    values, outs = [full(1), full(2)], [full(0), full(0), full(0)]
    store.pushpull("a", values, out=outs)
    assert [value[0, 0] for value in values] == [1, 2]
    assert all(equal(out, 3) for out in outs)


def test_pushpull_of_lists(store: kv.KVStore) -> None:
    store.init(["a", "b"], [full(0), full(0)])
    a, b = [full(1), full(2)], full(5)
    store.pushpull(["b", "a"], [b, a])
    assert equal(a[0], 3)
    assert equal(a[1], 3)
    assert equal(b, 5)


def test_pushpull_converts_outs(store: kv.KVStore) -> None:
    store.init("a", full(0))
    half, double = full(0, dtype=np.float16), full(0, dtype=np.float64)
    store.pushpull("a", full(1.5), out=[half, double])
    assert equal(half, 1.5)
    assert equal(double, 1.5)


def test_pushpull_updates_and_gives_the_weights(store: kv.KVStore) -> None:
    store.init("a", full(1))
    store.set_optimizer(kv.optimizer.SGD(learning_rate=0.5))
    values = [full(1), full(2)]
    store.pushpull("a", values)
    assert equal(values[0], -0.5)
    assert equal(values[1], -0.5)


def test_a_failed_pushpull_changes_neither_weights_nor_outs(store: kv.KVStore) -> None:
    store.init(["a", "b"], [full(1), full(2)])
    store.set_optimizer(kv.optimizer.SGD(learning_rate=0.5))
    value, out = full(5), full(-1)
    for outs in ([out, full(0, (3, 2))], [out, None], [out, full(0, dtype=bool)]):
        with pytest.raises(kv.KVStoreError):
            store.pushpull(["a", "b"], [value, value], out=outs)
    assert equal(out, -1)
    assert equal(value, 5)
    assert equal(pulled(store, "a"), 1)
    assert equal(pulled(store, "b"), 2)


def test_broadcast(store: kv.KVStore) -> None:
    value, outs = full(4), [full(0), full(0)]
    store.broadcast("a", value, out=outs)
    assert all(equal(out, 4) for out in outs)
    value[...] = outs[0][...] = 9
    assert equal(pulled(store, "a"), 4)


def test_broadcast_into_the_value_itself_and_of_lists(store: kv.KVStore) -> None:
    value = full(4)
    store.broadcast("a", value, out=value)
    assert equal(value, 4)
    outs = [full(0), full(0), full(0)]
    store.broadcast(["b", "c"], [full(1), full(2)], out=[outs[0], outs[1:]])
    assert [out[0, 0] for out in outs] == [1, 2, 2]


def test_a_broadcast_whose_out_does_not_fit_makes_no_key(store: kv.KVStore) -> None:
    read_only = full(0)
    read_only.flags.writeable = False
    for wrong, error in ((np.zeros(7, np.float32), kv.ShapeError), (read_only, kv.ArrayError)):
        with pytest.raises(error, match="out of key 'a'"):
            store.broadcast(["b", "a"], [full(1), full(1)], out=[full(0), wrong])
        assert "a" not in store and "b" not in store
    store.init("a", full(2))
    assert equal(pulled(store, "a"), 2)


def test_broadcast_takes_a_key_once(store: kv.KVStore) -> None:
    store.broadcast("a", full(1), out=full(0))
    with pytest.raises(kv.DuplicateKeyError):
        store.broadcast("a", full(2), out=full(0))
    with pytest.raises(kv.DuplicateKeyError):
        store.init("a", full(2))
    assert equal(pulled(store, "a"), 1)


# ----------------------------------------------------------------------------------------------- row-sparse


def test_row_sparse_keys_keep_the_union_of_rows(store: kv.KVStore) -> None:
    store.init("t", rows([0, 1, 2, 3, 4, 5], 1))
    store.push("t", [rows([4, 1], 2), rows([1], 3), rows([], 0)])
    dense = full(-1, (6, 2))
    store.pull("t", out=dense)
    assert dense[:, 0].tolist() == [0, 5, 0, 0, 2, 0]
    out = rows([3], 9)
    store.pull("t", out=out, ignore_sparse=False)
    assert out.indices.tolist() == [1, 4]
    assert out.data[:, 1].tolist() == [5, 2]


def test_row_sparse_pull_sorts_drops_repetitions_and_cuts_fractions(store: kv.KVStore) -> None:
    store.init("t", kv.RowSparseArray(np.arange(12, dtype=np.float32).reshape(6, 2), list(range(6)), (6, 2)))
    out = rows([5], 9)
    for ids in (
        [4, 1, 4, 0],
        np.array([[4, 1], [4, 0]]),
        np.array([4.9, 1.1, 0.5]),
        np.array([4, 1, 0], np.float16),
        (4, 1, 0),
    ):
        store.row_sparse_pull("t", out=out, row_ids=ids)
        assert out.indices.tolist() == [0, 1, 4]
        assert out.data.tolist() == [[0, 1], [2, 3], [8, 9]]
    store.row_sparse_pull("t", out=out, row_ids=[])
    assert out.indices.tolist() == []
    assert out.data.shape == (0, 2)


def test_rows_that_are_not_stored_come_as_zeros(store: kv.KVStore) -> None:
    store.init("t", rows([1, 3], 7))
    out = rows([], 0)
    store.row_sparse_pull("t", out=out, row_ids=[3, 2])
    assert out.indices.tolist() == [2, 3]
    assert out.data[:, 0].tolist() == [0, 7]


def test_row_sparse_pull_of_several_outs(store: kv.KVStore) -> None:
    store.init(["s", "t"], [rows(list(range(6)), 1), rows(list(range(6)), 2)])
    one, two, three = rows([], 0), rows([], 0), rows([], 0)
    store.row_sparse_pull("t", out=[one, two], row_ids=[np.array([1]), np.array([2, 3])])
    assert (one.indices.tolist(), two.indices.tolist()) == ([1], [2, 3])
    store.row_sparse_pull("t", out=[one, two], row_ids=np.array([5]))
    assert one.indices.tolist() == two.indices.tolist() == [5]
    store.row_sparse_pull(["s", "t"], out=[one, [two, three]], row_ids=[[1], [np.array([2]), np.array([3])]])
    assert [x.indices.tolist() for x in (one, two, three)] == [[1], [2], [3]]
    assert [x.data[0, 0] for x in (one, two, three)] == [1, 2, 2]


def test_row_sparse_outs_do_not_alias_the_store(store: kv.KVStore) -> None:
    value = rows(list(range(6)), 1)
    store.init("t", value)
    value.data[...] = 9
    out = rows([], 0)
    store.row_sparse_pull("t", out=out, row_ids=[0, 1])
    assert equal(out.data, 1)
    out.data[...] = 9
    store.row_sparse_pull("t", out=out, row_ids=[0, 1])
    assert equal(out.data, 1)
    pushed = rows([2], 5)
    store.push("t", pushed)
    pushed.data[...] = 9
    store.row_sparse_pull("t", out=out, row_ids=[2])
    assert equal(out.data, 5)


def test_a_row_sparse_pull_into_another_type_converts(store: kv.KVStore) -> None:
    store.init("t", rows([1, 3], 1.5))
    out = kv.RowSparseArray.zeros((6, 2), np.float16)
    store.row_sparse_pull("t", out=out, row_ids=[3, 4])
    assert out.dtype == np.float16
    assert out.data[:, 0].tolist() == [1.5, 0]


@pytest.mark.parametrize("ids", [[6], [-1], [0, 2**62], [float("nan")], [float("inf")], [1e300]])
def test_ids_out_of_range(store: kv.KVStore, ids: list[Any]) -> None:
    store.init("t", rows(list(range(6)), 1))
    out = rows([3], 9)
    with pytest.raises(IndexError, match="row_ids of key 't'") as caught:
        store.row_sparse_pull("t", out=out, row_ids=ids)
    assert isinstance(caught.value, kv.RowIndexError)
    assert (out.indices.tolist(), out.data.tolist()) == ([3], [[9, 9]])


@pytest.mark.parametrize(
    "ids",
    [
        ["a"],
        [True, False],
        np.array([True, False]),
        [[1, 2], 3],
        [[1, [2]]],
        [2**70],
        "ab",
        None,
        np.uint64([2**63]),
    ],
)
def test_what_is_no_list_of_ids(store: kv.KVStore, ids: Any) -> None:
    store.init("t", rows(list(range(6)), 1))
    with pytest.raises(kv.KVStoreError):
        store.row_sparse_pull("t", out=rows([], 0), row_ids=ids)


def test_a_plain_pull_leaves_row_sparse_outs_alone(
    store: kv.KVStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.init("t", rows(list(range(6)), 1))
    out = rows([5], 9)
    with caplog.at_level("INFO", logger="kvstore"):
        store.pull("t", out=out)
        store.pull("t", out=out)
    assert out.indices.tolist() == [5]
    assert equal(out.data, 9)
    assert sum("row-sparse outs" in record.message for record in caplog.records) == 1


def test_storages_mix_in_a_push(store: kv.KVStore) -> None:
    store.init(["d", "t"], [full(1, (6, 2)), rows([0], 1)])
    store.push("d", rows([2], 5))
    dense = full(-1, (6, 2))
    store.pull("d", out=dense)
    assert dense[:, 0].tolist() == [0, 0, 5, 0, 0, 0]
    store.push("t", full(3, (6, 2)))
    out = rows([], 0)
    store.pull("t", out=out, ignore_sparse=False)
    assert out.indices.tolist() == list(range(6))
    assert equal(out.data, 3)
    store.push(["d", "t"], [[rows([1], 1), full(2, (6, 2))], [full(2, (6, 2)), rows([1], 1)]])
    for key in ("d", "t"):
        store.pull(key, out=dense)
        assert dense[:, 0].tolist() == [2, 3, 2, 2, 2, 2]


def test_pushpull_of_row_sparse_keys_into_dense_outs(store: kv.KVStore) -> None:
    store.init("t", rows([0], 1))
    dense, sparse = full(-1, (6, 2)), rows([5], 9)
    store.pushpull("t", rows([2], 5), out=[dense, sparse])
    assert dense[:, 0].tolist() == [0, 0, 5, 0, 0, 0]
    assert sparse.indices.tolist() == [5]


def test_a_failed_pushpull_of_a_row_sparse_key_changes_nothing(store: kv.KVStore) -> None:
    store.init("t", rows([0], 1))
    fixed = full(7, (6, 2))
    fixed.flags.writeable = False
    for out in (full(7, (2, 6)), fixed, kv.RowSparseArray.zeros((6, 2)).todense, "text"):
        with pytest.raises(kv.KVStoreError):
            store.pushpull("t", rows([2], 5), out=out)
    assert stored_rows(store, "t").indices.tolist() == [0]


def test_rows_of_any_number_of_dimensions(store: kv.KVStore) -> None:
    for key, shape in enumerate([(4,), (4, 1), (4, 2, 3), (4, 0), (0, 3)]):
        store.init(key, kv.RowSparseArray.zeros(shape))
        ids = [1, 3] if shape[0] else []
        store.push(key, [rows(ids, 2, shape), rows(ids[:1], 1, shape)])
        out = full(-1, shape)
        store.pull(key, out=out)
        wanted = np.zeros(shape, np.float32)
        wanted[ids] = 2
        wanted[ids[:1]] = 3
        np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("name", [*FLOATS, *INTEGERS])
def test_row_sparse_types(store: kv.KVStore, name: str) -> None:
    dtype = dtype_of(name)
    store.init("t", rows([0], 1, dtype=dtype))
    store.push("t", [rows([1, 2], 2, dtype=dtype), rows([2], 3, dtype=dtype)])
    out = kv.RowSparseArray.zeros((6, 2), dtype)
    store.pull("t", out=out, ignore_sparse=False)
    assert out.dtype == dtype
    assert out.data.astype(float).tolist() == [[2, 2], [5, 5]]


# ------------------------------------------------------------------------------------- updaters, optimizers


@in_reach
def test_an_updater_gets_key_sum_and_live_weight(store: kv.KVStore) -> None:
    calls = []

    def accumulate(key: Any, merged: Array, stored: Array) -> None:
        calls.append((key, merged.copy(), type(stored)))
        stored += merged

    store.init("a", full(1))
    store.set_updater(accumulate)
    store.push("a", [full(2), full(3)])
    store.push("a", full(4))
    assert equal(pulled(store, "a"), 10)
    assert [(key, float(merged[0, 0]), kind) for key, merged, kind in calls] == [
        ("a", 5, np.ndarray),
        ("a", 4, np.ndarray),
    ]


@in_reach
def test_updaters_run_by_ascending_key(store: kv.KVStore) -> None:
    calls: list[Any] = []
    store.init([9, 3, 5, -1], [full(0)] * 4)
    store._set_updater(lambda key, merged, stored: calls.append((key, float(merged[0, 0]))))
    store.push([9, 3, 5, 3, -1], [full(1), full(2), full(3), full(4), full(5)])
    assert calls == [(-1, 5), (3, 6), (5, 3), (9, 1)]
    assert {type(key) for key, _ in calls} == {int}


@in_reach
def test_updaters_of_str_keys_run_in_the_order_of_init(store: kv.KVStore) -> None:
    calls: list[Any] = []
    store.init(["z", "b", "m"], [full(0)] * 3)
    store.init("a", full(0))
    store.set_updater(lambda key, merged, stored: calls.append(key))
    store.push(["a", "b", "m", "z"], [full(1)] * 4)
    assert calls == ["z", "b", "m", "a"]


@in_reach
def test_an_updater_gets_row_sparse_sums(store: kv.KVStore) -> None:
    seen = []

    def accumulate(key: Any, merged: Any, stored: Array) -> None:
        seen.append((type(merged), merged.indices.tolist()))
        stored += merged

    store.init(["d", "t"], [full(1, (6, 2)), rows([0], 1)])
    store.set_updater(accumulate)
    store.push(["d", "t"], [[rows([2], 5), rows([1, 2], 1)]] * 2)
    assert seen == [(kv.RowSparseArray, [1, 2])] * 2
    out = full(-1, (6, 2))
    store.pull("d", out=out)
    assert out[:, 0].tolist() == [1, 2, 7, 1, 1, 1]
    store.pull("t", out=out)
    assert out[:, 0].tolist() == [1, 1, 6, 0, 0, 0]


@in_reach
def test_an_updater_s_error_reaches_the_caller(store: kv.KVStore) -> None:
    def fail(key: Any, merged: Array, stored: Array) -> None:
        stored += merged
        if key == 2:
            raise RuntimeError("no such luck")

    store.init([1, 2, 3], [full(0)] * 3)
    store.set_updater(fail)
    for call in (store.push, store.pushpull):
        with pytest.raises(kv.UpdaterError, match=r"RuntimeError on key 2 .*no such luck") as caught:
            call([1, 2, 3], [full(1)] * 3)
        assert isinstance(caught.value.__cause__, RuntimeError)
    # One call in one process ends there; the rounds of several processes are each key's own.
    after = 2 if store.type == "shared" else 0
    assert [pulled(store, key)[0, 0] for key in (1, 2, 3)] == [2, 0, after]


@in_reach
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_updater_that_is_interrupted_leaves_the_weight_alone(
    store: kv.KVStore, error: type[BaseException]
) -> None:
    def interrupted(key: Any, merged: Array, stored: Array) -> None:
        stored += merged
        raise error

    store.init("a", full(1))
    store.set_updater(interrupted)
    with pytest.raises(error):
        store.push("a", full(1))
    assert equal(pulled(store, "a"), 1)


@in_reach
def test_an_updater_may_spoil_what_it_is_given(store: kv.KVStore) -> None:
    store.init("a", full(1))
    value = full(2)

    def spoil(key: Any, merged: Array, stored: Array) -> None:
        stored += merged
        merged[...] = 99

    store.set_updater(spoil)
    store.push("a", value)
    assert equal(value, 2)
    assert equal(pulled(store, "a"), 3)


def test_without_an_updater_the_sum_replaces_again(store: kv.KVStore) -> None:
    store.init("a", full(1))
    store.set_optimizer(kv.optimizer.SGD(learning_rate=1))
    store.set_updater(None)
    store.push("a", full(5))
    assert equal(pulled(store, "a"), 5)


@pytest.mark.parametrize("updater", [3, "sgd"])
def test_what_is_no_updater(store: kv.KVStore, updater: Any) -> None:
    with pytest.raises(TypeError, match="callable"):
        store.set_updater(updater)


@in_reach
def test_optimizer_and_updater_replace_each_other(store: kv.KVStore) -> None:
    store.init("a", full(0))
    store.set_updater(lambda key, merged, stored: stored.__iadd__(merged))
    store.push("a", full(1))
    assert store._updater is None
    store.set_optimizer(kv.optimizer.SGD(learning_rate=1))
    store.push("a", full(3))
    assert equal(pulled(store, "a"), -2)
    store.set_updater(lambda key, merged, stored: None)
    store.push("a", full(3))
    assert equal(pulled(store, "a"), -2)
    with pytest.raises(kv.ConfigError, match="set_optimizer"):
        store.set_learning_rate(1)


def test_a_second_optimizer_starts_with_fresh_states(store: kv.KVStore) -> None:
    store.init("a", full(0))
    for _ in range(2):
        store.set_optimizer(kv.optimizer.SGD(learning_rate=1, momentum=0.5))
        store.push("a", full(1))
    assert equal(pulled(store, "a"), -2)


def test_learning_rate_and_settings_change_while_training(store: kv.KVStore) -> None:
    store.init(["a", "b"], [full(0), full(0)])
    store.set_optimizer(kv.optimizer.SGD(learning_rate=1))
    store.push(["a", "b"], [full(1), full(1)])
    store.set_learning_rate(0.5)
    store.push("a", full(1))
    store.update_optimizer(learning_rate=0.25, rescale_grad=2.0)
    store.push("a", full(1))
    assert equal(pulled(store, "a"), -2)
    assert equal(pulled(store, "b"), -1)


@pytest.mark.parametrize(
    "changes", [{"learning_rate": "x"}, {"nonsense": 1}, {"wd": 1.0, "rescale_grad": None}]
)
def test_a_refused_change_changes_nothing(store: kv.KVStore, changes: dict[str, Any]) -> None:
    store.init("a", full(1))
    store.set_optimizer(kv.optimizer.SGD(learning_rate=1))
    with pytest.raises(ValueError):
        store.update_optimizer(**changes)
    store.push("a", full(1))
    assert equal(pulled(store, "a"), 0)


def test_changes_need_an_optimizer(store: kv.KVStore, tmp_path: Path) -> None:
    for call in (
        lambda: store.set_learning_rate(0.1),
        lambda: store.update_optimizer(wd=0.1),
        lambda: store.save_optimizer_states(tmp_path / "s"),
        lambda: store.load_optimizer_states(tmp_path / "s"),
    ):
        with pytest.raises(kv.ConfigError, match="call set_optimizer first"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_an_integer_key_has_no_gradient(store: kv.KVStore) -> None:
    store.init([1, 2], [full(1), full(1, dtype=np.int32)])
    store.set_optimizer(kv.optimizer.SGD(learning_rate=1))
    with pytest.raises(kv.DTypeError, match="key 2"):
        store.push([1, 2], [full(1), full(1, dtype=np.int32)])
    assert equal(pulled(store, 1), 1)
    assert store._updater is not None
    assert store._updater.optimizer.num_update == 0


def test_an_own_optimizer(store: kv.KVStore) -> None:
    store.init("a", full(8))
    store.set_optimizer(Halving())
    value = full(1)
    store.push("a", [value, value])
    store.pushpull("a", value)
    assert equal(value, 2)


def test_counts_follow_the_keys_that_were_updated(store: kv.KVStore, tmp_path: Path) -> None:
    store.init([1, 2, 3], [full(8)] * 3)
    store.set_optimizer(Halving(fail_on=2))
    with pytest.raises(kv.UpdaterError, match="key 2"):
        store.pushpull([1, 2, 3], [full(1)] * 3)
    own_rounds = store.type not in ("local", "device")
    assert [pulled(store, key)[0, 0] for key in (1, 2, 3)] == [4, 8, 4 if own_rounds else 8]
    store.save_optimizer_states(tmp_path / "states")
    saved = kv.optimizer.Updater(Halving())
    saved.load(tmp_path / "states", {key: full(0) for key in (1, 2, 3)})
    counts = saved.optimizer._index_update_count
    assert {key: n for key, n in counts.items() if key != 2} == ({1: 1, 3: 1} if own_rounds else {1: 1})


# ------------------------------------------------------------------------------------------- states, values


@pytest.mark.parametrize("name", ["adam", "sgd", "lamb"])
@pytest.mark.parametrize("dump", [False, True])
def test_training_goes_on_from_saved_states(store_name: str, tmp_path: Path, name: str, dump: bool) -> None:
    def fresh() -> kv.KVStore:
        store = kv.create(store_name)
        store.init(["a", "b"], [full(1), full(2, (5,))])
        store.set_optimizer(kv.optimizer.create(name, learning_rate=0.1, wd=0.01))
        return store

    def train(store: kv.KVStore, steps: range) -> None:
        for step in steps:
            store.push("a", full(step + 0.5))
            if step % 2:
                store.push("b", full(step - 0.5, (5,)))

    with fresh() as one, fresh() as two:
        train(one, range(3))
        one.save(tmp_path / "values")
        one.save_optimizer_states(tmp_path / "states", dump_optimizer=dump)
        train(one, range(3, 6))
        two.load(tmp_path / "values")
        two.load_optimizer_states(str(tmp_path / "states"))
        train(two, range(3, 6))
        for key in ("a", "b"):
            like = full(0, (2, 3) if key == "a" else (5,))
            np.testing.assert_array_equal(pulled(one, key, like), pulled(two, key, like))


def test_values_round_trip(store_name: str, tmp_path: Path) -> None:
    values = {"a": full(1), "": full(2, ()), "ä\n": full(3, (0, 2), np.int8), "t": rows([1, 3], 5)}
    with kv.create(store_name) as one, kv.create(store_name) as two:
        one.init(list(values), list(values.values()))
        one.save(tmp_path / "values")
        two.init("a", full(77))
        two.load(tmp_path / "values")
        assert sorted(two.keys()) == sorted(values)
        for key in ("a", "", "ä\n"):
            np.testing.assert_array_equal(pulled(two, key, like=values[key]), values[key])
        assert stored_rows(two, "t").indices.tolist() == [1, 3]
        assert stored_rows(two, "t").data.tolist() == [[5, 5]] * 2


# ----------------------------------------------------------------------------------------------- inspection


@in_reach
def test_a_view_is_live_and_read_only(store: kv.KVStore) -> None:
    store.init("a", full(1))
    view = store.view("a")
    assert isinstance(view, np.ndarray)
    assert not view.flags.writeable
    store.set_updater(lambda key, merged, stored: stored.__iadd__(merged))
    store.push("a", full(2))
    assert equal(store.view("a"), 3)
    with pytest.raises(ValueError, match="read-only"):
        view[...] = 5
    with pytest.raises(kv.ArrayError, match="read-only"):
        store.pull("a", out=view)


@in_reach
def test_a_view_of_a_row_sparse_key(store: kv.KVStore) -> None:
    store.init("t", rows([1, 3], 5))
    view = store.view("t")
    assert isinstance(view, kv.RowSparseArray)
    assert view.indices.tolist() == [1, 3]
    for array in (view.data, view.indices):
        assert not array.flags.writeable


@in_reach
def test_views_may_be_pushed(store: kv.KVStore) -> None:
    store.init(["a", "b", "t"], [full(1), full(2), rows([1, 3], 5)])
    store.push("a", [store.view("a"), store.view("b"), store.view("a")])
    assert equal(pulled(store, "a"), 4)
    store.push("t", [store.view("t"), store.view("t")])
    assert store.view("t").data.tolist() == [[10, 10]] * 2
    store.push(["a", "b"], [store.view("b"), store.view("a")])
    swapped = (store.view("a")[0, 0], store.view("b")[0, 0])
    # In one process key by key, a first; between processes a push reads the values at its call.
    assert swapped == ((2, 4) if store.type == "shared" else (2, 2))


def test_unknown_keys_have_no_view(store: kv.KVStore) -> None:
    with pytest.raises(KeyError, match="'a' is not initialised"):
        store.view("a")


def test_statistics_and_placement(store: kv.KVStore) -> None:
    assert store.statistics()[:4] == (0, 0, 0, 0)
    store.init(["a", "b"], [full(0), full(0, (5,), np.int8)])
    store.push("a", full(1))
    store.push(["a", "b"], [full(1), full(1, (5,), np.int8)])
    store.pull("a", out=full(0))
    store.pushpull("a", full(1))
    assert store.statistics()[:4] == (2, 29, 3, 2)
    places = store.placement()
    assert {key: sum(size for _, size in parts) for key, parts in places.items()} == {"a": 24, "b": 5}


@pytest.mark.parametrize("async_op", [False, True])
def test_statistics_leave_out_what_raised(store: kv.KVStore, async_op: bool) -> None:
    store.init(["a", "t"], [full(0), rows([0], 1)])
    wrong: list[Callable[[], Any]] = [
        lambda: store.push("a", full(1, (7,)), async_op=async_op),
        lambda: store.push("b", full(1), async_op=async_op),
        lambda: store.pushpull("a", full(1, dtype=np.int8), async_op=async_op),
        lambda: store.pull("a", out=full(1, (7,)), async_op=async_op),
        lambda: store.row_sparse_pull("t", out=rows([], 0), row_ids=[9], async_op=async_op),
    ]
    for call in wrong:
        with pytest.raises(kv.KVStoreError):
            work = call()
            if async_op:
                work.wait()
    assert store.statistics()[2:4] == (0, 0)
    for work in (
        store.push("a", full(1), async_op=async_op),
        store.pushpull("a", full(1), async_op=async_op),
        store.row_sparse_pull("t", out=rows([], 0), row_ids=[0], async_op=async_op),
    ):
        if work is not None:
            work.wait()
    assert (store.statistics().pushes, store.statistics().pulls) == (2, 2)


@pytest.mark.parametrize(("keys", "other"), [(["a", "b"], 1), ([3, 4], "a")])
def test_which_keys_and_how_many(store: kv.KVStore, keys: list[Any], other: Any) -> None:
    assert len(store) == 0
    assert store, "an empty store is a store"
    assert keys[0] not in store
    store.init(keys, [full(0), rows([0], 1)])
    assert len(store) == 2
    assert keys[0] in store
    assert keys[1] in store
    assert other not in store
    assert type(keys[0])(9) not in store
    for no_key in (1.5, None, True):
        with pytest.raises(kv.KeyKindError, match="must be an int or a str"):
            assert no_key in store
    store.close()
    for call in (lambda: len(store), lambda: keys[0] in store):
        with pytest.raises(kv.ClosedError):
            call()


# --------------------------------------------------------------------------------------- what an error says


def test_a_key_of_the_other_kind_is_told_in_english(store: kv.KVStore) -> None:
    store.init("a", full(0))
    with pytest.raises(kv.KeyKindError, match="key 0 is an int key, this store has str keys"):
        store.init(0, full(0))


def test_a_key_of_the_other_kind_is_told_of_str_too(store: kv.KVStore) -> None:
    store.init(7, full(0))
    with pytest.raises(kv.KeyKindError, match="key '0' is a str key, this store has int keys"):
        store.init("0", full(0))


@pytest.mark.parametrize(
    ("have", "given", "cast"),
    [
        ("float32", "float64", r"x\.astype\(np\.float32\) does, or x\.to\(torch\.float32\)"),
        ("bfloat16", "float32", r"x\.astype\(ml_dtypes\.bfloat16\) does, or x\.to\(torch\.bfloat16\)"),
    ],
)
def test_a_wrong_element_type_comes_with_the_cast(
    store: kv.KVStore, have: str, given: str, cast: str
) -> None:
    store.init(["a", "t"], [full(0, dtype=dtype_of(have)), rows([0], 0, dtype=dtype_of(have))])
    said = f"has element type {given}, the key has {have}: cast it, as {cast}"
    for key, value in (("a", full(1, dtype=given)), ("t", rows([0], 1, dtype=given))):
        for verb in (store.push, store.pushpull):
            with pytest.raises(kv.DTypeError, match=said):
                verb(key, value)
    store.push("a", full(1, dtype=given).astype(dtype_of(have)))


def test_the_gradient_of_an_unused_parameter_is_named(store: kv.KVStore) -> None:
    store.init("a", full(0))
    for verb in (store.push, store.pushpull):
        for value in (None, [full(1), None]):
            with pytest.raises(kv.ArrayError, match=r"key 'a' must .*NoneType: the \.grad .* first backward"):
                verb("a", value)
    with pytest.raises(kv.ArrayError) as caught:
        store.pull("a", out=[None])
    assert ".grad" not in str(caught.value)


def test_a_second_init_says_what_to_do_in_a_notebook(store: kv.KVStore) -> None:
    store.init("a", full(0))
    with pytest.raises(kv.DuplicateKeyError, match=r"notebook runs again, close\(\) the store and create"):
        store.init("a", full(1))
    with kv.create(store.type) as another:  # as the message advises
        another.init("a", full(1))
        assert equal(pulled(another, "a"), 1)


@contextmanager
def little_room() -> Iterator[None]:
    """Files of this process cannot grow, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("verb", ["save", "save_optimizer_states"])
def test_a_file_that_cannot_be_written_is_named_as_it_was_asked_for(
    store: kv.KVStore, tmp_path: Path, verb: str
) -> None:
    store.init("a", full(0, (5000,)))
    store.set_optimizer(kv.optimizer.Adam())
    store.push("a", full(1, (5000,)))
    save, path = getattr(store, verb), tmp_path / "f"
    save(path)
    before = path.read_bytes()
    with little_room(), pytest.raises(kv.StateFileError) as caught:
        save(path)
    assert str(caught.value).startswith(f"{path} cannot be written: File too large; free space")
    assert ".tmp" not in str(caught.value)
    assert isinstance(caught.value, OSError)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert path.read_bytes() == before
    with pytest.raises(kv.StateFileError, match="/none/f cannot be written: there is no folder"):
        save(tmp_path / "none" / "f")
    assert os.listdir(tmp_path) == ["f"]
    save(path)


# --------------------------------------------------------------------------------------------- asynchronous


def test_async_verbs_return_work(store: kv.KVStore) -> None:
    store.init(["a", "t"], [full(0), rows([0], 1)])
    out, both, got = full(-1), full(3), rows([], 0)
    works = [
        store.push("a", full(2), async_op=True),
        store.pull("a", out=out, async_op=True),
        store.pushpull("a", both, out=both, async_op=True),
        store.row_sparse_pull("t", out=got, row_ids=[0], async_op=True),
    ]
    for timeout in ("1", -1, float("nan")):
        with pytest.raises(kv.ArgumentError, match="number of seconds"):
            works[0].wait(timeout)
    for work in works:
        assert isinstance(work, kv.Work)
        work.wait()
        assert work.done()
        assert work.exception() is None
    assert equal(out, 2)
    assert equal(both, 3)
    assert got.indices.tolist() == [0]
    assert store.push("a", full(1)) is store.pull("a", out=out) is store.pushpull("a", out) is None


def test_an_async_error_reaches_wait(store: kv.KVStore) -> None:
    store.init("a", full(1))
    work = store.push("a", full(1, (3, 3)), async_op=True)
    assert work is not None
    for _ in range(2):
        with pytest.raises(kv.ShapeError, match="'a'"):
            work.wait()
    assert isinstance(work.exception(), kv.ShapeError)
    assert equal(pulled(store, "a"), 1)


# ------------------------------------------------------------------------------------------------- lifetime


def test_a_closed_store_says_so(store_name: str, tmp_path: Path) -> None:
    with kv.create(store_name) as store:
        store.init("a", full(1))
        assert repr(store) == f"<KVStore {store_name!r}: worker 0 of 1, 1 keys>"
    store.close()
    assert "closed" in repr(store)
    for call in (
        lambda: store.init("b", full(1)),
        lambda: store.push("a", full(1)),
        lambda: store.pull("a", out=full(1)),
        lambda: store.pushpull("a", full(1)),
        lambda: store.push("a", full(1), async_op=True),
        lambda: store.broadcast("b", full(1), out=full(1)),
        lambda: store.set_optimizer(kv.optimizer.SGD()),
        lambda: store.save(tmp_path / "x"),
        lambda: store.keys(),
        lambda: store.view("a"),
        lambda: store.statistics(),
        lambda: store.barrier(),
        lambda: store.__enter__(),
    ):
        with pytest.raises(kv.ClosedError, match="closed"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_several_threads_close_a_store(store_name: str) -> None:
    """Each returns when it is closed, as a second call does; before, some got ClosedError."""
    for _ in range(10):
        store = kv.create(store_name)
        store.init("w", np.zeros(3, np.float32))
        store.push("w", np.ones(3, np.float32), async_op=True)
        together, errors = threading.Barrier(4), []

        def close(store: Any = store, together: Any = together, errors: Any = errors) -> None:
            together.wait()
            try:
                store.close()
                assert "closed" in repr(store)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []


def test_closing_beside_other_threads_tells_them_that_it_is_closed(store_name: str) -> None:
    for _ in range(5):
        store = kv.create(store_name)
        store.init("a", full(0))
        begun, seen = threading.Barrier(5), []

        def go(store: kv.KVStore = store, begun: threading.Barrier = begun, seen: list[Any] = seen) -> None:
            begun.wait()
            try:
                while True:
                    store.push("a", full(1))
                    store.pull("a", out=full(1))
            except kv.KVStoreError as error:
                seen.append(error)

        threads = [threading.Thread(target=go) for _ in range(4)]
        for thread in threads:
            thread.start()
        begun.wait()
        store.close()
        for thread in threads:
            thread.join()
        assert [type(one) for one in seen] == [kv.ClosedError] * 4, seen


@pytest.mark.parametrize("before", [True, False])
def test_under_compression_other_keys_are_kept_and_not_pushed(store: kv.KVStore, before: bool) -> None:
    if not before:
        store.init("i", np.arange(3))
    if store.type == "local":
        with pytest.raises(kv.CapabilityError):
            store.set_gradient_compression({"type": "fp16"})
        return
    store.set_gradient_compression({"type": "fp16"})
    if before:
        store.init("i", np.arange(3))
    with pytest.raises(kv.DTypeError, match="float32"):
        store.push("i", np.arange(3))
    out = np.empty(3, np.int64)
    store.pull("i", out=out)
    assert out.tolist() == [0, 1, 2]


@in_reach
def test_views_outlive_their_store(store_name: str) -> None:
    with kv.create(store_name) as store:
        store.init("a", full(3))
        view = store.view("a")
    assert equal(view, 3)


def test_leaving_with_closes_and_lets_errors_through(store_name: str) -> None:
    with pytest.raises(ZeroDivisionError), kv.create(store_name) as store:
        raise ZeroDivisionError
    with pytest.raises(kv.ClosedError):
        store.keys()


def test_stores_of_one_process_are_strangers(store_name: str) -> None:
    with kv.create(store_name) as one, kv.create(store_name) as two:
        one.init("a", full(1))
        two.init(1, full(2))
        one.set_optimizer(kv.optimizer.SGD(learning_rate=1))
        one.push("a", full(1))
        two.push(1, full(1))
        assert equal(pulled(one, "a"), 0)
        assert equal(pulled(two, 1), 1)


def calls_of(run: Callable[[], object]) -> int:
    """How many functions of Python and C this thread calls in it."""
    counted = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counted


def work_follows_the_number_of_keys(store: kv.KVStore, few: int) -> None:
    """Eight times as many keys take no more than twelve times the calls."""
    work: dict[str, list[int]] = {}
    for start, count in ((1_000, few), (2_000, few), (3_000, 8 * few)):  # the first warms up
        keys = list(range(start, start + count))
        values, outs = ([full(1) for _ in keys] for _ in range(2))
        for name, run in {
            "init": partial(store.init, keys, values),
            "push": partial(store.push, keys, values),
            "pull": partial(store.pull, keys, outs),
            "pushpull": partial(store.pushpull, keys, values, outs),
        }.items():
            work.setdefault(name, []).append(calls_of(run))
    for name, (_, less, more) in work.items():
        assert more < 12 * less, f"{name}: {less} calls for {few} keys, {more} for {8 * few}"


def test_the_work_for_many_keys_is_in_proportion_to_their_number(store: kv.KVStore) -> None:
    work_follows_the_number_of_keys(store, 100)


# --------------------------------------------------------------------------------------------- without a key


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", FLOATS + INTEGERS)
def test_all_reduce_of_one_worker_changes_nothing(store: kv.KVStore, name: str, later: bool) -> None:
    store.init("w", full(1))
    store.set_optimizer(kv.optimizer.SGD(learning_rate=1))
    array, other = full(3, (4, 3), dtype_of(name)), full(2, ())
    works = [
        store.all_reduce(array, async_op=later),
        store.all_reduce([array, other], average=name in FLOATS, async_op=later),
    ]
    for work in works:
        assert (work is not None) == later
        if work is not None:
            work.wait()
    assert equal(array, 3)
    assert equal(other, 2)
    assert store.keys() == ["w"]
    assert equal(pulled(store, "w"), 1)


def test_all_reduce_says_what_it_does_not_take(store: kv.KVStore) -> None:
    with pytest.raises(kv.DTypeError, match="int64, and the mean of integers is no integer"):
        store.all_reduce(np.ones(3, np.int64), average=True)
    frozen = np.ones(3)
    frozen.flags.writeable = False
    for wrong in (frozen, 3.0, [full(1), "no array"], None, rows([1], 1)):
        with pytest.raises((kv.ArrayError, kv.DTypeError)):
            store.all_reduce(wrong)


def test_objects_of_one_worker(store: kv.KVStore) -> None:
    value = {"a": [1, None, 2.5, "x", b"y"], "array": full(3)}
    (gathered,) = store.all_gather_object(value)
    for found in (store.broadcast_object(value), store.broadcast_object(value, root=0), gathered):
        assert found["a"] == value["a"]
        assert found["array"] is not value["array"]
        assert equal(found["array"], 3)
    with pytest.raises(kv.ArgumentError, match=r"value\['a'\] is of type object"):
        store.all_gather_object({"a": object()})
    for root in (1, -1, "0", 0.0, True, None):
        with pytest.raises(kv.ArgumentError, match="root must be the rank of a worker"):
            store.broadcast_object(1, root=root)  # type: ignore[arg-type]


def test_a_closed_store_does_nothing_together(store_name: str) -> None:
    store = kv.create(store_name)
    store.close()
    for call in (lambda: store.all_reduce(full(1)), lambda: store.broadcast_object(1)):
        with pytest.raises(kv.ClosedError):
            call()
