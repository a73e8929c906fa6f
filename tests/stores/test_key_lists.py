"""Calls with lists of many keys: the values of calls with one key each, and no object that stays for each."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore as kv
from kvstore.stores.key_lists import KeyLists

#: More than servers once took in one quick call; and as many as are promised to cost no more each.
MANY = [40_000, pytest.param(100_000, marks=pytest.mark.nightly)]
MODES = st.sampled_from(["push", "pushpull", "in place"])


@pytest.mark.parametrize("count", MANY)
def test_a_call_of_many_keys_has_the_values_of_each(store: kv.KVStore, count: int) -> None:
    keys = list(range(count))
    store.init(keys, [np.full(2, key % 7, np.float32) for key in keys])
    grads = [np.full(2, key % 11, np.float32) for key in keys]
    outs = [np.empty(2, np.float32) for _ in keys]
    for _ in range(2):
        store.pushpull(keys, grads, out=outs)
    assert all((out == key % 11).all() for key, out in zip(keys, outs, strict=True))
    store.push(keys[::-1], grads)
    store.pull(keys, out=outs)
    assert all((out == (count - 1 - key) % 11).all() for key, out in zip(keys, outs, strict=True))


@contextmanager
def watched() -> Iterator[list[int]]:
    """Note after each collection how many objects more than before are looked at by the garbage collector."""
    seen: list[int] = []
    gc.collect()
    gc.freeze()
    before = len(gc.get_objects())

    def note(phase: str, _: object) -> None:
        if phase == "stop":
            seen.append(len(gc.get_objects()) - before)

    gc.callbacks.append(note)
    try:
        yield seen
        gc.collect(0)
    finally:
        gc.callbacks.remove(note)
        gc.unfreeze()


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_the_collector_does_not_look_at_an_object_for_each_key(
    store: kv.KVStore, optimizer: str | None
) -> None:
    keys = list(range(20_000))
    store.init(keys, [np.zeros(2, np.float32) for _ in keys])
    if optimizer is not None:
        store.set_optimizer(kv.optimizer.create(optimizer, momentum=0.9))
    grads, outs = ([np.ones(2, np.float32) for _ in keys] for _ in range(2))
    for run in (
        lambda: store.pushpull(keys, grads, out=outs),
        lambda: store.push(keys, grads),
        lambda: store.pull(keys, out=outs),
    ):
        for _ in range(3):
            run()
        with watched() as seen:
            run()
        assert max(seen) < len(keys) // 2  # some thousands live until the second generation is looked at


Call = tuple[str, list[int]]


@given(
    st.lists(st.tuples(MODES, st.permutations(range(5))), min_size=1, max_size=5),
    st.lists(st.sampled_from(["float32", "float64", "float16"]), min_size=5, max_size=5),
    st.booleans(),
    st.sampled_from([None, "sgd"]),
    st.sampled_from(["local", "shared"]),
)
def test_a_list_of_keys_means_what_its_keys_mean_one_by_one(
    calls: list[Call], dtypes: list[str], text: bool, optimizer: str | None, name: str
) -> None:
    names: list[Any] = [f"k{at}" for at in range(5)] if text else list(range(5))
    with kv.create(name) as listed, kv.create("local", processes=1) as single:
        for store in (listed, single):
            store.init(names, [np.ones(at + 1, dtype) for at, dtype in enumerate(dtypes)])
            if optimizer is not None:
                store.set_optimizer(kv.optimizer.SGD(0.5, momentum=0.5, multi_precision=True))
        for number, (mode, order) in enumerate(calls):
            given_ = [np.full(at + 1, at - number, dtypes[at]) for at in order]
            ours, theirs = ([value.copy() for value in given_] for _ in range(2))
            keys = [names[at] for at in order]
            outs = [np.zeros_like(value) for value in given_] if mode == "pushpull" else None
            if mode == "push":
                listed.push(keys, ours)
                listed.pull(keys, out=ours)
            else:
                listed.pushpull(keys, ours, out=outs)
            for key, value in zip(keys, theirs, strict=True):
                single.pushpull(key, value)
            for got, wanted in zip(outs or ours, theirs, strict=True):
                assert got.dtype == wanted.dtype and (got == wanted).all()


def test_outs_that_are_one_array_end_with_the_highest_key(store: kv.KVStore) -> None:
    store.init([1, 2, 3], [np.full(2, key, np.float32) for key in (1, 2, 3)])
    out = np.zeros(2, np.float32)
    grads = [np.full(2, 10 * key, np.float32) for key in (3, 1, 2)]
    for _ in range(3):
        store.pull([3, 1, 2], out=[out, out, out])
        assert (out == np.full(2, store_value(store, 3), np.float32)).all()
        store.pushpull([3, 1, 2], grads, out=[out, out, out])
        assert (out == 30).all()


def store_value(store: kv.KVStore, key: int) -> float:
    out = np.zeros(2, np.float32)
    store.pull(key, out=out)
    return float(out[0])


@pytest.mark.parametrize("verb", ["push", "pushpull"])
def test_what_does_not_fit_changes_no_key(store: kv.KVStore, verb: str) -> None:
    keys = list(range(20))
    store.init(keys, [np.full(2, 5, np.float32) for _ in keys])
    good = [np.ones(2, np.float32) for _ in keys]
    store.push(keys, [np.full(2, 5, np.float32) for _ in keys])
    for bad in (np.ones(3, np.float32), np.ones(2, np.float64), "text"):
        with pytest.raises((kv.KVStoreError, TypeError)):
            getattr(store, verb)(keys, [*good[:-1], bad])
    with pytest.raises(kv.KeyNotFoundError):
        getattr(store, verb)([*keys[:-1], 99], good)
    outs = [np.zeros(2, np.float32) for _ in keys]
    store.pull(keys, out=outs)
    assert all((out == 5).all() for out in outs)


def test_integers_have_no_gradient_in_a_list_either(store: kv.KVStore) -> None:
    store.init(["a", "b"], [np.zeros(2, np.float32), np.zeros(2, np.int32)])
    values = [np.ones(2, np.float32), np.ones(2, np.int32)]
    for _ in range(3):
        store.push(["a", "b"], values)
    store.set_optimizer(kv.optimizer.create("sgd"))
    with pytest.raises(kv.DTypeError, match="'b'"):
        store.push(["a", "b"], values)


def test_a_list_with_a_discarded_key_is_not_known_any_more() -> None:
    with kv.create("local", processes=1) as store:
        store.init("a", np.zeros(2, np.float32))
        with pytest.raises(kv.ShapeError):
            store.broadcast("b", np.zeros(2, np.float32), np.zeros(3, np.float32))
        with pytest.raises(kv.KeyNotFoundError):
            store.push(["a", "b"], [np.zeros(2, np.float32)] * 2)
        store.init("b", np.zeros(2, np.float32))
        store.push(["a", "b"], [np.ones(2, np.float32)] * 2)
        assert (store.view("b") == 1).all()


@pytest.mark.parametrize("name", ["local", "shared"])
def test_lists_of_several_threads_that_share_keys_all_count(name: str) -> None:
    with kv.create(name) as store:
        store.init(list(range(30)), [np.zeros(1, np.float32) for _ in range(30)])
        store.set_optimizer(kv.optimizer.create("test", learning_rate=1))
        errors: list[BaseException] = []

        def push(keys: list[int]) -> None:
            try:
                for _ in range(100):
                    store.push(keys, [np.ones(1, np.float32) for _ in keys])
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=push, args=(list(keys),)) for keys in (range(20), range(29, 9, -1))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        found = [abs(store_one(store, key)) for key in range(30)]
        assert found == [100.0] * 10 + [200.0] * 10 + [100.0] * 10


def store_one(store: kv.KVStore, key: int) -> float:
    out = np.zeros(1, np.float32)
    store.pull(key, out=out)
    return float(out[0])


def test_equal_lists_share_what_was_made_of_them_and_few_are_kept() -> None:
    made: list[list[Any]] = []

    def make(names: list[Any]) -> int:
        made.append(names)
        return len(made)

    lists: KeyLists[int] = KeyLists()

    def find(names: list[Any]) -> int | None:
        return lists.find(names, make)

    assert find([1, 2]) == find([1, 2]) == 1
    assert find([1, 3, 2]) == 2  # other keys within the same ends
    assert find([1, 4, 2]) == 3
    assert find([]) is None
    assert find([1.5]) is None
    assert find([[1], [2]]) is None
    given_ = [5, 6]
    assert find(given_) == 4
    given_[0] = 7
    assert find([5, 6]) == 4
    lists.clear()
    assert find([1, 2]) == 5
