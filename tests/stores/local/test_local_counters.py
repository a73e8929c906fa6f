"""What stores of one process count, and the times that they take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvstore as kv
from kvstore.observe.counters import CALLS, MEMORY, MOVING, SUMMING, UPDATING

F = np.float32


@pytest.fixture(params=["local", "device"])
def store(request: pytest.FixtureRequest) -> Iterator[kv.KVStore]:
    with kv.create(request.param, processes=1) as made:
        yield made


def read(store: kv.KVStore) -> dict[str, Any]:
    return store._counters.read()


def moved(store: kv.KVStore) -> tuple[int, int, int]:
    found = read(store)
    return found["sent"][MEMORY], found["received"][MEMORY], found["rounds"]


def ones(n: int = 10) -> Any:
    return np.ones(n, F)


@pytest.mark.parametrize("timed", [False, True])
def test_bytes_and_rounds_are_exact(store: kv.KVStore, timed: bool) -> None:
    if timed:
        store._counters.take_times()
    store.init(["a", "b"], [ones(), ones(1000)])
    assert moved(store) == (0, 0, 0)
    store.push("a", [ones(), ones()])
    assert moved(store) == (80, 0, 1)
    store.pull("a", out=[ones(), ones(), ones()])
    assert moved(store) == (80, 120, 1)
    store.pushpull("a", ones())
    assert moved(store) == (120, 160, 2)
    store.pushpull("a", [ones(), ones()], out=ones())
    assert moved(store) == (200, 200, 3)
    store.pushpull(["a", "b"], [ones(), ones(1000)], out=[ones(), [ones(1000), ones(1000)]])
    assert moved(store) == (4240, 8240, 5)
    store.pull(["a", "b"], out=[ones(), np.ones(1000, np.float64)])
    assert moved(store) == (4240, 12280, 5)
    plan = store.bind("b", ones(1000))
    plan()
    plan()
    assert moved(store) == (12240, 20280, 7)
    store.pushpull("a", ones(), async_op=True)
    store.wait()
    assert moved(store) == (12280, 20320, 8)
    assert dict(zip(CALLS, read(store)["calls"], strict=True)) == {
        **{"init": 1, "push": 1, "pull": 2, "pushpull": 6, "row_sparse_pull": 0, "barrier": 0}
    }
    if timed:  # else `kvstore top` of another test may have asked for them
        assert sum(read(store)["spans"]) > 0 < sum(read(store)["ns"])


def test_rows_count_by_what_is_stored(store: kv.KVStore) -> None:
    store.init("t", kv.RowSparseArray(np.ones((2, 4), F), [0, 1], (100, 4)))
    store.push("t", kv.RowSparseArray(np.ones((3, 4), F), [0, 1, 2], (100, 4)))
    assert moved(store) == (48, 0, 1)
    out = kv.RowSparseArray.zeros((100, 4))
    store.row_sparse_pull("t", out=out, row_ids=np.array([1, 2, 50]))
    assert moved(store) == (48, 48, 1)
    store.pull("t", out=out, ignore_sparse=False)
    assert moved(store) == (48, 96, 1)
    assert (read(store)["keys"], read(store)["nbytes"]) == (1, 32)


def test_calls_that_raise_count_nothing(store: kv.KVStore) -> None:
    store.init("a", ones())
    before = read(store)
    for call in (
        lambda: store.init("a", ones()),
        lambda: store.push("a", ones(3)),
        lambda: store.pushpull("a", ones(), out=ones(4)),
        lambda: store.pull("b", out=ones()),
        lambda: store.broadcast("c", ones(), out=ones(4)),
    ):
        with pytest.raises(kv.KVStoreError):
            call()
    assert read(store) == before


def test_phases_of_plain_sums_and_of_updates(store: kv.KVStore) -> None:
    store._counters.take_times()
    store.init("a", ones())
    store.pushpull("a", ones())  # in the quick way, for the last time
    store.push("a", ones())
    store.pushpull("a", ones())
    store.pull("a", out=ones())
    assert read(store)["spans"] == [0, 1, 2, 0, 0]
    store.set_optimizer(kv.optimizer.SGD(learning_rate=0.1))
    store.push("a", ones())
    store.pushpull(["a"], [ones()])
    found = read(store)
    assert [found["spans"][phase] for phase in (MOVING, SUMMING, UPDATING)] == [1, 2, 2]
    assert all(found["ns"][phase] > 0 for phase in (MOVING, SUMMING, UPDATING))


def test_the_quick_way_returns_when_no_times_are_requested_any_more(store: kv.KVStore) -> None:
    store.init("a", ones())
    for times, spans in ((0, 0), (2**64 - 1, 3), (0, 0), (2**64 - 1, 3)):
        before = sum(read(store)["spans"])
        store._counters.take_times(times)
        for _ in range(4):
            store.pushpull("a", ones())
        assert sum(read(store)["spans"]) - before == spans, "the first call notices"
    store._counters.take_times(0)
    store.pushpull("a", ones())
    backend: Any = store._backend
    assert backend._quick is backend._entries
    assert read(store)["calls"][CALLS.index("pushpull")] == read(store)["rounds"] == 17


def test_what_an_updater_does_with_the_store_is_part_of_the_update(store: kv.KVStore) -> None:
    store.init(["a", "b"], [ones(), ones()])
    out = ones()

    def update(key: object, merged: Any, stored: Any) -> None:
        store.pull("b", out=out)
        if merged[0] > 1:
            raise ValueError("too much")
        stored += merged

    store.set_updater(update)
    store._counters.take_times()
    store.push("a", ones())
    assert read(store)["spans"] == [0, 0, 0, 1, 0]
    with pytest.raises(kv.UpdaterError):
        store.push("a", 2 * ones())
    store.pull("b", out=out)
    assert read(store)["spans"] == [0, 1, 0, 1, 0]
    assert moved(store)[1] == 3 * 40


def test_keys_by_their_numbers(store: kv.KVStore) -> None:
    store.init(["b", "a"], [ones(), ones()])
    assert store._backend.names() == {0: "b", 1: "a"}


def test_int_keys_are_their_own_numbers_without_a_sign(store: kv.KVStore) -> None:
    store.init([7, -1], [ones(), ones()])
    store.push([7, -1], [ones(), ones()])
    assert store._backend.names() == {7: "7", 2**64 - 1: "-1"}


def test_how_much_a_store_holds(store: kv.KVStore, tmp_path: Any) -> None:
    store.init("a", ones())
    store.broadcast("b", ones(5), out=ones(5))
    assert (read(store)["keys"], read(store)["nbytes"]) == (2, 60)
    store.save(tmp_path / "values")
    with kv.create(store.type, processes=1) as other:
        other.init("a", ones())
        other.load(tmp_path / "values")
        assert (read(other)["keys"], read(other)["nbytes"]) == (2, 60)
        assert other.statistics()[:2] == (2, 60)
