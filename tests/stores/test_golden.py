"""Sums and row-sparse pulls against data recorded from MXNet 1.9.1 (tests/data/README.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvstore as kv

Array = npt.NDArray[Any]
Golden = Callable[[str], Any]

DTYPES = ["float32", "float16", "float64", "int32", "int64", "int8", "uint8"]


@pytest.fixture
def aggregate(golden: Golden) -> Any:
    return golden("aggregate.npz")


def sum_of(store: kv.KVStore, values: Array) -> Array:
    store.init("w", np.zeros_like(values[0]))
    store.push("w", list(values))
    out = np.empty_like(values[0])
    store.pull("w", out=out)
    return out


def units(dtype: str) -> float:
    """Unit roundoff: half the distance from 1 to the next number."""
    return float(np.finfo(dtype).eps) / 2


@pytest.mark.parametrize("m", range(1, 9))
@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "float16"])
def test_device_sums_bit_for_bit(store: kv.KVStore, aggregate: Any, dtype: str, m: int) -> None:
    # MXNet's `device` adds left to right and rounds at each step, as both of our types do.
    ours = sum_of(store, aggregate[f"{dtype}_values"][:m])
    np.testing.assert_array_equal(ours.view(np.uint8), aggregate[f"{dtype}_device_sum{m}"].view(np.uint8))


@pytest.mark.parametrize("m", range(1, 9))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_local_sums_within_rounding(store: kv.KVStore, aggregate: Any, dtype: str, m: int) -> None:
    # MXNet's `local` adds in groups of four: another order. Each of the two sums is within
    # (m-1) u sum|v| of the exact one, to first order in u.
    values = aggregate[f"{dtype}_values"][:m]
    error = np.abs(sum_of(store, values) - aggregate[f"{dtype}_local_sum{m}"])
    assert (error <= 2 * (m - 1) * units(dtype) * np.abs(values).sum(0)).all()


@pytest.mark.parametrize("m", range(1, 9))
@pytest.mark.parametrize("dtype", [name for name in DTYPES if "int" in name])
def test_local_integer_sums_are_exact(store: kv.KVStore, aggregate: Any, dtype: str, m: int) -> None:
    np.testing.assert_array_equal(
        sum_of(store, aggregate[f"{dtype}_values"][:m]), aggregate[f"{dtype}_local_sum{m}"]
    )


@pytest.mark.parametrize("m", range(1, 9))
@pytest.mark.parametrize("recorded", ["local", "device"])
def test_float16_sums(store: kv.KVStore, aggregate: Any, recorded: str, m: int) -> None:
    # MXNet rounds each of its m-1 additions to float16; we add in float32 and round once. The exact sum is
    # within (m-1) u sum|v| of MXNet's; ours is the float32 sum, correctly rounded.
    values = aggregate["float16_values"][:m]
    ours = sum_of(store, values)
    total = values[0].astype(np.float32)
    for value in values[1:]:
        total = total + value.astype(np.float32)
    np.testing.assert_array_equal(ours, total.astype(np.float16))
    error = np.abs(ours.astype(np.float64) - aggregate[f"float16_{recorded}_sum{m}"].astype(np.float64))
    # 1.01: the error of the first-order expansion in u.
    assert (error <= 1.01 * m * units("float16") * np.abs(values.astype(np.float64)).sum(0)).all()


def test_a_repeated_key(store: kv.KVStore, aggregate: Any) -> None:
    store.init([0, 1], [np.zeros(4, np.float32)] * 2)
    values = ([1, 2, 3, 4], [10] * 4, [0.5] * 4)
    store.push([0, 1, 0], [np.array(value, np.float32) for value in values])
    out = np.empty(4, np.float32)
    store.pull(0, out=out)
    np.testing.assert_array_equal(out, aggregate["repeat_key_sum"])


def test_infinities_nan_and_overflow(store: kv.KVStore, aggregate: Any) -> None:
    ours = sum_of(store, np.stack([aggregate["special_a"], aggregate["special_b"]]))
    np.testing.assert_array_equal(ours, aggregate["special_sum"])


@pytest.mark.parametrize("recorded", ["local", "device"])
def test_row_sparse_sums(store: kv.KVStore, aggregate: Any, recorded: str) -> None:
    ids: list[list[int]] = [[1, 3], [0, 3, 5], [3], [1, 5], []]
    inputs = aggregate["rsp_dense_inputs"]
    values = [kv.RowSparseArray(dense[rows], rows, (6, 4)) for dense, rows in zip(inputs, ids, strict=True)]
    store.init("w", kv.RowSparseArray.zeros((6, 4)))
    store.push("w", values)
    result = kv.RowSparseArray.zeros((6, 4))
    store.pull("w", out=result, ignore_sparse=False)
    np.testing.assert_array_equal(result.indices, aggregate[f"rsp_{recorded}_idx"])
    np.testing.assert_array_equal(
        result.data.view(np.uint32), aggregate[f"rsp_{recorded}_data"].view(np.uint32)
    )


# ------------------------------------------------------------------------------------------- row_sparse.json

PULLS = ["sorted", "dup_unsorted", "all", "empty", "float_ids", "2d"]


@pytest.fixture
def recorded(golden: Golden, store_name: str) -> dict[str, Any]:
    """The record for a type of store, by case, and the weight."""
    cases = golden("row_sparse.json")
    prefix = f"{store_name if store_name == 'local' else 'device'}_"
    return {name.removeprefix(prefix): case for name, case in cases.items()}


@pytest.fixture
def weighted(store: kv.KVStore, recorded: dict[str, Any]) -> kv.KVStore:
    """A store with the recorded weight, all of its rows present."""
    store.init("w", kv.RowSparseArray(np.array(recorded["w"], np.float32), list(range(8)), (8, 3)))
    return store


def push_recorded(store: kv.KVStore) -> None:
    one, two = np.ones((2, 3), np.float32), np.full((3, 3), 2, np.float32)
    store.push("w", [kv.RowSparseArray(one, [1, 4], (8, 3)), kv.RowSparseArray(two, [0, 4, 7], (8, 3))])


def check(out: kv.RowSparseArray, case: dict[str, Any]) -> None:
    np.testing.assert_array_equal(out.indices, np.array(case["indices"], np.int64))
    np.testing.assert_array_equal(out.data, np.array(case["data"], np.float32).reshape(-1, 3))


@pytest.mark.parametrize("case", PULLS)
def test_row_sparse_pull(weighted: kv.KVStore, recorded: dict[str, Any], case: str) -> None:
    out = kv.RowSparseArray.zeros((8, 3))
    weighted.row_sparse_pull("w", out=out, row_ids=np.array(recorded[case]["row_ids"]))
    check(out, recorded[case])


def test_ids_out_of_range_raise_where_mxnet_reads_garbage(
    weighted: kv.KVStore, recorded: dict[str, Any]
) -> None:
    with pytest.raises(kv.RowIndexError, match=r"\[0, 30\].*8 rows"):
        weighted.row_sparse_pull(
            "w", out=kv.RowSparseArray.zeros((8, 3)), row_ids=recorded["out_of_range"]["row_ids"]
        )


def test_pulls_after_a_push(weighted: kv.KVStore, recorded: dict[str, Any]) -> None:
    push_recorded(weighted)
    out = kv.RowSparseArray.zeros((8, 3))
    weighted.pull("w", out=out, ignore_sparse=False)
    check(out, recorded["after_push_sum"])
    weighted.row_sparse_pull("w", out=out, row_ids=[2, 4])
    check(out, recorded["pull_missing_row_after_push"])
    dense = np.full((8, 3), -1, np.float32)
    weighted.pull("w", out=dense)
    np.testing.assert_array_equal(dense, recorded["dense_pull_after_push"])


def test_a_plain_pull_is_ignored(weighted: kv.KVStore, recorded: dict[str, Any]) -> None:
    push_recorded(weighted)
    out = kv.RowSparseArray(np.full((1, 3), 9, np.float32), [5], (8, 3))
    weighted.pull("w", out=out)
    check(out, recorded["ignored_pull"])


def test_every_recorded_case_is_tested(recorded: dict[str, Any]) -> None:
    others = {"out_of_range", "after_push_sum", "pull_missing_row_after_push", "dense_pull_after_push"}
    ours = {name for name in recorded if not name.startswith(("local_", "device_"))}
    assert ours == {*PULLS, *others, "ignored_pull", "w"}
