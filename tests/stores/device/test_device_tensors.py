"""Tensors of (fake) GPUs with unusual memory, in `device` and in stores of the host."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import fake_torch
import numpy as np
import pytest
from fake_torch import FakeTorch
from lazy_driver import GpuArray, LazyDriver, installed

import kvstore as kv
from kvstore.arrays import dlpack
from kvstore.devices import arrays, streams
from kvstore.devices.arrays import DeviceArray


@pytest.fixture
def fake() -> Iterator[LazyDriver]:
    with installed(2) as made:
        yield made


@pytest.fixture
def torch(fake: LazyDriver, monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    made = FakeTorch(fake)
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


@pytest.fixture
def store() -> Iterator[kv.KVStore]:
    with kv.create("device") as made:
        yield made


def value_of(store: kv.KVStore, key: str) -> Any:
    seen = store.view(key)
    assert isinstance(seen, DeviceArray)
    return seen.numpy().tolist()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("device", [0, 1])
def test_negative_bits_are_resolved_in_each_call(
    store: kv.KVStore, torch: FakeTorch, transposed: bool, device: int
) -> None:
    def negative(content: Any) -> fake_torch.Tensor:
        return torch.tensor(content, negated=True, transposed=transposed, device=device)

    ones, plain = np.ones((2, 3)), torch.tensor(np.ones((2, 3)), device=device)
    store.init("w", negative(ones))
    assert value_of(store, "w") == ones.tolist()
    for _ in range(3):  # the first call leaves a short way for those that follow
        store.push("w", plain)
        store.push("w", negative(3 * ones))
        assert value_of(store, "w") == (3 * ones).tolist()
        out = negative(0 * ones)
        store.pull("w", out=out)
        np.testing.assert_array_equal(out.get(), 3 * ones)
        store.pushpull("w", [plain, negative(ones)], out=[out, plain])
        np.testing.assert_array_equal(out.get(), 2 * ones)
        np.testing.assert_array_equal(plain.get(), 2 * ones)
        plain = torch.tensor(ones, device=device)
        store.pushpull("w", out)  # in place
        np.testing.assert_array_equal(out.get(), 2 * ones)
    plan = store.bind("w", negative(4 * ones), out)
    for _ in range(2):
        plan()
        np.testing.assert_array_equal(out.get(), 4 * ones)


@pytest.mark.parametrize("left", [0, 4])
def test_tensors_whose_storage_was_freed_are_refused_in_each_call(
    store: kv.KVStore, torch: FakeTorch, left: int
) -> None:
    store.init("w", torch.tensor([1, 2]))
    good, freed = torch.tensor([3, 4]), torch.tensor([5, 6])
    for _ in range(2):
        store.pushpull("w", good, out=freed)
        freed.storage_bytes, before = left, value_of(store, "w")
        for call in (
            lambda: store.push("w", freed),
            lambda: store.push("w", [good, freed]),
            lambda: store.pull("w", out=freed),
            lambda: store.pushpull("w", good, out=freed),
            lambda: store.bind("w", freed),
            lambda: store.init("v", freed),
        ):
            with pytest.raises(kv.ArrayError, match=f"in a storage of {left} bytes"):
                call()
        assert (store.keys(), value_of(store, "w")) == (["w"], before)
        freed.storage_bytes = freed.nbytes
        assert freed.get().tolist() == [3, 4]


def test_tensors_that_stand_for_others_are_refused(store: kv.KVStore, torch: FakeTorch) -> None:
    class Wrapper(fake_torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            raise AssertionError("a store computes with no tensor")

    wrapped = Wrapper(torch, np.ones(2, np.float32))
    store.init("w", torch.tensor([1, 2]))
    for _ in range(2):
        store.push("w", torch.tensor([1, 2]))
        with pytest.raises(kv.ArrayError, match="the tensor that it wraps"):
            store.push("w", wrapped)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_of_a_gpu_are_refused_by_stores_of_the_host(torch: FakeTorch, dtype: str) -> None:
    tensor = torch.tensor([1, 2])
    tensor.dtype = f"torch.{dtype}"
    with kv.create("local") as local:
        local.init("w", np.ones(2, np.float32))
        for call in (
            lambda: local.init("v", tensor),
            lambda: local.push("w", tensor),
            lambda: local.pull("w", out=tensor),
            lambda: local.bind("w", tensor),
        ):
            with pytest.raises(kv.MissingBackendError, match=r"lies on a device.*create\('device'\)"):
                call()
        assert local.view("w").tolist() == [1, 1]


class _Overlapping(fake_torch.Tensor):
    def is_contiguous(self) -> bool:
        return False

    def stride(self) -> tuple[int, ...]:
        return (0,)


def test_outs_that_overlap_themselves_are_refused(store: kv.KVStore, torch: FakeTorch) -> None:
    store.init("w", torch.tensor([1, 2]))
    out = _Overlapping(torch, np.zeros(2, np.float32))
    for call in (
        lambda: store.pull("w", out=out),
        lambda: store.pushpull("w", torch.tensor([3, 4]), out=out),
    ):
        with pytest.raises(kv.ArrayError, match="several elements at one place"):
            call()
    assert value_of(store, "w") == [1, 2]


class Interface:
    """An object that shows an array on a GPU; the fields may say anything."""

    def __init__(self, array: GpuArray, **fields: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, **fields}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"data": (0, False)}, "address 0"),
        ({"data": (None, False)}, "address 0"),
        ({"data": "x"}, "usable"),
        ({"data": bytes(12)}, "a buffer, not an address"),
        ({"shape": (2**62,)}, "cannot be"),
        ({"shape": (-3,)}, "shape"),
        ({"shape": 3}, "shape"),
        ({"strides": (4, 4)}, "strides"),
        ({"strides": "x"}, "strides"),
        ({"typestr": 5}, "typestr"),
        ({"typestr": "<f3"}, "element type"),
        ({"typestr": ">f4"}, "element type"),
        ({"typestr": "|O8"}, "element type"),
        ({"mask": 1}, "mask"),
        ({"strides": (8,)}, "not contiguous"),
    ],
)
def test_interfaces_that_are_wrong(
    store: kv.KVStore, fake: LazyDriver, fields: dict[str, Any], words: str
) -> None:
    store.init("w", GpuArray(fake, np.ones(3, np.float32)))
    calls: list[Callable[[Any], Any]] = [
        lambda obj: store.init("v", obj),
        lambda obj: store.push("w", obj),
        lambda obj: store.pull("w", out=obj),
    ]
    for call in calls:
        obj = Interface(GpuArray(fake, np.zeros(3, np.float32)), **fields)
        with pytest.raises(kv.KVStoreError, match=words):
            call(obj)
    assert (store.keys(), value_of(store, "w")) == (["w"], [1, 1, 1])


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ((1, 0), {}, "device 1"),
        ((2, 0), {"data": None}, "without memory"),
        ((2, 0), {"ndim": -1}, "dimensions"),
        ((2, 0), {"shape": ctypes.pointer(ctypes.c_int64(2**62))}, "without memory"),
        ((2, 0), {"byte_offset": 2**64 - 8}, "without memory"),
    ],
)
def test_capsules_that_are_wrong(kind: Any, fields: dict[str, Any], words: str) -> None:
    memory = np.ones(3, np.float32)

    class Lent:
        shape = (3,)

        def __dlpack_device__(self) -> Any:
            return (2, 0)

        def __dlpack__(self, **_: Any) -> Any:
            capsule = dlpack.export_capsule(self, memory.ctypes.data, (3,), memory.dtype, kind, False, (1, 0))
            name = b"dltensor_versioned"
            tensor = dlpack._LAYOUTS[name].from_address(dlpack._pointer(capsule, name)).tensor
            for field, value in fields.items():
                setattr(tensor, field, value)
            return capsule

    lent = Lent()
    alive = weakref.ref(lent)
    with pytest.raises(kv.ArrayError, match=words):
        arrays.view_array(lent, "it", streams.DeviceStream(0, 1))
    del lent
    gc.collect()
    assert alive() is None  # the capsule was released
