"""Keys and values as callers write them."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore as kv
from kvstore.arrays.grouping import group_values, plain_key


class Number(enum.IntEnum):
    SEVEN = 7


class Word(str, enum.Enum):
    RED = "red"


class Text(str):
    def __str__(self) -> str:
        return "something else"


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (5, 5),
        (np.int16(-5), -5),
        (Number.SEVEN, 7),
        ("a", "a"),
        (np.str_("b"), "b"),
        (Word.RED, "red"),
        (Text("t"), "t"),
    ],
)
def test_what_a_key_becomes(given: Any, key: Any) -> None:
    for found in (plain_key(given), group_values(given, 1)[0][0], group_values([given], [1])[0][0]):
        assert found == key
        assert type(found) is type(key)


@pytest.mark.parametrize(
    "key", [True, np.False_, 1.0, np.float64(1), b"a", None, (), np.array(1), 1j, object()]
)
def test_what_is_no_key(key: Any) -> None:
    with pytest.raises(kv.KeyKindError):
        plain_key(key)
    with pytest.raises((kv.KeyKindError, kv.ShapeError)):
        group_values(["a", key], [1, 2])


@pytest.mark.parametrize("key", [-(2**63), 2**63 - 1])
def test_the_ends_of_64_bits(key: int) -> None:
    assert group_values(key, "v") == [(key, ["v"])]
    for beyond in (key + (1 if key > 0 else -1), [1, key + (1 if key > 0 else -1)]):
        with pytest.raises(kv.KeyKindError, match="64 bits"):
            group_values(beyond, ["v", "v"])


def test_values_of_one_key() -> None:
    assert group_values("a", "v") == [("a", ["v"])]
    assert group_values("a", ["v", "w"]) == [("a", ["v", "w"])]
    assert group_values("a", ("v", "w")) == [("a", ["v", "w"])]
    assert group_values("a", []) == [("a", [])]


def test_keys_come_in_the_order_of_their_first_value() -> None:
    assert group_values(["b", "a", "b"], ["1", ["2", "3"], ("4",)]) == [("b", ["1", "4"]), ("a", ["2", "3"])]


def test_numpy_and_plain_keys_are_the_same() -> None:
    assert group_values([1, np.int8(1), np.uint64(1)], ["a", "b", "c"]) == [(1, ["a", "b", "c"])]


def test_the_caller_s_lists_are_not_changed() -> None:
    first, second = ["v"], ["w"]
    group_values(["a", "a", "a"], [first, second, first])
    assert (first, second) == (["v"], ["w"])


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (["a"], "v"),
        (["a"], None),
        (["a"], []),
        ([], ["v"]),
        (["a", "b"], ["v"]),
        ([["a"]], ["v"]),
        (["a"], {"a": 1}),
    ],
)
def test_keys_and_values_that_do_not_match(keys: Any, values: Any) -> None:
    with pytest.raises(kv.ShapeError, match=rf"{len(keys)} keys|1 keys"):
        group_values(keys, values)


def test_errors_say_what_the_values_are() -> None:
    with pytest.raises(kv.ShapeError, match="2 keys with 1 outs"):
        group_values(["a", "b"], ["v"], "out")


def test_kinds_do_not_mix_in_one_call() -> None:
    for keys in ([1, "a"], [[1], ["a"]], ["a", np.int8(1)]):
        with pytest.raises(kv.KeyKindError, match="int and str"):
            group_values(keys, [["v"], ["w"]])


trees = st.recursive(st.integers(0, 5), lambda inner: st.lists(inner, max_size=4), max_leaves=20)


@given(trees)
def test_any_nesting_is_its_flat_list(keys: Any) -> None:
    counter = iter(range(1000))

    def values(tree: Any) -> Any:
        return next(counter) if isinstance(tree, int) else [values(part) for part in tree]

    def pairs(tree: Any, its: Any) -> list[tuple[int, int]]:
        if isinstance(tree, int):
            return [(tree, its)]
        return [pair for a, b in zip(tree, its, strict=True) for pair in pairs(a, b)]

    its = values(keys)
    wanted: dict[int, list[int]] = {}
    for key, value in pairs(keys, its):
        wanted.setdefault(key, []).append(value)
    assert group_values(keys, its) == list(wanted.items())


@pytest.mark.parametrize("make", [list, lambda inside: (inside,), lambda inside: ["a", [inside]]])
def test_a_list_of_keys_that_contains_itself(make: Any) -> None:
    keys: list[Any] = []
    keys.append(make([keys]))
    with pytest.raises(kv.KeyKindError, match="contains itself"):
        group_values(keys, keys)


def test_keys_as_deep_as_they_may_be() -> None:
    keys, values = "k", 1
    for _ in range(20_000):
        keys, values = [keys], [values]  # type: ignore[list-item, assignment]
    assert group_values(keys, values) == [("k", [1])]


def test_one_list_of_keys_twice_is_no_circle() -> None:
    keys = ["a", "b"]
    assert group_values([keys, [keys]], [[1, 2], [[3, 4]]]) == [("a", [1, 3]), ("b", [2, 4])]
