"""Row-sparse arrays: their content, the invalid ones, and the memory that pulls reuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore as kv


def rows(ids: Any, shape: tuple[int, ...] = (6, 2)) -> kv.RowSparseArray:
    data = np.arange(len(ids) * int(np.prod(shape[1:])), dtype=np.float32).reshape(len(ids), *shape[1:])
    return kv.RowSparseArray(data, ids, shape)


def test_what_it_holds() -> None:
    table = rows([1, 4])
    assert (table.shape, table.ndim, table.nnz_rows, table.dtype) == ((6, 2), 2, 2, np.float32)
    assert table.indices.dtype == np.int64
    assert table.todense().tolist() == [[0, 0], [0, 1], [0, 0], [0, 0], [2, 3], [0, 0]]
    assert repr(table) == "RowSparseArray(2 of 6 rows, shape=(6, 2), dtype=float32)"


def test_memory_is_kept_where_it_fits() -> None:
    data, ids = np.ones((2, 2), np.float32), np.array([1, 4])
    table = kv.RowSparseArray(data, ids, (6, 2))
    assert np.shares_memory(table.data, data)
    copy = table.copy()
    copy.data[...] = copy.indices[...] = 0
    assert (table.data == 1).all()
    assert table.indices.tolist() == [1, 4]


@pytest.mark.parametrize("ids", [[4, 1], np.array([4, 1], np.int32), (4, 1), np.array([4, 1], np.uint8)])
def test_ids_are_sorted_with_their_rows(ids: Any) -> None:
    table = rows(ids)
    assert table.indices.tolist() == [1, 4]
    assert table.data.tolist() == [[2, 3], [0, 1]]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-9, 9)), max_size=20))
def test_rows_of_a_repeated_id_are_summed(pairs: list[tuple[int, int]]) -> None:
    data = np.array([[value, -value] for _, value in pairs], np.float64).reshape(-1, 2)
    table = kv.RowSparseArray(data, [i for i, _ in pairs], (6, 2))
    wanted = np.zeros((6, 2))
    for row, value in pairs:
        wanted[row] += [value, -value]
    np.testing.assert_array_equal(table.todense(), wanted)
    assert table.indices.tolist() == sorted({i for i, _ in pairs})


@given(st.lists(st.lists(st.sampled_from([0.0, -0.0, 1.0, np.nan]), min_size=2, max_size=2), max_size=6))
def test_from_dense_keeps_rows_that_hold_anything(table: list[list[float]]) -> None:
    dense = np.array(table, np.float32).reshape(-1, 2)
    sparse = kv.RowSparseArray.from_dense(dense)
    np.testing.assert_array_equal(sparse.todense(), np.where(dense == 0, 0, dense))
    assert sparse.indices.tolist() == [i for i, row in enumerate(dense) if (row != 0).any()]
    assert not np.shares_memory(sparse.data, dense)


def test_numpy_sees_the_dense_table() -> None:
    table = rows([1, 4])
    weight = np.ones((6, 2), np.float32)
    weight += table
    np.testing.assert_array_equal(weight, 1 + table.todense())
    assert np.asarray(table, np.float64).dtype == np.float64
    assert np.array(table).shape == (6, 2)


@pytest.mark.parametrize("shape", [(0, 3), (4,), (4, 0), (4, 2, 3), (0,)])
def test_zeros(shape: tuple[int, ...]) -> None:
    table = kv.RowSparseArray.zeros(shape, np.int32)
    assert (table.shape, table.dtype, table.nnz_rows) == (shape, np.int32, 0)
    np.testing.assert_array_equal(table.todense(), np.zeros(shape, np.int32))
    assert kv.RowSparseArray.from_dense(table.todense()).nnz_rows == 0


@pytest.mark.parametrize(
    ("data", "ids", "shape", "error"),
    [
        (np.ones((2, 2)), [0], (6, 2), kv.ShapeError),
        (np.ones((2, 2)), [[0, 1]], (6, 2), kv.ShapeError),
        (np.ones((2, 3)), [0, 1], (6, 2), kv.ShapeError),
        (np.ones(2), [0, 1], (6, 2), kv.ShapeError),
        (np.ones((2, 2)), [0, 1], (), kv.ShapeError),
        (np.ones((2, 2)), [0, 1], (-6, 2), kv.ShapeError),
        (np.ones((2, 2)), [0, 1], 6, kv.ShapeError),
        (np.ones((2, 2)), [0, 1], (2**63, 2), kv.ShapeError),
        (np.ones((2, 2)), [0, 1], (2**59, 2), kv.ShapeError),
        (np.ones((2, 0)), [0, 1], (2**60, 0), kv.ShapeError),
        (np.array(1.0), [0], (6,), kv.ShapeError),
        (np.ones((2, 2)), [0, 6], (6, 2), kv.RowIndexError),
        (np.ones((2, 2)), [-1, 0], (6, 2), kv.RowIndexError),
        (np.ones((1, 2)), [2**63], (6, 2), kv.RowIndexError),
        (np.ones((2, 2)), [0.0, 1.0], (6, 2), kv.DTypeError),
        (np.ones((2, 2)), [False, True], (6, 2), kv.DTypeError),
        (np.ones((2, 2), bool), [0, 1], (6, 2), kv.DTypeError),
        ([[1.0, 1.0]], [0], (6, 2), kv.ArrayError),
        (np.ones((2, 2)), None, (6, 2), kv.ArrayError),
    ],
)
def test_what_does_not_fit_together(data: Any, ids: Any, shape: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        kv.RowSparseArray(data, ids, shape)
    assert type(caught.value) is error


def test_a_scalar_has_no_rows() -> None:
    with pytest.raises(kv.ShapeError):
        kv.RowSparseArray.from_dense(np.array(1.0))


def test_other_attributes_are_refused() -> None:
    with pytest.raises(AttributeError):
        rows([1]).nonsense = 3  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------ as an out


def test_pulls_reuse_the_memory_of_an_out() -> None:
    with kv.create() as store:
        store.init("t", rows([0, 1, 2, 3, 4, 5]))
        out = kv.RowSparseArray.zeros((6, 2))
        store.row_sparse_pull("t", out=out, row_ids=[0, 1, 2, 3])
        address = out.data.ctypes.data
        for ids in ([5], [0, 5], [], [1, 2, 3, 4]):
            store.row_sparse_pull("t", out=out, row_ids=ids)
            assert out.indices.tolist() == ids
            assert out.data.ctypes.data == address


def test_an_out_that_may_not_be_written_gets_new_memory() -> None:
    data = np.zeros((6, 2), np.float32)
    data.flags.writeable = False
    out = kv.RowSparseArray(data, list(range(6)), (6, 2))
    with kv.create() as store:
        store.init("t", rows([0, 1, 2, 3, 4, 5]))
        store.row_sparse_pull("t", out=out, row_ids=[3])
    assert not data.any()
    assert out.data.tolist() == [[6, 7]]


def test_an_out_may_be_pushed_again() -> None:
    with kv.create() as store:
        store.init("t", rows([0, 1, 2, 3, 4, 5]))
        out = kv.RowSparseArray.zeros((6, 2))
        store.row_sparse_pull("t", out=out, row_ids=[1, 3])
        store.push("t", [out, out])
        assert out.data.tolist() == [[2, 3], [6, 7]]
        assert store.view("t").data.tolist() == [[4, 6], [12, 14]]
        store.row_sparse_pull("t", out=out, row_ids=[3])
        assert store.view("t").indices.tolist() == [1, 3]


@pytest.mark.parametrize("kind", ["int8", "int16", "uint16", "uint32", "uint64", "int64"])
def test_ids_of_any_integer_type(kind: str) -> None:
    table = kv.RowSparseArray(np.ones((2, 3), np.float32), np.array([4, 1], kind), (5, 3))
    assert table.indices.tolist() == [1, 4]


def test_repeated_half_precision_rows_are_summed_in_float32() -> None:
    rows = np.array([[2048.0], [1.0], [1.0]], np.float16)
    table = kv.RowSparseArray(rows, [0, 0, 0], (1, 1))
    assert table.data.tolist() == [[2050.0]]
