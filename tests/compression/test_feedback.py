"""Compression through a store: what MXNet does, residuals by key and place, their files, updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from references import Array, assert_same_bits, lcg

import kvstore as kv

T = np.float32(0.5)


@pytest.fixture(params=["device", "shared"])
def store(request: pytest.FixtureRequest) -> Iterator[kv.KVStore]:
    with kv.create(request.param) as made:
        yield made


def two_bit(store: kv.KVStore, threshold: float = 0.5) -> None:
    store.set_gradient_compression({"type": "2bit", "threshold": threshold})


class Stated:
    """2-bit compression with error feedback in NumPy, for each key and place."""

    def __init__(self, threshold: float = 0.5) -> None:
        self.t = np.float32(threshold)
        self.left: dict[Any, Array] = {}

    def __call__(self, name: Any, gradient: Array) -> Array:
        x = self.left.get(name, np.zeros_like(gradient)) + gradient
        sent = np.where(x >= self.t, self.t, np.where(x <= -self.t, -self.t, np.float32(0)))
        self.left[name] = x - sent
        return sent


# ------------------------------------------------------------------------------------------- what MXNet does


def test_pushes_of_lists_as_recorded(golden: Callable[[str], Any]) -> None:
    wanted = golden("compress2bit.npz")["kv_device_pulls"]
    with kv.create("device") as store:
        two_bit(store)
        store.init(3, lcg(33, 99))
        out = np.empty(33, np.float32)
        store.pull(3, out=out)
        assert_same_bits(out, wanted[0])  # an init is exact
        for r in range(4):
            store.push(3, [lcg(33, 10 * r + k, -1.3, 1.3) for k in range(3)])
            store.pull(3, out=out)
            assert_same_bits(out, wanted[r + 1])


@pytest.mark.parametrize("verb", ["push", "pushpull", "async"])
def test_pushes_of_one_array_as_recorded(store: kv.KVStore, golden: Callable[[str], Any], verb: str) -> None:
    wanted = golden("compress2bit.npz")["kv_device_single_pulls"]
    two_bit(store)
    store.init(3, np.zeros(33, np.float32))
    for r in range(3):
        value, out = lcg(33, r, -1.3, 1.3), np.empty(33, np.float32)
        if verb == "pushpull":
            store.pushpull(3, value, out=out)
            assert_same_bits(value, lcg(33, r, -1.3, 1.3))
        elif verb == "async":
            store.pushpull(3, value, async_op=True).wait()
            out = value
        else:
            store.push(3, value)
            store.pull(3, out=out)
        assert_same_bits(out, wanted[r])


def test_large_keys_and_small_ones_in_one_call(store: kv.KVStore) -> None:
    two_bit(store)
    shapes = {"tiny": (1,), "scalar": (), "nothing": (0, 3), "small": (100,), "large": (300, 401)}
    for key, shape in shapes.items():
        store.init(key, np.zeros(shape, np.float32))
    stated = Stated()
    for r in range(3):
        grads = [lcg(math.prod(shape), 7 * r + i).reshape(shape) for i, shape in enumerate(shapes.values())]
        outs = [np.empty(shape, np.float32) for shape in shapes.values()]
        store.pushpull(list(shapes), [grad.copy() for grad in grads], out=outs)
        for key, grad, out in zip(shapes, grads, outs, strict=True):
            assert_same_bits(out, np.asarray(stated(key, grad)))


# -------------------------------------------------------------------------------------------------- residuals


def test_each_place_in_a_list_has_its_residual() -> None:
    with kv.create("device") as store:
        two_bit(store)
        store.init("w", np.zeros(40, np.float32))
        stated = Stated()
        for r, places in enumerate([2, 4, 1, 3]):  # more values later than at first are no trouble
            grads = [lcg(40, 10 * r + k) for k in range(places)]
            store.push("w", grads)
            total = np.zeros(40, np.float32)
            for k, grad in enumerate(grads):
                total = total + stated(k, grad)
            assert_same_bits(np.array(store.view("w")), total)


def test_values_of_one_worker_are_summed_before_they_are_packed() -> None:
    with kv.create("shared") as store:
        two_bit(store)
        store.init("w", np.zeros(40, np.float32))
        stated = Stated()
        for r in range(3):
            grads = [lcg(40, 10 * r + k, -0.3, 0.3) for k in range(3)]
            store.push("w", grads)
            assert_same_bits(np.array(store.view("w")), stated("w", grads[0] + grads[1] + grads[2]))


def test_a_new_threshold_keeps_the_residuals_and_another_codec_drops_them(store: kv.KVStore) -> None:
    store.init("w", np.zeros(1, np.float32))
    two_bit(store, 1.0)
    store.push("w", np.full(1, 0.75, np.float32))
    assert store.view("w")[0] == 0
    two_bit(store, 0.5)
    store.push("w", np.zeros(1, np.float32))
    assert store.view("w")[0] == 0.5  # of the 0.75
    store.set_gradient_compression({"type": "fp16"})
    two_bit(store, 0.5)
    store.push("w", np.full(1, 0.25, np.float32))  # with the 0.25 that were left it would be enough
    assert store.view("w")[0] == 0


def test_compression_may_begin_between_pushes(store: kv.KVStore) -> None:
    store.init("w", np.zeros(50, np.float32))
    store.push("w", lcg(50, 1))
    assert_same_bits(np.array(store.view("w")), lcg(50, 1))
    two_bit(store)
    store.push("w", lcg(50, 2))
    assert_same_bits(np.array(store.view("w")), Stated()("w", lcg(50, 2)))


def test_a_broadcast_that_fails_leaves_no_residual(store: kv.KVStore) -> None:
    two_bit(store)
    store.init("w", np.zeros(4, np.float32))
    with pytest.raises(kv.ShapeError):
        store.broadcast("x", np.zeros(4, np.float32), out=np.zeros(5, np.float32))
    feedback = store._backend.feedback
    assert feedback is not None
    assert feedback.residual("x") is None


def test_what_is_wrong_with_a_call_uses_up_no_residual(store: kv.KVStore) -> None:
    two_bit(store)
    store.init(["v", "w"], [np.zeros(4, np.float32)] * 2)
    good, bad = np.full(4, 0.3, np.float32), np.zeros(5, np.float32)
    for call in (
        lambda: store.push(["v", "w"], [good, bad]),
        lambda: store.pushpull(["v", "w"], [good, good], out=[good, bad]),
        lambda: store.push(["v", "u"], [good, good]),
    ):
        with pytest.raises(kv.KVStoreError):
            call()
    store.push("v", good)
    assert_same_bits(np.array(store.view("v")), np.zeros(4, np.float32))  # 0.3: not yet


# ------------------------------------------------------------------------------------------------------ files


def test_residuals_are_saved_and_loaded(store: kv.KVStore, tmp_path: Path) -> None:
    two_bit(store)
    store.init(["v", "w"], [np.zeros((2, 3), np.float32), np.zeros(70, np.float32)])
    store.push(["v", "w"], [lcg(6, 1).reshape(2, 3), lcg(70, 2)])
    store.save_residuals(tmp_path / "left")
    with kv.create(store.type) as other:
        other.init(["v", "w"], [np.zeros((2, 3), np.float32), np.zeros(70, np.float32)])
        two_bit(other, 0.25)
        other.load_residuals(tmp_path / "left")
        two_bit(other)
        for made in (store, other):
            made.push(["v", "w"], [lcg(6, 3).reshape(2, 3), lcg(70, 4)])
        for key in ("v", "w"):
            assert_same_bits(np.array(store.view(key)), np.array(other.view(key)))


def test_files_of_residuals_that_do_not_fit(store: kv.KVStore, tmp_path: Path) -> None:
    path = tmp_path / "left"
    two_bit(store)
    store.init("w", np.zeros(3, np.float32))
    store.push("w", np.full(3, 0.3, np.float32))
    store.save_residuals(path)
    store.save(tmp_path / "values")
    whole = path.read_bytes()

    def refused(says: str, file: Path = path) -> None:
        with pytest.raises(kv.StateFileError, match=says):
            other.load_residuals(file)

    with kv.create(store.type) as other:
        two_bit(other)
        refused("key 'w', which is not initialised")
        other.init("w", np.zeros(4, np.float32))
        refused("the key is \\(4,\\)")
        refused("kvstore.residuals", tmp_path / "values")
        other.set_gradient_compression({"type": "1bit"})
        refused("codec '2bit'")
    two_bit(store)
    other = store
    for damaged in (whole[:-3], whole[:8] + whole[9:], b"", b"x" * 50, whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damaged)
        refused("left")
    store.push("w", np.full(3, 0.3, np.float32))  # the old value is still there
    assert_same_bits(np.array(store.view("w")), np.full(3, 0.5, np.float32))


def test_residuals_without_compression(store: kv.KVStore, tmp_path: Path) -> None:
    for call in (store.save_residuals, store.load_residuals):
        with pytest.raises(kv.ConfigError, match="set_gradient_compression"):
            call(tmp_path / "left")
    with (
        kv.create("local", processes=1) as local,
        pytest.raises(kv.CapabilityError, match="does not compress"),
    ):
        local.save_residuals(tmp_path / "left")


# ---------------------------------------------------------------------------------------------------- updates


@pytest.mark.parametrize("name", ["sgd", "adam", "lamb"])
def test_an_optimizer_gets_what_was_decoded(store: kv.KVStore, name: str) -> None:
    """A compiled rule and one of several passes: as if the decoded value had been pushed."""
    with kv.create("local", processes=1) as plain:
        for made in (store, plain):
            made.init("w", lcg(1000, 5))
            made.set_optimizer(kv.optimizer.create(name, learning_rate=0.1))
        two_bit(store)
        stated = Stated()
        for r in range(3):
            store.push("w", lcg(1000, r))
            plain.push("w", stated("w", lcg(1000, r)))
            assert_same_bits(np.array(store.view("w")), np.array(plain.view("w")))


def test_a_callable_gets_what_was_decoded(store: kv.KVStore) -> None:
    seen: list[Array] = []
    store.init("w", np.zeros(700, np.float32))
    store.set_updater(lambda key, merged, stored: seen.append(np.array(merged)))
    two_bit(store)
    store.push("w", lcg(700, 1))
    assert_same_bits(seen[0], Stated()("w", lcg(700, 1)))


# ------------------------------------------------------------------------------------- uncompressed values


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32"])
def test_other_types_than_float32_are_refused(store: kv.KVStore, dtype: str) -> None:
    store.init("w", np.zeros(3, dtype))
    two_bit(store)
    with pytest.raises(kv.DTypeError, match=f"key 'w' holds {dtype}.*float32 gradients only"):
        store.push("w", np.ones(3, dtype))
    np.testing.assert_array_equal(store.view("w"), 0)


def test_rows_are_refused(store: kv.KVStore) -> None:
    rows = kv.RowSparseArray(np.ones((1, 3), np.float32), [1], (4, 3))
    store.init("w", np.zeros((4, 3), np.float32))
    two_bit(store)
    with pytest.raises(kv.ArrayError, match="row-sparse value of key 'w'"):
        store.push("w", rows)
    np.testing.assert_array_equal(store.view("w"), 0)


def test_an_empty_push_of_a_key_of_another_type(store: kv.KVStore) -> None:
    """Inits, pulls and broadcasts of any type are as ever."""
    two_bit(store)
    out = np.zeros(3, np.float64)
    store.broadcast("w", lcg(3, 1).astype(np.float64), out=out)
    np.testing.assert_array_equal(out, lcg(3, 1).astype(np.float64))


def test_a_key_that_is_only_pulled_may_be_of_any_type() -> None:
    with kv.create("device") as store:
        store.init([0, 1], [np.zeros(3, np.float32), np.arange(3)])
        two_bit(store)
        out, other = np.empty(3, np.float32), np.empty(3, np.int64)
        store.pushpull([0, 1], [[np.ones(3, np.float32)], []], out=[out, other])
        np.testing.assert_array_equal(out, 0.5)
        np.testing.assert_array_equal(other, [0, 1, 2])


def test_paths_and_keys_of_all_kinds(store: kv.KVStore, tmp_path: Path) -> None:
    two_bit(store)
    store.init("w", np.zeros(3, np.float32))
    store.push("w", np.full(3, 0.3, np.float32))
    store.save_residuals(bytes(tmp_path / ("€" * 80)))
    store.load_residuals(tmp_path / ("€" * 80))
    with pytest.raises(kv.KeyKindError, match="surrogate"):
        store.init("\ud800", np.zeros(3, np.float32))
    assert store.keys() == ["w"]


def test_residuals_that_cannot_be_written(store: kv.KVStore, tmp_path: Path) -> None:
    two_bit(store)
    store.init("a", np.zeros(3, np.float32))
    with pytest.raises(
        kv.StateFileError, match=r"none/f cannot be written: there is no folder '\S+none'"
    ) as caught:
        store.save_residuals(tmp_path / "none" / "f")
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(kv.StateFileError, match="/none cannot be read: No such file") as caught:
        store.load_residuals(tmp_path / "none")
    assert isinstance(caught.value, FileNotFoundError)
