"""Casts: every 16-bit number, the middles between neighbours, and any float32."""

from __future__ import annotations

import numpy as np
import pytest
from fake_cuda.cases import HostTarget, Target, fresh
from hypothesis import given, settings
from hypothesis import strategies as st
from references import Array, assert_same_bits, dtype_of

from kvstore.kernels.cuda import KernelRow, KernelSpec, all_specs

CASTS = [spec for spec in all_specs() if spec.op == "cast"]
HALVES = ["float16", "bfloat16"]


def check(target: Target, values: Array, to: str, offsets: tuple[int, int] = (0, 0)) -> None:
    dtype = dtype_of(to)
    source = target.put(values, offsets[0])
    results = [fresh(target, values.size, dtype, offsets[1]) for _ in range(2)]
    spec = KernelSpec("cast", values.dtype.name, target=to)
    target.run(spec, [KernelRow(values.size, (source.address,), results[0].address, (results[1].address,))])
    with np.errstate(all="ignore"):
        wanted = values.astype(dtype)
    for result in results:
        assert_same_bits(result.read(), wanted)


@pytest.mark.parametrize("name", HALVES)
def test_every_number(target: Target, name: str) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(dtype_of(name))
    check(target, every, "float32")
    with np.errstate(all="ignore"):
        wide = every.astype(np.float32)
        middles = ((wide[:-1].astype(np.float64) + wide[1:]) / 2).astype(np.float32)
        beside = [np.nextafter(middles, np.float32(to)) for to in (np.inf, -np.inf)]
    check(target, np.concatenate([wide, middles, *beside]), name)


@pytest.mark.parametrize("spec", CASTS, ids=lambda s: s.name)
def test_places_and_sizes_in_plain_python(interpreted: HostTarget, spec: KernelSpec) -> None:
    for n, offsets in ((1, (0, 0)), (37, (0, 0)), (37, (1, 0)), (20, (0, 1))):
        values = np.linspace(-3, 3, n, dtype=np.float32).astype(dtype_of(spec.dtype))
        check(interpreted, values, str(spec.target), offsets)


@given(st.integers(0, 2**32 - 1), st.integers(0, 20_000), st.sampled_from(HALVES), st.integers(0, 8))
@settings(max_examples=40)
def test_any_float32(compiled: HostTarget, start: int, n: int, name: str, offset: int) -> None:
    pattern = (np.arange(n, dtype=np.uint64) * np.uint64(4294967) + np.uint64(start)).astype(np.uint32)
    check(compiled, pattern.view(np.float32), name, (offset, 0))
