"""Codecs by name, their parameters, and codecs of users."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import kvstore as kv
from kvstore import compression
from kvstore.compression import BFloat16, Codec, Float16, OneBit, TwoBit

ALL = [
    {"type": "2bit", "threshold": 0.25},
    {"type": "1bit", "threshold": -0.5},
    {"type": "fp16"},
    {"type": "bf16"},
]


@pytest.mark.parametrize("params", ALL, ids=lambda params: params["type"])
@pytest.mark.parametrize("shape", [(0,), (), (1,), (7, 5), (33,), (3, 1000)])
def test_what_is_packed_is_decoded(params: dict[str, Any], shape: tuple[int, ...]) -> None:
    codec = compression.create(params)
    gradient = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    residual = np.zeros(shape, np.float32) if codec.feedback else None
    packed, decoded = np.empty(codec.nbytes(gradient.size), np.uint8), np.full(shape, 9, np.float32)
    codec.encode(np.asarray(gradient), residual, packed)
    codec.decode(packed, decoded)
    if residual is not None:
        np.testing.assert_allclose(decoded + residual, gradient, rtol=0, atol=1e-6)
    else:
        np.testing.assert_allclose(decoded, gradient, rtol=2.0**-8)


@pytest.mark.parametrize("params", ALL, ids=lambda params: params["type"])
def test_name_and_config_make_an_equal_codec(params: dict[str, Any]) -> None:
    codec = compression.create(params)
    again = compression.create({"type": codec.name, **codec.config()})
    assert again == codec
    assert hash(again) == hash(codec)
    assert repr(again) == repr(codec)
    assert codec.name in compression.names()


def test_codecs_differ_by_kind_and_by_threshold() -> None:
    assert TwoBit(0.5) != TwoBit(0.25)
    assert TwoBit(0.5) != OneBit(0.5)
    assert Float16() != BFloat16()
    assert TwoBit() != "2bit"


def test_thresholds_are_float32() -> None:
    assert TwoBit(1 / 3).threshold == float(np.float32(1 / 3))
    assert TwoBit(1e300).threshold == math.inf
    assert OneBit(-1).threshold == -1
    assert repr(TwoBit()) == "TwoBit(threshold=0.5)"


@pytest.mark.parametrize("threshold", [0, -1, -math.inf, 1e-300, math.nan, "abc", None, [1]])
def test_thresholds_of_two_bits_are_above_zero(threshold: Any) -> None:
    with pytest.raises(kv.ConfigError, match="threshold of '2bit' must be"):
        TwoBit(threshold)


@pytest.mark.parametrize("threshold", [math.nan, "abc", None, 10**400])
def test_thresholds_of_one_bit_are_numbers(threshold: Any) -> None:
    with pytest.raises(kv.ConfigError, match="threshold of '1bit' must be a number"):
        OneBit(threshold)


@pytest.mark.parametrize(
    "params, says",
    [
        ({}, "None; known are 1bit, 2bit"),
        ({"type": "2BIT"}, "did you mean '2bit'"),
        ({"type": ["2bit"]}, "known are"),
        ({"type": "fp16", "threshold": 1}, "codec 'fp16' has no parameter threshold"),
        ({"type": "2bit", 5: 1}, "has no parameter 5"),
    ],
)
def test_what_names_no_codec(params: dict[Any, Any], says: str) -> None:
    with pytest.raises(kv.ConfigError, match=says):
        compression.create(params)


def test_sixteen_bits_beyond_their_range() -> None:
    gradient = np.array([65504, 65520, -1e30, 1e-30, np.nan], np.float32)
    decoded = {}
    for codec in (Float16(), BFloat16()):
        packed, decoded[codec.name] = np.empty(10, np.uint8), np.empty(5, np.float32)
        codec.encode(gradient, None, packed)
        codec.decode(packed, decoded[codec.name])
    np.testing.assert_array_equal(decoded["fp16"], [65504, np.inf, -np.inf, 0, np.nan])
    assert np.isfinite(decoded["bf16"][:4]).all()


class Tenths(Codec):
    """Whole tenths in a byte, with error feedback."""

    name = "tenths"
    feedback = True

    def nbytes(self, size: int) -> int:
        return size

    def encode(self, gradient: Any, residual: Any, packed: Any) -> None:
        residual += gradient
        packed.view(np.int8)[:] = np.clip(np.rint(residual.reshape(-1) * 10), -127, 127)
        residual -= packed.view(np.int8).reshape(residual.shape) / np.float32(10)

    def decode(self, packed: Any, gradient: Any) -> None:
        gradient[...] = packed.view(np.int8).reshape(gradient.shape) / np.float32(10)


@pytest.fixture
def tenths() -> Any:
    compression.register(Tenths)
    yield
    compression.codec._registry.pop("tenths")


@pytest.mark.parametrize("store_name", ["device", "shared"])
def test_a_codec_of_a_user_in_a_store(tenths: None, store_name: str) -> None:
    with kv.create(store_name) as store:
        store.init("w", np.zeros((2, 2), np.float32))
        store.set_gradient_compression({"type": "tenths"})
        for step, wanted in enumerate([0.1, 0.2, 0.1]):  # of 0.14, of 0.18 with what was left, of 0.12
            store.push("w", np.full((2, 2), 0.14, np.float32))
            np.testing.assert_allclose(store.view("w"), wanted, atol=1e-6, err_msg=str(step))
        out = np.empty((2, 2), np.float32)
        store.pushpull("w", [np.full((2, 2), 1, np.float32), np.full((2, 2), 2, np.float32)], out=out)
        np.testing.assert_allclose(out, 3, atol=0.11)


def test_a_codec_that_takes_a_name(tenths: None) -> None:
    with pytest.warns(UserWarning, match="codec 'tenths': Tenths replaces Tenths"):
        compression.register(Tenths)


@pytest.mark.parametrize("what", [5, int, Codec])
def test_what_is_no_codec(what: Any) -> None:
    with pytest.raises(kv.ArgumentError):
        compression.register(what)
