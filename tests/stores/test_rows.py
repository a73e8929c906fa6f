"""The stored rows of a key: any series of changes against a dictionary of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import kvstore as kv
from kvstore.stores.rows import RowTable

N = 8
some_rows = st.dictionaries(st.integers(0, N - 1), st.integers(-9, 9), max_size=N)


def sparse(rows: dict[int, int]) -> kv.RowSparseArray:
    data = np.array([[v, -v] for v in rows.values()], np.float32).reshape(-1, 2)
    return kv.RowSparseArray(data, list(rows), (N, 2))


class Table(RuleBasedStateMachine):
    """`rows` is what the table must hold: the value of each row that is present."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, int] = {1: 5}
        self.table = RowTable(sparse(self.rows))
        self.out = kv.RowSparseArray.zeros((N, 2))

    @rule(sources=st.lists(some_rows, min_size=1, max_size=4))
    def replace(self, sources: list[dict[int, int]]) -> None:
        self.table.replace_by_sum([sparse(rows) for rows in sources])
        present = set().union(*sources)
        self.rows = {row: sum(rows.get(row, 0) for rows in sources) for row in present}

    @rule(more=some_rows)
    def add_to_itself(self, more: dict[int, int]) -> None:
        self.table.replace_by_sum([self.table.view(), sparse(more)])
        self.rows = {row: self.rows.get(row, 0) + more.get(row, 0) for row in {*self.rows, *more}}

    @rule()
    def fill(self) -> None:
        full = self.table.fill()
        assert full.shape == (N, 2)
        self.rows = {row: self.rows.get(row, 0) for row in range(N)}

    @rule(value=st.integers(-9, 9))
    def update_in_place(self, value: int) -> None:
        self.fill()
        self.table.fill()[3] += [value, -value]
        self.rows[3] += value

    @rule(ids=st.sets(st.integers(0, N - 1)))
    def gather(self, ids: set[int]) -> None:
        self.table.gather(np.array(sorted(ids), np.int64), self.out)
        assert self.out.indices.tolist() == sorted(ids)
        assert self.out.data[:, 0].tolist() == [self.rows.get(row, 0) for row in sorted(ids)]

    @rule()
    def copy_out(self) -> None:
        self.table.copy_to(self.out)
        self.check(self.out)

    @invariant()
    def the_view_shows_the_rows(self) -> None:
        self.check(self.table.view())

    @invariant()
    def the_dense_table_too(self) -> None:
        dense = self.table.dense()
        assert dense[:, 0].tolist() == [self.rows.get(row, 0) for row in range(N)]
        assert (dense[:, 0] == -dense[:, 1]).all()

    def check(self, found: Any) -> None:
        assert found.indices.tolist() == sorted(self.rows)
        assert found.data[:, 0].tolist() == [self.rows[row] for row in sorted(self.rows)]


TestTable = Table.TestCase
TestTable.settings = settings(stateful_step_count=25)
