"""Sums: the bits of NumPy and of the CPU kernels, for any size, place and number of values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_cuda.cases import HostTarget, Target, fresh
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nightly import nightly_unless
from references import DTYPES, assert_same_bits, draw, dtype_of, total

from kvstore.kernels import cpu
from kvstore.kernels.cuda import KernelRow, KernelSpec, all_specs

SIZES = [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 63, 64, 255, 256, 257, 1000, 1023, 1025, 4095, 4097]
LARGE = [8191, 8192, 8193, 32_767, 32_768, 32_769, 70_000]


def check(
    target: Target, spec: KernelSpec, name: str, keys: list[tuple[int, int, int]], places: list[int]
) -> None:
    """Sum keys of (elements, values, outs) in one launch, at odd places."""
    place = iter([*places, *[0] * 1000])
    values = [[draw(name, n, 31 * i + j, special=True) for j in range(k)] for i, (n, k, _) in enumerate(keys)]
    sources = [[target.put(value, next(place)) for value in its] for its in values]
    targets = [[fresh(target, n, dtype_of(name), next(place)) for _ in range(m + 1)] for n, _, m in keys]
    rows = [
        KernelRow(
            numel=n,
            srcs=tuple(source.address for source in its_sources),
            dst=its_targets[0].address,
            outs=tuple(out.address for out in its_targets[1:]),
        )
        for (n, _, _), its_sources, its_targets in zip(keys, sources, targets, strict=True)
    ]
    target.run(spec, rows)
    for its, its_sources, its_targets in zip(values, sources, targets, strict=True):
        wanted = np.empty_like(its[0])
        cpu.reduce([(its, wanted, [])])
        assert_same_bits(wanted, total(its))
        for result in its_targets:
            assert_same_bits(result.read(), wanted)
        for source, value in zip(its_sources, its, strict=True):
            assert source.read().tobytes() == value.tobytes()


@pytest.mark.parametrize("spec", [s for s in all_specs() if s.op == "sum"], ids=lambda s: s.name)
def test_every_sum_in_plain_python(interpreted: HostTarget, spec: KernelSpec) -> None:
    k = spec.k or 3
    for n, places in ((1, []), (35, []), (35, [1]), (300, []), (67, [0] * k + [1])):
        check(interpreted, spec, spec.dtype, [(n, k, 1)], places)


# Every time one type of each kind is compiled, which takes seconds, and all run in plain Python.
# Scope: tests of one type run one after the other, in one process, which compiles its kernel once.
SUMMED_AS_THEY_ARE = ["float32", "float64", "int32", "int64", "int8", "uint8"]
HALVES = ["float16", "bfloat16"]
assert {*SUMMED_AS_THEY_ARE, *HALVES} == set(DTYPES)


def each_type(names: list[str]) -> pytest.MarkDecorator:
    every_time = ("float32", "int8", "bfloat16")
    return pytest.mark.parametrize(
        "name", nightly_unless(lambda name: name in every_time, names), scope="module"
    )


EACH_TYPE = each_type(SUMMED_AS_THEY_ARE + HALVES)


@EACH_TYPE
def test_sizes_around_every_edge(target: Target, name: str) -> None:
    spec = KernelSpec("sum", name)
    check(target, spec, name, [(n, 1 + n % 5, n % 3) for n in SIZES + LARGE], [])
    for places in ([1], [0, 3], [0, 0, 1]):
        check(target, spec, name, [(n, 2, 1) for n in (1, 5, 255, 1000, 8193, 33_000)], places)


@pytest.mark.parametrize("k", nightly_unless(lambda k: k == 8, [1, 2, 4, 8]))
def test_a_number_of_values_that_is_compiled_in(target: Target, k: int) -> None:
    spec = KernelSpec("sum", "float32", k)
    check(target, spec, "float32", [(n, k, n % 3) for n in SIZES + LARGE], [])


@pytest.mark.nightly
@pytest.mark.parametrize("spec", [s for s in all_specs() if s.op == "sum"], ids=lambda s: s.name)
def test_every_sum_compiled(target: Target, spec: KernelSpec) -> None:
    check(target, spec, spec.dtype, [(n, spec.k or 1 + n % 9, n % 3) for n in SIZES + LARGE], [])
    check(target, spec, spec.dtype, [(n, spec.k or 2, 1) for n in SIZES], [1])


@EACH_TYPE
@given(
    keys=st.lists(
        st.tuples(st.integers(0, 70_000), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=3
    ),
    places=st.lists(st.integers(0, 5), max_size=20),
)
@example(keys=[(70_000, 20, 3)], places=[0, 1])
@settings(max_examples=10)
def test_any_keys(
    compiled: HostTarget, name: str, keys: list[tuple[int, int, int]], places: list[int]
) -> None:
    check(compiled, KernelSpec("sum", name), name, keys, places)


@EACH_TYPE
def test_outs_among_the_sources(target: Target, name: str) -> None:
    """Pushpull without out: every value becomes the sum, and dst may be one of them."""
    n = 40_001
    values = [draw(name, n, i) for i in range(3)]
    for dst_is_source in (False, True):
        sources = [target.put(value) for value in values]
        dst = sources[1] if dst_is_source else fresh(target, n, dtype_of(name))
        addresses = tuple(source.address for source in sources)
        target.run(KernelSpec("sum", name), [KernelRow(n, addresses, dst.address, addresses)])
        for place in (dst, *sources):
            assert_same_bits(place.read(), total(values))


@each_type(HALVES)
def test_every_pattern_of_sixteen_bits(target: Target, name: str) -> None:
    dtype = dtype_of(name)
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    for other in (0.0, 1.0, float(every[0x1234]), -65504.0):
        values = [every, np.full(2**16, other, dtype)]
        places = [target.put(value) for value in values]
        dst = fresh(target, 2**16, dtype)
        target.run(KernelSpec("sum", name), [KernelRow(2**16, tuple(p.address for p in places), dst.address)])
        assert_same_bits(dst.read(), total(values))


@each_type(SUMMED_AS_THEY_ARE)
def test_sums_of_golden_data(target: Target, golden: Any, name: str) -> None:
    """Left to right, as MXNet's device strategy; float16 is summed in float32 here, and not there."""
    recorded = golden("aggregate.npz")
    for k in range(1, 9):
        values = list(recorded[f"{name}_values"][:k])
        places = [target.put(value) for value in values]
        dst = fresh(target, values[0].size, values[0].dtype)
        target.run(
            KernelSpec("sum", name),
            [KernelRow(dst.read().size, tuple(p.address for p in places), dst.address)],
        )
        assert_same_bits(dst.read(), recorded[f"{name}_device_sum{k}"].reshape(-1))
