"""k-way sums: the bits of NumPy's sum from left to right, for any size, place, level and thread count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from references import DTYPES, assert_same_bits, draw, dtype_of, knobs, placed, total

from kvstore.kernels import cpu

BLOCK = 512  # elements that a kernel sums at a time
CHUNK = 128 * 1024  # bytes that a thread takes at a time
SERIAL = 192 * 1024  # bytes below which a call stays on its thread
NEVER, ALWAYS = 2**62, 0

AROUND_BLOCKS = [0, 1, 2, 7, 15, 16, 17, 31, 33, 63, 64, 65]
AROUND_BLOCKS += [BLOCK * m + d for m in (1, 2, 4) for d in (-33, -1, 0, 1, 33)]


def around_chunks(name: str) -> list[int]:
    """Sizes at which a sum of two values begins to use threads, and at which chunks end."""
    size = dtype_of(name).itemsize
    edges = [SERIAL // size // 4, CHUNK // size, 2 * CHUNK // size]
    return [edge + d for edge in edges for d in (-1, 0, 1, 65)]


def check_reduce(name: str, n: int, k: int, m: int, offsets: list[int], seed: int, keep: bool = True) -> None:
    """Sum k values into a dst and m outs, all at odd places."""
    place = iter([*offsets, *[0] * 64])
    srcs = [placed(draw(name, n, seed + i, special=True), next(place)) for i in range(k)]
    before = [src.copy() for src in srcs]
    targets = [placed(draw(name, n, 999 + i), next(place)) for i in range(m + 1)]
    cpu.reduce([(srcs, targets[0] if keep else None, targets[1:])])
    wanted = total(before)
    for target in targets if keep else targets[1:]:
        assert_same_bits(target, wanted)
    for src, value in zip(srcs, before, strict=True):
        assert_same_bits(src, value)


@given(
    name=st.sampled_from(DTYPES),
    n=st.sampled_from(AROUND_BLOCKS),
    k=st.integers(1, 20),
    m=st.integers(0, 3),
    offsets=st.lists(st.integers(0, 3), max_size=24),
    level=st.sampled_from(cpu.levels()),
    stream=st.sampled_from([NEVER, ALWAYS]),
    keep=st.booleans(),
    seed=st.integers(0, 1000),
)
@example(
    name="float32", n=257, k=17, m=1, offsets=[1], level=cpu.levels()[-1], stream=ALWAYS, keep=True, seed=0
)
def test_small_sums(
    name: str, n: int, k: int, m: int, offsets: list[int], level: str, stream: int, keep: bool, seed: int
) -> None:
    with knobs(level=level, threads=1, stream=stream):
        check_reduce(name, n, k, m, offsets, seed, keep)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("name", DTYPES)
def test_large_sums_on_several_threads(name: str, threads: int) -> None:
    for number, n in enumerate(around_chunks(name)):
        for level in cpu.levels():
            stream = ALWAYS if number % 2 else NEVER
            with knobs(level=level, threads=threads, stream=stream):
                check_reduce(name, n, 2 + number % 3, number % 2, [number % 4, 1, 0, 3], seed=number)


@pytest.mark.parametrize("k", range(1, 21))
@pytest.mark.parametrize("name", DTYPES)
def test_every_number_of_values(name: str, k: int) -> None:
    for level in cpu.levels():
        with knobs(level=level):
            check_reduce(name, BLOCK + 3, k, 1, list(range(k % 3)), seed=k)


@given(
    sizes=st.lists(st.sampled_from(AROUND_BLOCKS), max_size=70),
    threads=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_many_keys_in_one_call(sizes: list[int], threads: int, seed: int) -> None:
    names = [DTYPES[(i + seed) % len(DTYPES)] for i in range(len(sizes))]
    srcs = [
        [draw(name, n, seed + i, True), draw(name, n, i, True)]
        for i, (name, n) in enumerate(zip(names, sizes, strict=True))
    ]
    dsts = [np.empty_like(a) for a, _ in srcs]
    outs = [[np.empty_like(a)] * (i % 2) for i, (a, _) in enumerate(srcs)]
    with knobs(threads=threads):
        cpu.reduce(list(zip(srcs, dsts, outs, strict=True)))
    for values, dst, its_outs in zip(srcs, dsts, outs, strict=True):
        assert_same_bits(dst, total(values))
        for out in its_outs:
            assert_same_bits(out, dst)


def test_large_keys_beside_small_ones() -> None:
    sizes = [1, 70_000, 0, 256, 40_001, 3, 100_000]
    srcs = [[draw("float32", n, i), draw("float32", n, -i % 7)] for i, n in enumerate(sizes)]
    for threads in (1, 2, 4):
        dsts = [np.empty_like(a) for a, _ in srcs]
        with knobs(threads=threads):
            cpu.reduce([(values, dst, []) for values, dst in zip(srcs, dsts, strict=True)])
        for values, dst in zip(srcs, dsts, strict=True):
            assert_same_bits(dst, total(values))


@pytest.mark.parametrize("stream", [NEVER, ALWAYS])
@pytest.mark.parametrize("name", DTYPES)
def test_sums_in_place(name: str, stream: int) -> None:
    n = CHUNK // dtype_of(name).itemsize + 77
    with knobs(stream=stream, threads=2):
        for position in range(3):
            srcs = [draw(name, n, i, True) for i in range(3)]
            wanted = total([src.copy() for src in srcs])
            cpu.reduce([(srcs, srcs[position], [])])  # the key's own memory among the values
            assert_same_bits(srcs[position], wanted)
        srcs, dst = [draw(name, n, i, True) for i in range(3)], np.empty(n, dtype_of(name))
        wanted = total([src.copy() for src in srcs])
        cpu.reduce([(srcs, dst, srcs)])  # pushpull without out
        for array in (dst, *srcs):
            assert_same_bits(array, wanted)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", cpu.levels())
def test_every_pattern_of_sixteen_bits_survives_a_sum_of_one_and_rounds_as_numpy_does(
    name: str, level: str
) -> None:
    dtype = dtype_of(name)
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    with knobs(level=level):
        dst = np.empty_like(every)
        cpu.reduce([([every], dst, [])])
        assert_same_bits(dst, every)
        for other in (0.0, 1.0, float(every[0x1234]), -65504.0):
            values = [every, np.full(2**16, other, dtype)]
            cpu.reduce([(values, dst, [])])
            assert_same_bits(dst, total(values))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", cpu.levels())
def test_casts_round_to_nearest_even(name: str, level: str) -> None:
    dtype = dtype_of(name)
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    wide = np.empty(2**16, np.float32)
    with knobs(level=level), np.errstate(all="ignore"):
        cpu.cast(every, wide)
        assert_same_bits(wide, every.astype(np.float32))
        # Every number, the middles between neighbours, and the numbers next to the middles.
        middles = (wide[:-1].astype(np.float64) + wide[1:]) / 2
        near = middles.astype(np.float32)
        cases = np.concatenate(
            [wide, near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, -near)]
        )
        narrow = np.empty(len(cases), dtype)
        cpu.cast(cases, narrow)
        assert_same_bits(narrow, cases.astype(dtype))
        copy = np.empty_like(every)
        cpu.cast(every, copy)
        assert_same_bits(copy, every)


@given(st.integers(0, 2**32 - 1), st.sampled_from(cpu.levels()), st.sampled_from(["float16", "bfloat16"]))
def test_any_float32_is_narrowed_as_numpy_does(start: int, level: str, name: str) -> None:
    pattern = (np.arange(1000, dtype=np.uint64) * 4294967 + start).astype(np.uint32)
    wide = pattern.view(np.float32)
    narrow = np.empty(len(wide), dtype_of(name))
    with knobs(level=level), np.errstate(all="ignore"):
        cpu.cast(wide, narrow)
        assert_same_bits(narrow, wide.astype(narrow.dtype))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_the_sum_of_squares_depends_on_the_size_only(name: str) -> None:
    for n in (0, 1, 15, 17, 256, 257, 40_000, 200_003):
        a = draw(name, n, n)
        results = set()
        for level in cpu.levels():
            for threads in (1, 2, 3):
                with knobs(level=level, threads=threads):
                    results |= {cpu.sumsq(a), cpu.sumsq(placed(a, 1))}
        assert len(results) == 1
        exact = float((a.astype(np.longdouble) ** 2).sum())
        assert results.pop() == pytest.approx(exact, rel=max(n, 1) * 2.0**-52)


# ------------------------------------------------------------------------------------------------ refusals


def f32(n: int = 4) -> Any:
    return np.zeros(n, np.float32)


READ_ONLY = f32()
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("srcs", "dst", "outs", "error"),
    [
        ([], f32(), [], ValueError),
        ([f32(5)], f32(4), [], ValueError),
        ([f32(), f32(5)], f32(), [], ValueError),
        ([f32()], f32(), [f32(3)], ValueError),
        ([f32()], READ_ONLY, [], ValueError),
        ([f32()], f32(), [READ_ONLY], ValueError),
        ([f32(), np.zeros(4)], f32(), [], TypeError),
        ([f32()], np.zeros(4, np.int32), [], TypeError),
        ([f32(8)[::2]], f32(), [], TypeError),
        ([f32().astype(">f4")], f32(), [], TypeError),
        ([np.zeros(17, np.uint8)[1:].view(np.float32)], f32(), [], TypeError),
        ([np.ma.zeros(4, np.float32)], f32(), [], TypeError),
        ([np.zeros(4, bool)], None, [], TypeError),
        ([[0.0] * 4], f32(), [], TypeError),
        ([None], f32(), [], TypeError),
    ],
)
def test_what_a_kernel_refuses(srcs: Any, dst: Any, outs: Any, error: type[Exception]) -> None:
    good = f32()
    with pytest.raises(error):
        cpu.reduce([([f32() + 1], good, []), (srcs, dst, outs)])
    assert not good.any()  # the first item has not run


def test_settings_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="unknown level 'x86-64-v9'"):
        cpu.use_level("x86-64-v9")
    with pytest.raises(ValueError, match="must not be negative"):
        cpu.set_threads(-1)
    with pytest.raises(TypeError, match="not bfloat16"):
        cpu.accept_bfloat16(np.dtype(np.float16))
    with pytest.raises(KeyError):
        cpu.rule_id("no such rule")


def test_zero_threads_are_all_cores() -> None:
    with knobs():
        cpu.set_threads(3)
        assert cpu.threads() == 3
        cpu.set_threads(0)
        assert cpu.threads() >= 1


def test_more_threads_than_any_machine_has() -> None:
    values = [draw("float32", 300_000, i) for i in range(2)]
    dst = np.empty_like(values[0])
    with knobs(threads=64):
        cpu.reduce([(values, dst, [])])
    assert_same_bits(dst, total(values))
