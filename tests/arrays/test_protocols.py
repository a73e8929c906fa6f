"""What array protocols show is checked before an address is used: memory, bounds, device, masks, flags."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import kvstore as kv
from kvstore.arrays import dlpack
from kvstore.arrays.element_types import DTYPES, dtype_named
from kvstore.arrays.host import direct_view, readable_array, writable_array

Array = npt.NDArray[Any]
F = np.float32


class Shown:
    """An object that shows an array by `__array_interface__`."""

    def __init__(self, owner: Any = None, **fields: Any) -> None:
        self.owner = owner
        self.__array_interface__ = {"shape": (3,), "typestr": "<f4", "version": 3, **fields}


class Lent:
    """An object that lends memory by DLPack; the fields of its capsule may say anything."""

    def __init__(self, array: Array, device: Any = (1, 0), named: Any = None, **fields: Any) -> None:
        self.array, self.device, self.named, self.fields = array, device, named or device, fields

    def __dlpack_device__(self) -> Any:
        return self.named

    def __dlpack__(self, **options: Any) -> Any:
        array, version = self.array, options.get("max_version")
        readonly = not array.flags.writeable
        capsule = dlpack.export_capsule(
            self, array.ctypes.data, array.shape, array.dtype, self.device, readonly, version
        )
        name = b"dltensor" if version is None else b"dltensor_versioned"
        tensor = dlpack._LAYOUTS[name].from_address(dlpack._pointer(capsule, name)).tensor
        for field, value in self.fields.items():
            setattr(tensor, field, value)
        return capsule


def refused(obj: Any, words: str = ".") -> None:
    """Check that no door of any verb takes an object, and that the key stays as it was."""
    with kv.create() as store:
        store.init("w", np.ones(3, F))
        for call in (
            lambda: store.init("v", obj),
            lambda: store.push("w", obj),
            lambda: store.push("w", [np.ones(3, F), obj]),
            lambda: store.pull("w", out=obj),
            lambda: store.pushpull("w", np.zeros(3, F), out=[np.zeros(3, F), obj]),
            lambda: store.attach("w", obj),
            lambda: store.bind("w", obj, np.ones(3, F)),
            lambda: store.bind("w", np.ones(3, F), obj),
            lambda: kv.RowSparseArray(obj, [0, 1, 2], (3,)),
            lambda: kv.RowSparseArray(np.ones(3, F), obj, (3,)),
        ):
            with pytest.raises(kv.KVStoreError, match=words):
                call()
        assert store.keys() == ["w"]
        assert store.view("w").tolist() == [1, 1, 1]


memory = np.arange(100, dtype=F)
AT = memory.ctypes.data + 200


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"data": (0, False)}, "address 0"),
        ({"data": (None, False)}, "address 0"),
        ({"data": (-8, False)}, "address -8"),
        ({"data": (2**64 - 4, False)}, "address"),
        ({"data": (2**80, False)}, "address"),
        ({"data": (AT, False), "shape": (2**62,)}, "cannot be"),
        ({"data": (AT, False), "strides": (-(2**61),)}, "cannot be"),
        ({"data": ("0x10", False)}, "usable"),
        ({"data": (AT,)}, "usable"),
        ({"data": (1.5, False)}, "usable"),
        ({"data": None}, "usable"),
        ({"data": bytes(4)}, "a buffer of 4"),
        ({"data": bytes(12), "offset": 4}, "bytes 4 to 16 of a buffer of 12"),
        ({"data": bytes(12), "offset": -4}, "bytes -4 to 8"),
        ({"data": bytes(12), "offset": "x"}, "usable"),
        ({"data": bytes(12), "strides": (400,)}, "bytes 0 to 804"),
        ({"data": bytes(12), "strides": (-4,)}, "bytes -8 to 4"),
        ({"data": bytes(12), "shape": (2**40, 2**40)}, "a buffer of 12"),
        ({"data": (AT, False), "strides": (4, 4)}, "strides"),
        ({"data": (AT, False), "strides": "x"}, "strides"),
        ({"data": (AT, False), "strides": (1.5,)}, "usable"),
        ({"data": (AT, False), "shape": 3}, "shape"),
        ({"data": (AT, False), "shape": (3.0,)}, "usable"),
        ({"data": (AT, False), "shape": (-3,)}, "shape"),
        ({"data": (AT, False), "shape": (1,) * 70}, "usable"),
        ({"data": (AT, False), "typestr": None}, "typestr"),
        ({"data": (AT, False), "typestr": "<f3"}, "element type"),
        ({"data": (AT, False), "typestr": "|O8"}, "object"),
        ({"data": bytes(24), "typestr": "|O8"}, "object"),
        ({"data": bytes(300), "shape": (1,) * 70}, "usable"),
        ({"data": (AT, False), "typestr": "<U1"}, "element type"),
        ({"data": (AT, False), "mask": np.ones(3, bool)}, "mask"),
    ],
)
def test_interfaces_that_are_wrong(fields: dict[str, Any], words: str) -> None:
    refused(Shown(**fields), words)


class Moody:
    """An object whose protocol raises a given exception."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __dlpack_device__(self) -> Any:
        raise self.error

    def __dlpack__(self, **_: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), AttributeError("no"), OSError("no"), ZeroDivisionError()]
)
def test_protocols_that_raise(error: Exception) -> None:
    refused(Moody(error))
    with kv.create("device") as store, pytest.raises(kv.KVStoreError):
        store.init("v", Moody(error))


def test_interfaces_that_are_right() -> None:
    held = bytearray(16)
    with kv.create() as store:
        store.init("w", np.ones(3, F))
        for out in (
            Shown(data=(AT, False)),
            Shown(data=(AT + 12, False), strides=(-4,)),
            Shown(data=(AT, False), strides=(16,)),
            Shown(data=(AT, False), typestr=">f4"),
            Shown(data=held, offset=4),
        ):
            store.pull("w", out=out)
            assert np.asarray(out).tolist() == [1, 1, 1]
        assert np.frombuffer(held, F).tolist() == [0, 1, 1, 1]
        store.init("b", np.ones(3, ml_dtypes.bfloat16))
        half = np.zeros(3, ml_dtypes.bfloat16)
        store.pull("b", out=Shown(half, data=(half.ctypes.data, False), typestr="<V2"))
        assert half.tolist() == [1, 1, 1]
        for value in (Shown(data=(AT, True)), Shown(data=bytes(12))):
            store.push("w", value)
            with pytest.raises(kv.ArrayError, match="read-only"):
                store.pull("w", out=value)
        store.init("none", Shown(shape=(0, 3), data=(0, False)))


@pytest.mark.parametrize(
    ("lent", "words"),
    [
        (Lent(memory[:3], data=None), "without memory"),
        (Lent(memory[:3], byte_offset=2**64 - 8), "without memory"),
        (Lent(memory[:3], device=(2, 0), named=(1, 0)), "device 2"),
        (Lent(memory[:3], device=(99, 0), named=(1, 0)), "device 99"),
        (Lent(memory[:3], named=(2, 0)), "device"),
        (Lent(memory[:3], named=(99, 0)), "device"),
        (Lent(memory[:3], ndim=-1), "-1 dimensions"),
        (Lent(memory[:3], ndim=65), "65 dimensions"),
        (Lent(memory[:3], shape=None), "1 dimensions"),
        (Lent(memory[:3], shape=ctypes.pointer(ctypes.c_int64(-3))), "shape"),
        (Lent(memory[:3], shape=ctypes.pointer(ctypes.c_int64(2**62))), "without memory"),
        (Lent(memory[:3], strides=ctypes.pointer(ctypes.c_int64(2**60))), "without memory"),
        (Lent(memory[:3], strides=ctypes.pointer(ctypes.c_int64(-(2**60)))), "without memory"),
        (Lent(memory[:3], dtype=dlpack._DataType(2, 4, 1)), "DLPack type"),
        (Lent(memory[:3], dtype=dlpack._DataType(2, 32, 4)), "DLPack type"),
        (Lent(memory[:3], dtype=dlpack._DataType(5, 64, 1)), "DLPack type"),
        (Lent(memory[:3], dtype=dlpack._DataType(77, 8, 1)), "DLPack type"),
        (Lent(memory[:3], dtype=dlpack._DataType(2, 24, 1)), "NumPy does not know"),
    ],
)  # fmt: skip
def test_capsules_that_are_wrong(lent: Lent, words: str) -> None:
    references = sys.getrefcount(lent)
    refused(lent, words)
    gc.collect()
    assert sys.getrefcount(lent) == references  # each capsule was released


def test_an_offset_of_a_capsule_counts() -> None:
    assert readable_array(Lent(memory[:3], byte_offset=8)).tolist() == [2, 3, 4]


def test_a_bfloat16_capsule_of_any_library_is_taken() -> None:
    half = np.arange(6).astype(ml_dtypes.bfloat16)
    with kv.create() as store:
        store.init("w", Lent(half))
        out = np.zeros(6, half.dtype)
        store.pushpull("w", [Lent(half), Lent(half)], out=Lent(out))
        assert out.tolist() == [0, 2, 4, 6, 8, 10]


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    mapped = np.memmap(path, F, "w+", shape=(3 * mmap.PAGESIZE,))
    late = np.memmap(path, F, "r+", offset=2 * mmap.PAGESIZE + 8, shape=(3,))
    mapped[:3], late[:] = 1, 2
    os.truncate(path, 2 * mmap.PAGESIZE)
    with kv.create() as store:
        store.init("w", mapped[:3])  # the memory that exists can be used
        store.pull("w", out=mapped[3:6])
        assert mapped[3:6].tolist() == [1, 1, 1]
    for gone in (mapped[-3:], late, mapped[::-1][:3], late[::-1]):
        refused(gone, "truncated")


def test_masks_are_not_lost_in_row_ids() -> None:
    masked = np.ma.array([0, 1], mask=[True, False])
    with pytest.raises(kv.ArrayError, match="mask"):
        kv.RowSparseArray(np.ones((2, 2), F), masked, (4, 2))
    with kv.create() as store:
        store.init("t", kv.RowSparseArray.from_dense(np.ones((4, 2), F)))
        out = kv.RowSparseArray.zeros((4, 2))
        with pytest.raises(kv.ArrayError, match="mask"):
            store.row_sparse_pull("t", out=out, row_ids=masked)
        with pytest.raises(kv.ShapeError, match="list of numbers"):
            kv.RowSparseArray(np.ones((2, 2), F), [[1], [2, 3]], (4, 2))


def closed() -> Any:
    made = mmap.mmap(-1, 12)
    made.close()
    return made


def released() -> Any:
    made = memoryview(bytearray(12))
    made.release()
    return made


@pytest.mark.parametrize("make", [closed, released])
def test_buffers_that_are_gone(make: Callable[[], Any]) -> None:
    refused(make(), "array")


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "bfloat16"])
@pytest.mark.parametrize("order", "<>")
def test_buffers_in_each_byte_order(name: str, order: str) -> None:
    value = np.arange(6).astype(np.dtype(name).newbyteorder(order))
    assert readable_array(memoryview(value)).tolist() == list(range(6))
    array, deliver = writable_array(memoryview(value))
    array[...] = 1
    if deliver is not None:
        deliver()
    assert value.tolist() == [1] * 6


BASES = st.sampled_from(DTYPES).map(dtype_named)


@given(st.data())
def test_a_view_of_any_layout_is_read_and_written_as_numpy_does(data: st.DataObject) -> None:
    """Values and outs through each protocol are those of NumPy; no memory outside of an out changes."""
    dtype = data.draw(BASES)
    whole = np.arange(120).reshape(data.draw(st.sampled_from([(120,), (12, 10), (4, 5, 6)]))).astype(dtype)
    view = whole[data.draw(hnp.basic_indices(whole.shape, min_dims=0))]
    view = np.asarray(view)
    view = view.transpose(data.draw(st.permutations(range(view.ndim))))
    show = data.draw(st.sampled_from([Lent, _interface, np.asarray, lambda one: one.view(np.ndarray)]))
    if show is Lent and not _has_steps(view):
        show = _interface
    shown = show(view)
    np.testing.assert_array_equal(readable_array(shown), view)
    kept = direct_view(shown)
    assert kept is None or kept.ctypes.data == view.ctypes.data or not view.size
    if view.base is None:
        return
    before = whole.copy()
    array, deliver = writable_array(shown)
    array[...] = 121
    if deliver is not None:
        deliver()
    assert (view == np.array(121).astype(dtype)).all()
    assert np.count_nonzero(whole != before) <= view.size


def _has_steps(view: Array) -> bool:
    """Whether the helper above, which lends contiguous memory, can lend it."""
    return bool(view.flags.c_contiguous)


def _interface(view: Array) -> Any:
    fields = {name: view.__array_interface__[name] for name in ("shape", "typestr", "data", "strides")}
    return Shown(view, **fields)


@given(st.data())
def test_an_interface_of_a_buffer_never_reaches_beyond_it(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, 40))
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    strides = data.draw(st.none() | st.tuples(*(st.integers(-12, 12) for _ in shape)))
    offset = data.draw(st.integers(-8, 40))
    content = bytes(range(length))
    positions = _positions(shape, strides, offset)
    obj = Shown(data=content, shape=shape, strides=strides, offset=offset, typestr="|u1")
    if all(0 <= position < length for position in positions):
        assert readable_array(obj).ravel().tolist() == positions
    else:
        with pytest.raises(kv.ArrayError, match="a buffer of"):
            readable_array(obj)


def _positions(shape: tuple[int, ...], strides: tuple[int, ...] | None, offset: int) -> list[int]:
    steps = np.empty(shape, np.uint8).strides if strides is None else strides
    return [
        offset + sum(i * step for i, step in zip(index, steps, strict=True)) for index in np.ndindex(shape)
    ]
