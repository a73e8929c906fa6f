"""The time of a schedule where one call pushes several keys: the same in every store."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import kvstore as kv
from kvstore.optimizer import create, lr_scheduler

STORES = ["shared", "dist_sync:1", "dist_sync:2", "p3:1", "dist_async:1"]
KEYS = "abt"  # the last is a table
#: Calls of several keys, whose counts differ before; each call is made often, since some are made quickly
#: then.
PROGRAMS = [
    ["a", "a", *["ba"] * 4],
    ["a", "a", *["ab"] * 4],
    ["b", "a", "a", *["ba", "ab"] * 4],
    ["t", "t", *["at"] * 3],
    ["t", "t", *["tb"] * 3],
    ["a", "a", *["tba"] * 3],
]


def trained(name: str, program: list[str], between: bool) -> list[list[float]]:
    """Return the value of each key after each call, or after all of them."""
    found = []
    ones: dict[str, object] = {key: np.ones((2, 3), np.float32) for key in "ab"}
    ones["t"] = kv.RowSparseArray(np.ones((2, 3), np.float32), np.arange(2), (2, 3))
    with kv.create(name) as store:
        store.init(["a", "b"], [np.zeros((2, 3), np.float32)] * 2)
        store.init("t", kv.RowSparseArray.zeros((2, 3)))
        # The rate is halved by each update, so that a sum of rates shows which rates were used.
        halved = lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1.0)
        store.set_optimizer(create("sgd", lr_scheduler=halved))
        for at, call in enumerate(program, 1):
            store.push(list(call), [ones[key] for key in call])
            if between or at == len(program):
                found.append(values(store))
    return found


def values(store: kv.KVStore) -> list[float]:
    outs = [np.empty((2, 3), np.float32) for _ in "ab"]
    store.pull(["a", "b"], out=outs)
    rows = kv.RowSparseArray.zeros((2, 3))
    store.row_sparse_pull("t", out=rows, row_ids=np.arange(2))
    return [*(float(out[0, 0]) for out in outs), float(rows.data[0, 0]) if len(rows.data) else 0.0]


@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("program", PROGRAMS, ids=" ".join)
@pytest.mark.parametrize("name", STORES)
def test_keys_of_one_call_have_the_time_that_they_have_in_one_process(
    on_servers: Callable[[str], str], name: str, program: list[str], between: bool
) -> None:
    there = on_servers(name) if ":" in name else name
    assert trained(there, program, between) == trained("local", program, between)
