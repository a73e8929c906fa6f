"""Arrays of one call that overlap: the result is that of all sums one after the other, then all outs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import portions
from references import knobs, total

from kvstore.kernels import cpu

Array = npt.NDArray[Any]
Span = tuple[int, int]  # start and length in the shared buffer

SIZE = 1200


@st.composite
def items(draw: Any, most: int) -> list[tuple[list[int], list[int], int]]:
    """Keys: places of their values and outs in the buffer, and their length."""
    result = []
    for _ in range(draw(st.integers(1, most))):
        n = draw(st.sampled_from([1, 3, 64, 100, 256, 257, 600]))
        place = st.one_of(st.integers(0, SIZE - n), st.sampled_from([0, 64]))
        srcs = draw(st.lists(place, min_size=1, max_size=4))
        outs = draw(st.lists(st.one_of(place, st.sampled_from(srcs)), max_size=3))
        result.append((srcs, outs, n))
    return result


def sequential(keys: list[tuple[list[int], list[int], int]], buffer: Array, stored: list[Array]) -> None:
    for (srcs, _, n), value in zip(keys, stored, strict=True):
        value[...] = total([buffer[at : at + n].copy() for at in srcs])
    for (_, outs, n), value in zip(keys, stored, strict=True):
        for at in outs:
            buffer[at : at + n] = value


def check(keys: list[tuple[list[int], list[int], int]]) -> None:
    buffers = [np.arange(SIZE, dtype=np.float32) ** 1.5 for _ in range(2)]
    stored = [[np.zeros(n, np.float32) for _, _, n in keys] for _ in range(2)]
    sequential(keys, buffers[0], stored[0])
    view = lambda at, n: buffers[1][at : at + n]  # noqa: E731
    cpu.reduce(
        [
            ([view(at, n) for at in srcs], dst, [view(at, n) for at in outs])
            for (srcs, outs, n), dst in zip(keys, stored[1], strict=True)
        ]
    )
    for one, two in zip(stored[0], stored[1], strict=True):
        np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(buffers[0], buffers[1])


def share(one: tuple[Array, bool], other: tuple[Array, bool], alike: bool) -> bool:
    """Whether two arrays clash, each with whether it is written; those `alike` may be the same array."""
    same = alike and one[0].ctypes.data == other[0].ctypes.data
    return (one[1] or other[1]) and not same and np.may_share_memory(one[0], other[0])


@portions(3)
@settings(max_examples=35)
@given(items(most=3))
def test_whether_arrays_are_independent(portion: int, keys: list[tuple[list[int], list[int], int]]) -> None:
    buffer = np.zeros(SIZE, np.float32)
    views = [([buffer[a : a + n] for a in srcs], [buffer[a : a + n] for a in outs]) for srcs, outs, n in keys]
    flat = [(i, (a, w)) for i, pair in enumerate(views) for w, some in enumerate(pair) for a in some]
    clash = any(share(x, y, i == j) for n, (i, x) in enumerate(flat) for j, y in flat[:n])
    assert cpu.independent(views) is not clash


@portions(6)
@settings(max_examples=20)
@given(items(most=4), st.sampled_from([0, 2**62]))
def test_overlaps_of_a_few_keys(
    portion: int, keys: list[tuple[list[int], list[int], int]], stream: int
) -> None:
    with knobs(stream=stream):
        check(keys)


@portions(6)
@settings(max_examples=16)
@given(items(most=24))
def test_overlaps_of_many_keys(portion: int, keys: list[tuple[list[int], list[int], int]]) -> None:
    check(keys)


@pytest.mark.parametrize("fillers", [0, 40])
@pytest.mark.parametrize("shorter_first", [False, True])
def test_a_value_that_begins_where_an_out_of_another_key_does(fillers: int, shorter_first: bool) -> None:
    # Three arrays begin at one place: the value and the out of one key, and the shorter value of another.
    keys: list[tuple[list[int], list[int], int]] = [([0, 600], [0], 600), ([0], [], 100)]
    if shorter_first:
        keys.reverse()
    check([*keys, *[([700 + i], [], 1) for i in range(fillers)]])


@pytest.mark.parametrize("n", [1, 5, 1000, 100_000])
@pytest.mark.parametrize("shift", [-300, -1, 1, 300])
def test_an_out_shifted_against_a_value(n: int, shift: int) -> None:
    buffer = np.arange(n + 600, dtype=np.float64)
    value, out = buffer[300 : 300 + n], buffer[300 + shift : 300 + shift + n]
    wanted = 2 * value
    dst = np.empty(n)
    with knobs(threads=2):
        cpu.reduce([([value, value], dst, [out])])
    np.testing.assert_array_equal(dst, wanted)
    np.testing.assert_array_equal(out, wanted)


def test_stored_memory_of_another_key_among_the_values() -> None:
    a, b = np.full(500, 1.0), np.full(500, 2.0)
    cpu.reduce([([b, b], a, []), ([a, b], b, [])])
    assert (a == 4).all()
    assert (b == 6).all()


@given(items(most=3))
def test_updates_of_overlapping_keys(keys: list[tuple[list[int], list[int], int]]) -> None:
    rule, params = cpu.rule_id("sgd"), (0.5, 0.0, 1.0, np.inf)
    buffers = [np.arange(SIZE, dtype=np.float32) for _ in range(2)]
    weights = [[np.ones(n, np.float32) for _, _, n in keys] for _ in range(2)]
    for (srcs, _, n), weight in zip(keys, weights[0], strict=True):
        gradient = total([buffers[0][at : at + n].copy() for at in srcs])
        cpu.update([(rule, params, [gradient], weight, None, (), [])])
    for (_, outs, n), weight in zip(keys, weights[0], strict=True):
        for at in outs:
            buffers[0][at : at + n] = weight
    view = lambda at, n: buffers[1][at : at + n]  # noqa: E731
    cpu.update(
        [
            (rule, params, [view(at, n) for at in srcs], weight, None, (), [view(at, n) for at in outs])
            for (srcs, outs, n), weight in zip(keys, weights[1], strict=True)
        ]
    )
    for one, two in zip(weights[0], weights[1], strict=True):
        np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(buffers[0], buffers[1])
