"""Slices cover a key, and servers get about the same bytes, the same way every time."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from kvstore.stores.parameter_server.protocol.messages import KeySpec
from kvstore.stores.parameter_server.scheduler.key_table import GRAIN, cut_key, place_parts, release_parts


@given(st.lists(st.integers(0, 1 << 20), max_size=60), st.integers(1, 5))
def test_balance(parts: list[int], servers: int) -> None:
    loads = [0] * servers
    where = place_parts(parts, loads, range(servers))
    assert [
        sum(size for size, at in zip(parts, where, strict=True) if at == one) for one in range(servers)
    ] == loads
    assert max(loads) - min(loads) <= max(parts, default=0)


@given(st.lists(st.integers(0, 1 << 20), max_size=60), st.integers(1, 5))
def test_the_same_every_time(parts: list[int], servers: int) -> None:
    first, second = [0] * servers, [0] * servers
    assert place_parts(parts, first, range(servers)) == place_parts(parts, second, range(servers))


def test_the_largest_goes_first_and_loads_count() -> None:
    loads = [100, 0]
    assert place_parts([10, 90, 30], loads, range(2)) == [0, 1, 1]
    release_parts([(0, 10), (1, 120)], loads)
    assert loads == [100, 0]


@given(
    st.lists(st.integers(0, 200), min_size=0, max_size=3),
    st.sampled_from((1, 2, 4, 8)),
    st.integers(1, 1 << 21),
)
def test_dense_slices_cover_the_key(shape: list[int], itemsize: int, slice_bytes: int) -> None:
    cuts = cut_key(KeySpec("w", tuple(shape), "x"), itemsize, slice_bytes, 3)
    assert cuts[0][0] == 0
    assert cuts[-1][1] == math.prod(shape)
    assert all(one[1] == other[0] for one, other in itertools.pairwise(cuts))
    assert all(start % GRAIN == 0 for start, _, _ in cuts)
    assert all(size == (stop - start) * itemsize for start, stop, size in cuts)
    assert all(size <= max(slice_bytes, GRAIN * itemsize) for _, _, size in cuts)


@given(st.integers(0, 10**9), st.integers(0, 256), st.integers(1, 5))
def test_tables_are_cut_by_rows(rows: int, width: int, servers: int) -> None:
    cuts = cut_key(KeySpec("t", (rows, width), "float32", sparse=True), 4, 1 << 20, servers)
    assert [cuts[0][0], cuts[-1][1]] == [0, rows]
    assert all(one[1] == other[0] for one, other in itertools.pairwise(cuts))
    assert len(cuts) == (servers if rows * width * 4 > 1 << 20 and rows >= servers else 1)
