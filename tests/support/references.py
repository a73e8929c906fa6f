"""What sums must be, in plain NumPy, and the inputs that bring out the differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvstore.arrays.element_types import DTYPES as DTYPES
from kvstore.arrays.element_types import FLOATS, HALVES
from kvstore.kernels import cpu

Array = npt.NDArray[Any]

cpu.accept_bfloat16(np.dtype(ml_dtypes.bfloat16))


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def is_half(dtype: np.dtype[Any]) -> bool:
    return dtype.name in HALVES


def is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.name in FLOATS


def total(values: Sequence[Array]) -> Array:
    """Sum from left to right; 16-bit floats in float32, rounded once; integers wrap."""
    dtype = values[0].dtype
    wide = np.dtype(np.float32) if is_half(dtype) else dtype
    with np.errstate(all="ignore"):
        acc = values[0].astype(wide)
        for value in values[1:]:
            acc = np.add(acc, value.astype(wide), dtype=wide)
        return acc.astype(dtype)


def assert_same_bits(a: Array, b: Array) -> None:
    """Equal bit for bit, signs of zeros included; any NaN equals any other."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    if np.array_equal(bits(a), bits(b)):
        return
    if is_float(a.dtype):
        with np.errstate(invalid="ignore"):  # signalling NaN
            number = ~np.isnan(a)
            np.testing.assert_array_equal(number, ~np.isnan(b))
        a, b = a[number], b[number]
    np.testing.assert_array_equal(bits(a), bits(b))


def bits(a: Array) -> Array:
    return np.ascontiguousarray(a).reshape(-1).view(f"u{a.dtype.itemsize}")


def lcg(n: int, stream: int, lo: float = -2.0, hi: float = 2.0) -> Array:
    """The numbers that the recordings were made from (tests/data/README.md)."""
    i = np.arange(n, dtype=np.uint64)
    start = np.uint64((stream + 1) * 40503 * 65537 + 12345)
    u = ((i * np.uint64(2654435761) + start) % np.uint64(2**32)).astype(np.float64) / 2.0**32
    return (lo + (hi - lo) * u).astype(np.float32)


def draw(name: str, n: int, seed: int, special: bool = False) -> Array:
    """Numbers of widely different sizes; `special` sprinkles zeros, infinities, NaN and denormals in."""
    rng = np.random.default_rng(seed)
    dtype = dtype_of(name)
    if not is_float(dtype):
        info = np.iinfo(name)
        return rng.integers(info.min, info.max, n, dtype=name, endpoint=True)
    exponent = rng.integers(-8, 9, n)
    values = np.ldexp(rng.uniform(-2, 2, n), exponent).astype(dtype)
    if special and n:
        some = [0.0, -0.0, np.inf, -np.inf, np.nan, float(ml_dtypes.finfo(dtype).smallest_subnormal)]
        some += [float(ml_dtypes.finfo(dtype).max)]
        where = rng.integers(0, n, max(1, n // 8))
        with np.errstate(all="ignore"):
            values[where] = rng.choice(some, len(where)).astype(dtype)
    return values


def placed(values: Array, offset: int) -> Array:
    """Copy of `values` that begins `offset` elements behind a cache line."""
    size = values.dtype.itemsize
    memory = np.empty(values.nbytes + 64 + offset * size, np.uint8)
    start = -memory.ctypes.data % 64 + offset * size
    array = memory[start : start + values.nbytes].view(values.dtype)
    array[...] = values
    return array


@contextmanager
def knobs(level: str | None = None, threads: int | None = None, stream: int | None = None) -> Iterator[None]:
    """Turn the kernels' settings for a while."""
    before = cpu.level(), cpu.threads(), cpu.stream_bytes()
    try:
        if level is not None:
            cpu.use_level(level)
        if threads is not None:
            cpu.set_threads(threads)
        if stream is not None:
            cpu.set_stream_bytes(stream)
        yield
    finally:
        cpu.use_level(before[0])
        cpu.set_threads(before[1])
        cpu.set_stream_bytes(before[2])
