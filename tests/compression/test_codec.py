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
        ({}, "None; known types: 1bit, 2bit"),
        ({"type": "2BIT"}, "did you mean '2bit'"),
        ({"type": "2bit", "treshold": 0.5}, "did you mean 'threshold'.*its parameters are threshold"),
        ({"type": ["2bit"]}, "known types"),
        ({"type": "fp16", "threshold": 1}, "codec 'fp16' has no parameter 'threshold'; it has none"),
        ({"type": "2bit", 5: 1}, "has no parameter '5'"),
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
        for step, wanted in enumerate([0.1, 0.2, 0.1]):  # of 0.14, of 0.18 with the residual, of 0.12
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


# ------------------------------------------------------------------ codecs that are not as they should be


class Broken(Tenths):
    """Whole tenths, until something is done to it."""

    name = "broken"
    fails_on: Any = None

    def encode(self, gradient: Any, residual: Any, packed: Any) -> None:
        super().encode(gradient, residual, packed)
        if self.fails_on is not None and gradient.flat[0] == self.fails_on:
            raise RuntimeError("no more ink")


@pytest.fixture
def broken() -> Any:
    compression.register(Broken)
    yield
    compression.codec._registry.pop("broken")


def store_of(name: str) -> kv.KVStore:
    store = kv.create(name)
    store.init(["a", "b"], [np.zeros(4, np.float32)] * 2)
    store.set_gradient_compression({"type": "broken"})
    return store


def left(store: kv.KVStore, key: str) -> list[float]:
    residual = store._backend.feedback.residual(key)  # type: ignore[union-attr]
    return [] if residual is None else np.round(residual.astype(np.float64), 4).tolist()


@pytest.mark.parametrize("name", ["device", "shared"])
def test_a_codec_that_raises_uses_up_nothing(
    broken: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_of(name) as store:
        store.push(["a", "b"], [np.full(4, 0.14, np.float32)] * 2)
        monkeypatch.setattr(Broken, "fails_on", np.float32(0.5))
        with pytest.raises(
            kv.CodecError, match="'broken' raised RuntimeError on key 'b': no more ink"
        ) as raised:
            store.push(["a", "b"], [np.full(4, 0.17, np.float32), np.full(4, 0.5, np.float32)])
        assert isinstance(raised.value.__cause__, RuntimeError)
        assert left(store, "a") == left(store, "b") == [0.04] * 4
        np.testing.assert_allclose(store.view("a"), 0.1, rtol=1e-6)


@pytest.mark.parametrize("codec", ["broken", "2bit"])
def test_an_updater_that_raises_uses_up_nothing_of_its_key(broken: None, codec: str) -> None:
    with store_of("device") as store:
        store.set_gradient_compression({"type": codec})

        def updater(key: str, merged: Any, stored: Any) -> None:
            stored += merged
            if key == "b" and fails:
                raise RuntimeError("no")

        store.set_updater(updater)
        fails = True
        with pytest.raises(kv.UpdaterError):
            store.push(["a", "b"], [np.full(4, 0.74, np.float32)] * 2)
        fails = False
        wanted = 0.24 if codec == "2bit" else 0.04
        np.testing.assert_allclose(left(store, "a"), wanted, atol=1e-4)
        assert left(store, "b") == [0] * 4
        store.push("b", np.full(4, 0.74, np.float32))
        np.testing.assert_array_equal(store.view("a"), store.view("b"))


@pytest.mark.parametrize("nbytes", [-1, 1.5, "x", None, True, 2**63])
def test_numbers_of_bytes_that_are_none(broken: None, nbytes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broken, "nbytes", lambda self, size: nbytes)
    with store_of("device") as store, pytest.raises(kv.CodecError, match="bytes for 4 elements of key 'a'"):
        store.push("a", np.ones(4, np.float32))


@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")  # NumPy 2.5 warns, and does it
def test_what_a_codec_does_to_the_arrays_it_gets(broken: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(self: Any, gradient: Any, residual: Any, packed: Any) -> None:
        packed[:] = 7
        gradient.shape = residual.shape = packed.shape = (2, 2)
        residual.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            gradient[...] = 9

    monkeypatch.setattr(Broken, "encode", encode)
    value = np.ones(4, np.float32)
    with store_of("device") as store:
        for _ in range(2):
            store.push("a", value)
        np.testing.assert_allclose(store.view("a"), 0.7, rtol=1e-6)
    assert value.shape == (4,)
    assert value.flags.writeable


def test_what_a_constructor_says(broken: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def level(self: Any, level: int) -> None:
        if level < 0:
            raise ValueError("below zero")

    monkeypatch.setattr(Broken, "__init__", level)
    for params in ({"type": "broken"}, {"type": "broken", "level": -1}):
        with pytest.raises(kv.ConfigError, match="codec 'broken' does not accept"):
            compression.create(params)
    compression.create({"type": "broken", "level": 1})
    monkeypatch.setattr(Broken, "__init__", lambda self, **settings: None)
    compression.create({"type": "broken", "anything": 1})


def test_a_subclass_of_a_compiled_codec_packs_in_its_own_way() -> None:
    class Twice(TwoBit):
        def decode(self, packed: Any, gradient: Any) -> None:
            super().decode(packed, gradient)
            gradient *= 2

    assert TwoBit().compiled is not None
    assert Twice().compiled is None
    assert type("Same", (TwoBit,), {})().compiled == TwoBit().compiled


def test_a_config_that_no_file_can_hold(broken: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(Broken, "config", lambda self: {"step": np.float32(1)})
    with store_of("device") as store:
        store.push("a", np.ones(4, np.float32))
        with pytest.raises(kv.ConfigError, match="config of codec 'broken'"):
            store.save_residuals(tmp_path / "left")
    assert not list(tmp_path.iterdir())
