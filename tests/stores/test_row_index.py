"""Where rows of a table lie."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.stores import row_index
from kvstore.stores.row_index import NONE, RowIndex


def test_an_index_of_rows_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_index, "_LEAST", 10)
    rng = np.random.default_rng(0)
    index, known = RowIndex(*NONE), {}
    for step in range(300):
        asked = np.unique(rng.integers(0, 2000, rng.integers(0, 30)))
        found = index.positions(asked)
        assert found.tolist() == [known.get(i, -1) for i in asked.tolist()]
        index.positions(asked)[:] = -7  # the caller's own
        assert index.positions(asked).tolist() == found.tolist()
        mark, new = index.mark(), asked[found < 0]
        index.add(new, np.arange(len(known), len(known) + len(new)))
        if step % 3:
            known.update({i: len(known) + n for n, i in enumerate(new.tolist())})
        else:
            assert (index.positions(new) >= 0).all()
            index.restore_mark(mark)
            assert (index.positions(new) < 0).all()
    ids, where = index.all_ids()
    assert dict(zip(ids.tolist(), where.tolist(), strict=True)) == known
    assert (np.diff(ids) > 0).all()
    assert index.nbytes == 16 * len(known)
