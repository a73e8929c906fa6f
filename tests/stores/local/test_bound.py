"""Plans of host arrays: short where the arrays are plain, and right for all other arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvstore as kv
from kvstore.stores.local.bound import GeneralCall, HostCall

Array = npt.NDArray[Any]


def full(value: float, n: int = 4, dtype: Any = np.float32) -> Array:
    return np.full(n, value, dtype)


class Foreign:
    """An array of another library, whose memory may be exchanged."""

    def __init__(self, array: Array) -> None:
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.array.__array_interface__


@pytest.fixture(params=["local", "device"])
def store(request: pytest.FixtureRequest) -> Any:
    with kv.create(request.param) as made:
        made.init(["a", "b"], [full(0), full(0)])
        made.init("t", kv.RowSparseArray.zeros((4, 2)))
        yield made


KINDS: dict[str, tuple[Any, type]] = {
    "plain": (lambda array: array, HostCall),
    "foreign": (Foreign, HostCall),
    "strided": (lambda array: np.repeat(array, 2)[::2], GeneralCall),
    "swapped": (lambda array: array.astype(">f4"), GeneralCall),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_array(store: kv.KVStore, kind: str) -> None:
    make, bound = KINDS[kind]
    values, outs = [make(full(1)), make(full(2))], [make(full(-1)), make(full(-1))]
    plan = store.bind(["a", "b"], [values, values[:1]], out=[outs[0], outs[1]])
    assert type(plan._bound) is bound
    assert store.view("a").tolist() == [0] * 4
    for factor in (1, 10):
        arrays = [getattr(one, "array", one) for one in (*values, *outs)]
        arrays[0][...], arrays[1][...] = factor, 2 * factor
        plan()
        assert arrays[2].tolist() == [3 * factor] * 4
        assert arrays[3].tolist() == [factor] * 4
    assert (store.statistics().pushes, store.statistics().pulls) == (2, 2)


def test_memory_that_was_exchanged(store: kv.KVStore) -> None:
    value = Foreign(full(1))
    plan = store.bind("a", value, out=[])
    plan()
    value.array = full(7)
    plan.refresh()
    plan()
    assert store.view("a").tolist() == [7] * 4


def test_rows_conversions_and_pulls_only(store: kv.KVStore) -> None:
    rows = kv.RowSparseArray(np.ones((1, 2), np.float32), [1], (4, 2))
    wide, dense = full(-1, dtype=np.float64), np.full((4, 2), -1, np.float32)
    calls = {"a": (full(3), wide), "t": (rows, dense), "b": ([], full(-1))}
    for key, (value, out) in calls.items():
        plan = store.bind(key, value, out=out)
        assert type(plan._bound) is GeneralCall
        plan()
    assert wide.tolist() == [3] * 4
    assert dense[:, 0].tolist() == [0, 1, 0, 0]


def test_a_plan_outlives_what_it_was_made_with(store: kv.KVStore) -> None:
    plan = store.bind(["a", "b"], [full(1), full(2)])
    store.set_optimizer(kv.optimizer.SGD(learning_rate=1))
    plan()
    store.push("a", full(1))
    store.set_updater(lambda key, merged, stored: stored.__iadd__(2 * merged))
    plan()
    # In place: the pulled value was pushed again.
    assert store.view("a").tolist() == [-2 + 2 * -1] * 4
    assert store.view("b").tolist() == [-2 + 2 * -2] * 4


def test_threads_may_call_plans(store: kv.KVStore) -> None:
    import threading

    store.set_updater(lambda key, merged, stored: stored.__iadd__(merged))
    plans = [store.bind(key, full(1), out=[]) for key in ("a", "b") for _ in range(2)]

    def work(plan: kv.Plan) -> None:
        for _ in range(50):
            plan()

    threads = [threading.Thread(target=work, args=(plan,)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.view("a").tolist() == store.view("b").tolist() == [100] * 4
