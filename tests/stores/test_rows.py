"""Unions and sums of row-sparse arrays, against sums of dense ones."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import kvstore as kv
from kvstore.stores.rows import merge_rows, sum_rows

N = 6
some_ids = st.sets(st.integers(0, N - 1)) | st.just(set(range(N))) | st.just({1, 4})


@given(st.lists(some_ids, min_size=1, max_size=4))
def test_sums_of_rows(sets: list[set[int]]) -> None:
    sources = [
        kv.RowSparseArray(np.full((len(ids), 2), 10.0**i, np.float32), sorted(ids), (N, 2))
        for i, ids in enumerate(sets)
    ]
    union = sorted(set().union(*sets))
    ids, maps, datas = merge_rows(sources)
    assert ids.tolist() == union
    some = [source for source in sources if len(source.indices)]
    assert [data.ctypes.data for data in datas] == [source.data.ctypes.data for source in some]
    for source, where in zip(some, maps, strict=True):
        found = np.arange(len(union)) if where is None else where
        there = source.indices.tolist()
        assert found.tolist() == [there.index(row) if row in there else -1 for row in union]
    total = sum_rows(sources)
    assert total.indices.tolist() == union
    np.testing.assert_array_equal(total.todense(), sum(source.todense() for source in sources))
    assert not any(np.may_share_memory(total.indices, source.indices) for source in some)


def test_rows_that_all_have_need_no_places() -> None:
    for ids in ([1, 4], list(range(N))):
        pair = [kv.RowSparseArray(np.ones((len(ids), 2), np.float32), ids, (N, 2)) for _ in range(2)]
        assert merge_rows(pair)[1] == [None, None]
