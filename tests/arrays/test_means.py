"""Means over workers: quotients that are rounded once, and sums of them that do not overflow."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from references import DTYPES, assert_same_bits, draw, dtype_of, is_float

import kvstore as kv
from kvstore.arrays.means import check_mean, divided_array

FLOATS = [name for name in DTYPES if is_float(dtype_of(name))]


@pytest.mark.parametrize("name", FLOATS)
@given(workers=st.integers(1, 5000), seed=st.integers(0, 99))
def test_each_quotient_is_rounded_once(name: str, workers: int, seed: int) -> None:
    values = draw(name, 20, seed, special=True)
    before = values.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = divided_array(values, workers)
    wide = np.float64 if name == "float64" else np.float32
    with np.errstate(all="ignore"):
        expected = (values.astype(wide) / wide(workers)).astype(values.dtype)
    assert_same_bits(found, expected)
    assert_same_bits(values, before)


@pytest.mark.parametrize("name", FLOATS)
def test_shapes_stay_and_means_of_large_values_are_finite(name: str) -> None:
    for shape in ((), (0,), (2, 3)):
        largest = np.full(shape, 60000, dtype_of(name))
        found = divided_array(largest, 2)
        assert (type(found), found.shape, found.dtype) == (np.ndarray, shape, largest.dtype)
        assert np.all(found + found == largest)


@pytest.mark.parametrize("name", [name for name in DTYPES if name not in FLOATS])
def test_integers_have_no_mean(name: str) -> None:
    with pytest.raises(kv.DTypeError, match=f"'n' holds {name}, and the mean of integers is no integer"):
        check_mean(np.dtype(name), "'n'")
