"""Kernels on rows of tables: merging ids, summing, gathering and updating rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from references import DTYPES, assert_same_bits, draw, dtype_of, knobs, total

from kvstore.kernels import cpu

Array = npt.NDArray[Any]

ids_lists = st.lists(st.sets(st.integers(0, 30), max_size=20), min_size=1, max_size=18)


def ascending(ids: set[int]) -> Array:
    return np.array(sorted(ids), np.int64)


@given(st.lists(st.sets(st.one_of(st.integers(0, 30), st.integers(0, 2**62))), max_size=18))
def test_merge(sets: list[set[int]]) -> None:
    lists = [ascending(ids) for ids in sets]
    rows, maps = cpu.merge_ids(lists)
    assert rows.tolist() == sorted(set().union(*sets))
    assert len(maps) == len(lists)
    for ids, positions in zip(lists, maps, strict=True):
        assert positions.tolist() == [ids.tolist().index(r) if r in ids else -1 for r in rows.tolist()]


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_locate(have: set[int], wanted: set[int]) -> None:
    positions = cpu.locate_ids(ascending(have), ascending(wanted))
    assert positions.tolist() == [sorted(have).index(i) if i in have else -1 for i in sorted(wanted)]


@given(st.integers(0, 3000), st.sampled_from([1, 2, 7]), st.sets(st.integers(0, 10_000)))
def test_locate_far_apart(n: int, step: int, wanted: set[int]) -> None:
    positions = cpu.locate_ids(np.arange(n) * step, ascending(wanted))
    assert positions.tolist() == [-1 if i % step or i >= n * step else i // step for i in sorted(wanted)]


@given(st.lists(st.integers(0, 2**63 - 2)) | st.lists(st.integers(0, 5)), st.integers(0, 300))
def test_unique(ids: list[int], beyond: int) -> None:
    """Few rows are marked in a map, a huge table's ids are sorted: the same result either way."""
    rows = min(max(ids, default=0) + 1 + beyond, 2**63 - 1)
    assert cpu.unique_ids(np.array(ids, np.int64), rows).tolist() == sorted(set(ids))


@given(st.lists(st.integers(0, 5), min_size=1), st.sampled_from([-(2**63), -1, 6, 10**6, 2**63 - 1]))
def test_ids_outside_the_table_are_refused_and_kept(ids: list[int], wrong: int) -> None:
    for rows in (6, 10**6):
        array = np.array([*ids, wrong, *ids], np.int64)
        if 0 <= wrong < rows:
            continue
        with pytest.raises(IndexError):
            cpu.unique_ids(array, rows)
        assert array.tolist() == [*ids, wrong, *ids]


@given(
    sets=ids_lists,
    name=st.sampled_from(DTYPES),
    cols=st.sampled_from([0, 1, 3, 255, 256, 257, 600]),
    level=st.sampled_from(cpu.levels()),
    seed=st.integers(0, 99),
)
def test_sums_of_rows(sets: list[set[int]], name: str, cols: int, level: str, seed: int) -> None:
    lists = [ascending(ids) for ids in sets]
    datas = [
        draw(name, len(ids) * cols, seed + i, True).reshape(len(ids), cols) for i, ids in enumerate(lists)
    ]
    rows, maps = cpu.merge_ids(lists)
    dst = np.empty((len(rows), cols), dtype_of(name))
    with knobs(level=level):
        cpu.reduce_rows(datas, maps, dst)
    for u, row in enumerate(rows.tolist()):
        have = [data[sorted(ids).index(row)] for data, ids in zip(datas, sets, strict=True) if row in ids]
        assert_same_bits(dst[u], total(have))


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("name", DTYPES)
def test_many_rows_on_several_threads(name: str, threads: int) -> None:
    rng = np.random.default_rng(1)
    n, cols = 3000, 40
    lists = [np.flatnonzero(rng.random(n) < 0.7).astype(np.int64) for _ in range(3)]
    tables = []
    for i, ids in enumerate(lists):
        table = np.zeros((n, cols), dtype_of(name))
        table[ids] = draw(name, len(ids) * cols, i).reshape(len(ids), cols)
        tables.append(table)
    rows, maps = cpu.merge_ids(lists)
    dst = np.empty((len(rows), cols), dtype_of(name))
    with knobs(threads=threads):
        cpu.reduce_rows([t[ids] for t, ids in zip(tables, lists, strict=True)], maps, dst)
    np.testing.assert_array_equal(dst, total(tables)[rows])


@pytest.mark.parametrize("level", cpu.levels())
@pytest.mark.parametrize("cols", [1, 5, 128, 257, 700])
def test_an_update_of_rows_is_an_update_of_their_sum(level: str, cols: int) -> None:
    rule, params = cpu.rule_id("adam"), (0.05, 0.03, 0.25, 0.3, 0.8, 0.999, 1e-4)
    lists = [np.array([1, 4, 6]), np.array([0, 4]), np.array([4, 7])]
    datas = [draw("float32", len(ids) * cols, i).reshape(len(ids), cols) for i, ids in enumerate(lists)]
    rows, maps = cpu.merge_ids(lists)
    summed = np.empty((len(rows), cols), np.float32)
    cpu.reduce_rows(datas, maps, summed)
    tables = [draw("float32", 9 * cols, 50 + i).reshape(9, cols) for i in range(3)]
    mine, wanted = [t.copy() for t in tables], [t.copy() for t in tables]
    mine[2] = np.abs(mine[2])
    wanted[2] = np.abs(wanted[2])
    before, kept = mine[0][rows], np.empty((len(rows), cols), np.float32)
    with knobs(level=level):
        cpu.update_rows(rule, params, datas, maps, rows, mine[0], None, (mine[1], mine[2]), kept)
        for u, row in enumerate(rows):
            w, m, v = (np.ascontiguousarray(t[row]) for t in wanted)
            cpu.update([(rule, params, [summed[u].copy()], w, None, (m, v), [])])
            for table, new in zip(wanted, (w, m, v), strict=True):
                table[row] = new
    for a, b in zip(mine, wanted, strict=True):
        assert_same_bits(a, b)
    assert_same_bits(kept, before)


def test_rows_are_kept_in_an_array_that_has_room_for_them() -> None:
    rule, params = cpu.rule_id("sgd"), (0.5, 0.0, 1.0, np.inf)
    weight, one = np.ones((4, 2), np.float32), np.ones((1, 2), np.float32)
    for kept in (np.empty((2, 2), np.float32), np.empty((1, 2)), np.empty((1, 1), np.float32)):
        with pytest.raises((TypeError, ValueError)):
            cpu.update_rows(rule, params, [one], [np.array([0])], np.array([1]), weight, None, (), kept)
    assert (weight == 1).all()


def test_rows_that_no_source_has_are_zero() -> None:
    dst = np.full((2, 3), 7, np.float32)
    cpu.reduce_rows([np.ones((1, 3), np.float32)], [np.array([-1, 0])], dst)
    assert dst.tolist() == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_nothing_to_do(shape: tuple[int, int]) -> None:
    dst = np.zeros(shape, np.float32)
    cpu.reduce_rows([np.ones((4, shape[1]), np.float32)], [np.zeros(shape[0], np.int64)], dst)


@pytest.mark.parametrize(
    ("srcs", "maps", "error"),
    [
        ([np.ones((2, 3))], [], ValueError),
        ([np.ones((2, 4))], [[0, 1]], ValueError),
        ([np.ones((2, 3))], [[0, 1, 0]], ValueError),
        ([np.ones((2, 3))], [[0, 2]], IndexError),
        ([np.ones((2, 3))], [[0, -2]], IndexError),
        ([np.ones((0, 3))], [[0, -1]], IndexError),
        ([np.ones((2, 3), np.float32)], [[0, 1]], TypeError),
        ([np.array(1.0)], [[0, 1]], TypeError),
        ([[1.0]], [[0, 1]], TypeError),
    ],
)
def test_no_map_leads_out_of_its_source(srcs: Any, maps: Any, error: type[Exception]) -> None:
    dst = np.full((2, 3), 7.0)
    with pytest.raises(error):
        cpu.reduce_rows(srcs, [np.array(m, np.int64) for m in maps], dst)
    assert (dst == 7).all()


@pytest.mark.parametrize("rows", [[4], [-1], [2**40]])
def test_no_update_leaves_its_table(rows: list[int]) -> None:
    rule, params = cpu.rule_id("sgd"), (0.5, 0.0, 1.0, np.inf)
    weight = np.ones((4, 2))
    with pytest.raises(IndexError):
        cpu.update_rows(
            rule, params, [np.ones((1, 2))], [np.array([0])], np.array(rows, np.int64), weight, None, ()
        )
    with pytest.raises(IndexError):
        cpu.group_adagrad(
            (0.5, 0.0, 1.0, np.inf, 1e-5), np.ones((1, 2)), weight, np.zeros((4, 1)), np.array(rows, np.int64)
        )
    assert (weight == 1).all()


@st.composite
def in_runs(draw: st.DrawFn, most: int = 400) -> Array:
    """Ids of rows in any order, in which there are long runs."""
    firsts = draw(st.lists(st.tuples(st.integers(0, most - 1), st.integers(1, 200)), max_size=6))
    ids = [i for first, n in firsts for i in range(first, min(first + n, most))]
    return np.array(list(dict.fromkeys(ids)), np.int64)


@given(
    rows=in_runs(),
    have=st.lists(st.tuples(in_runs(), st.booleans()), min_size=1, max_size=3),
    cols=st.sampled_from([1, 2, 5, 511, 512]),
    level=st.sampled_from(cpu.levels()),
    name=st.sampled_from(["float32", "float16", "float64"]),
)
def test_runs_of_rows_are_the_rows_one_by_one(
    rows: Array, have: list[tuple[Array, bool]], cols: int, level: str, name: str
) -> None:
    """Rows that follow each other are worked on at once; None stands for all rows, in their order."""
    rule, params, n = cpu.rule_id("sgd_momentum"), (0.05, 0.03, 0.25, 0.3, 0.8), len(rows)
    tables = [draw(name, 400 * cols, i).reshape(400, cols) for i in range(2)]
    sources, maps = [draw(name, 400 * cols, 7).reshape(400, cols)[:n]], [np.arange(n, dtype=np.int64)]
    for seed, (ids, all_there) in enumerate(have):
        where = np.full(n, -1, np.int64)
        where[: min(n, len(ids))] = ids[:n]
        sources.append(draw(name, 400 * cols, 10 + seed).reshape(400, cols))
        maps.append(np.arange(n, dtype=np.int64) if all_there else where)
    mine, wanted = [t.copy() for t in tables], [t.copy() for t in tables]
    shorter = [None if np.array_equal(m, np.arange(n)) else m for m in maps]
    before = np.empty((n, cols), mine[0].dtype)
    with knobs(level=level):
        cpu.update_rows(rule, params, sources, shorter, rows, mine[0], None, (mine[1],), before)
        for u in range(n):
            one = [source[m[u : u + 1]] for source, m in zip(sources, maps, strict=True) if m[u] >= 0]
            where = [np.zeros(1, np.int64)] * len(one)
            cpu.update_rows(rule, params, one, where, rows[u : u + 1], wanted[0], None, (wanted[1],))
        sums = [np.empty((n, cols), mine[0].dtype) for _ in range(2)]
        cpu.reduce_rows(sources, shorter, sums[0])
        for u in range(n):
            one = [source[m[u : u + 1]] for source, m in zip(sources, maps, strict=True) if m[u] >= 0]
            cpu.reduce_rows(one, [np.zeros(1, np.int64)] * len(one), sums[1][u : u + 1])
    for got, want in (*zip(mine, wanted, strict=True), (before, tables[0][rows]), (sums[0], sums[1])):
        assert_same_bits(got, want)


def test_all_rows_need_no_ids() -> None:
    rule, params = cpu.rule_id("sgd"), (0.5, 0.0, 1.0, np.inf)
    gradient, weight = draw("float32", 3000, 1), draw("float32", 3000, 2)
    wanted = weight.copy()
    cpu.update_rows(rule, params, [gradient], [None], None, weight, None, ())
    cpu.update([(rule, params, [gradient], wanted, None, (), [])])
    assert_same_bits(weight, wanted)
    with pytest.raises(IndexError, match="lacks some of 3000"):
        cpu.update_rows(rule, params, [gradient[:2999]], [None], None, weight, None, ())
    assert_same_bits(weight, wanted)
