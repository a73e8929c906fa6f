"""Values show exactly which pushes are in them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from histories import Numbers, Push, RecordedStore, events_in
from hypothesis import given
from hypothesis import strategies as st

import kvstore as kv

DTYPES = ["float64", "float32"]


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_each_set_of_pushes_is_told_from_all_others(dtype: str, data: st.DataObject) -> None:
    numbers = Numbers(3, words=3, cells=2, dtype=dtype)
    push = st.builds(Push, st.integers(0, 2), st.integers(1, numbers.pushes))
    pushes = data.draw(st.dictionaries(push, st.integers(1, 3), max_size=20))
    order = data.draw(st.permutations(sorted(Counter(pushes).elements())))
    value = sum((numbers.push(*one) for one in order), numbers.start())
    ((start, contents),) = numbers.read(value).pieces
    assert start == 0
    assert Counter(contents) == Counter(pushes)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_a_sum_tells_each_part(dtype: str, data: st.DataObject) -> None:
    numbers = Numbers(4, "last", dtype=dtype)
    parts = data.draw(st.dictionaries(st.integers(0, 3), st.integers(1, 1000), min_size=1))
    value = sum(numbers.push(slot, number) for slot, number in parts.items())
    ((_, contents),) = numbers.read(value).pieces
    assert dict(contents) == parts


def test_a_part_that_is_twice_in_a_sum() -> None:
    numbers = Numbers(2, "last")
    ((_, contents),) = numbers.read(2 * numbers.push(1, 7)).pieces
    assert contents == (Push(1, 7), Push(1, 7))


def test_the_first_value_has_no_pushes() -> None:
    for keeps in ("all", "last"):
        numbers = Numbers(2, keeps)
        assert numbers.read(numbers.start()).pieces == ((0, ()),)


def test_a_torn_value_tells_where() -> None:
    numbers = Numbers(1, cells=4)
    value = numbers.start() + numbers.push(0, 1)
    value[2 * numbers.cell :] += numbers.push(0, 2)[2 * numbers.cell :]
    assert numbers.read(value).pieces == ((0, (Push(0, 1),)), (2, (Push(0, 1), Push(0, 2))))


@pytest.mark.parametrize(
    "spoil", [lambda v: v * 0, lambda v: v + 0.5, lambda v: -v, lambda v: v * np.nan, lambda v: v + 1]
)
def test_what_is_no_sum_of_pushes(spoil: object) -> None:
    numbers = Numbers(2)
    value = numbers.start() + numbers.push(0, 1)
    assert numbers.read(spoil(value)).pieces[0][1] is None  # type: ignore[operator]
    assert numbers.read(numbers.empty()).pieces == ((0, None),)


def test_a_push_without_a_digit() -> None:
    with pytest.raises(ValueError, match="there are digits for 24"):
        Numbers(1, words=2, dtype="float32").push(0, 25)


def test_a_call_is_recorded_before_and_after_it(tmp_path: Path) -> None:
    path, numbers = tmp_path / "log", {"a": Numbers(1), "b": Numbers(1, "all", cells=3)}
    with kv.create("local", processes=1) as store:
        recorded = RecordedStore(store, path, numbers, 0)
        recorded.init(["a", "b"])
        store.set_optimizer(kv.optimizer.SGD(learning_rate=-1.0))
        recorded.push("a", "b")
        recorded.start("pushpull", "b")()
        recorded.pull("a", "b")
        with pytest.raises(KeyError):
            recorded.pull("c")
        recorded._called("push", ["a"], {"a": 2})  # and then it was killed
    init, push, both, pull, last = events_in(path)
    assert (init.verb, push.pushed, both.pushed) == ("init", {"a": 1, "b": 1}, {"b": 2})
    assert init.called < init.returned <= push.called < push.returned <= both.called
    assert pull.read["a"].pieces == ((0, (Push(0, 1),)),)
    assert both.read["b"].pieces == pull.read["b"].pieces == ((0, (Push(0, 1), Push(0, 2))),)
    assert pull.good and not last.good and last.returned == float("inf")


def test_a_step_is_recorded_when_its_block_ends(tmp_path: Path) -> None:
    """Reads of pushed keys are made after the block, others at once; an exception leaves nothing pushed."""
    path, numbers = tmp_path / "log", {"a": Numbers(1), "b": Numbers(1), "c": Numbers(1)}
    with kv.create("local", processes=1) as store:
        recorded = RecordedStore(store, path, numbers, 0)
        recorded.init(["a", "b", "c"])
        store.set_optimizer(kv.optimizer.SGD(learning_rate=-1.0))
        with pytest.raises(KeyError), recorded.step():
            recorded.push("a")
            raise KeyError
        with recorded.step():
            recorded.pushpull("a")
            recorded.pull("c")
            recorded.push("b")
            recorded.pull("b", "c")
            recorded.save(tmp_path / "file")
        recorded.push("a")
        recorded._called("begin", [], {})  # and then it was killed
    _, left, step, other, save, after, push, last = events_in(path)
    assert (left.verb, left.error, left.pushed) == ("begin", "KeyError", {})
    assert (step.verb, step.keys, step.pushed) == ("step", ("a", "b"), {"a": 1, "b": 1})
    assert (other.verb, other.keys, after.verb, after.keys) == ("pull", ("c",), "pull", ("b", "c"))
    assert other.returned < save.returned < step.called < after.called < step.returned
    one = ((0, (Push(0, 1),)),)
    assert {key: read.pieces for key, read in {**step.read, **after.read}.items()} == {
        "a": one, "b": one, "c": ((0, ()),)
    }  # fmt: skip
    assert {read.pieces for read in save.read.values()} == {((0, ()),)}
    assert push.pushed == {"a": 2}
    assert (last.verb, last.good) == ("begin", False)


def test_an_error_is_recorded(tmp_path: Path) -> None:
    with kv.create("local", processes=1) as store:
        recorded = RecordedStore(store, tmp_path / "log", {"a": Numbers(1)}, 0)
        with pytest.raises(kv.KeyNotFoundError):
            recorded.push("a")
    (event,) = events_in(tmp_path / "log")
    assert event.error == "KeyNotFoundError" and "'a'" in event.text and not event.good
