"""Known sums: right ones pass in every type and compression, and each wrong element is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore import compression
from kvstore.arrays.element_types import DTYPES, dtype_named
from kvstore.observe.bench.arrays import KeyArrays
from kvstore.observe.bench.key_lists import BenchKey

SHAPES = {"small": (3, 5), "large": (400, 401), "scalar": ()}
WORKERS = 3


def keys(dtype: str) -> list[BenchKey]:
    return [BenchKey(name, shape, dtype) for name, shape in SHAPES.items()]


def pushed(dtype: str) -> Iterator[KeyArrays]:
    """The values that each worker pushes."""
    for rank in range(WORKERS):
        gradients = KeyArrays(keys(dtype))
        gradients.write_pattern(rank)
        yield gradients


def wrong(arrays: KeyArrays, *args: Any, dtype: str = "float32", **options: Any) -> str | None:
    """Return the first wrong key."""
    return arrays.wrong_key(KeyArrays(keys(dtype)), *args, **options)


def summed(dtype: str) -> KeyArrays:
    """The arrays of a worker, with the sums in them."""
    first, *others = pushed(dtype)
    for other in others:
        for value, more in zip(first.values, other.values, strict=True):
            value += more
    return first


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_numpy_are_right(dtype: str) -> None:
    gradients = summed(dtype)
    assert wrong(gradients, WORKERS, dtype=dtype) is None
    assert wrong(gradients, WORKERS + 1, dtype=dtype) == "small"
    assert {value.dtype for value in gradients.values} == {dtype_named(dtype)}


@pytest.mark.parametrize("index", range(3))
def test_one_wrong_element_is_noticed(index: int) -> None:
    for place in (0, -1):
        gradients = summed("float32")
        gradients.values[index].reshape(-1)[place] += 1
        assert wrong(gradients, WORKERS) == list(SHAPES)[index]


def test_data_at_another_place_is_noticed() -> None:
    gradients = summed("float32")
    large = gradients.values[1].reshape(-1)
    large[:] = np.roll(large, 1 << 16)  # as if slices were exchanged
    assert wrong(gradients, WORKERS) == "large"


@pytest.mark.parametrize(
    "params", [{"type": "fp16"}, {"type": "bf16"}, {"type": "2bit", "threshold": 0.3}, {"type": "1bit"}]
)
def test_what_codecs_make_of_the_patterns(params: dict[str, Any]) -> None:
    """The first push of each worker, packed and unpacked by the codec itself."""
    codec = compression.create(params)
    total = KeyArrays(keys("float32"))  # of zeros
    for gradients in pushed("float32"):
        for value in gradients.values:
            packed = np.empty(codec.nbytes(value.size), np.uint8)
            codec.encode(value, np.zeros_like(value) if codec.feedback else None, packed)
            codec.decode(packed, value)
        for value, more in zip(total.values, gradients.values, strict=True):
            value += more
    assert wrong(total, WORKERS, params) is None
    if codec.feedback:
        assert wrong(total, WORKERS) == "small"


def test_a_value_that_is_replaced_is_that_of_one_worker() -> None:
    first, second, _ = pushed("float32")
    assert wrong(first, WORKERS, summed=False) is None
    first.values[1][200:] = second.values[1][200:]  # slices of different pushes
    assert wrong(first, WORKERS, summed=False) is None
    first.values[1][0, 0] = 7
    assert wrong(first, WORKERS, summed=False) == "large"


def test_arrays_are_cut_out_of_one_memory_for_each_type() -> None:
    mixed = [BenchKey("a", (3,), "float32"), BenchKey("b", (5,), "int8"), BenchKey("c", (2, 2), "float32")]
    gradients = KeyArrays(mixed)
    assert [flat.dtype.name for flat in gradients.flat] == ["float32", "int8"]
    assert [value.shape for value in gradients.values] == [(3,), (5,), (2, 2)]
    assert all(
        np.shares_memory(value, gradients.flat[i])
        for value, i in zip(gradients.values, (0, 1, 0), strict=True)
    )
    gradients.refill()
    assert [value.reshape(-1)[0] for value in gradients.values] == [np.float32(0.01), 1, np.float32(0.01)]
