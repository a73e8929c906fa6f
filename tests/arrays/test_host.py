"""Arrays of every kind, as values and as outs of a store: shared where they can be, else copied."""

from __future__ import annotations

import array
import ctypes
import sys
import warnings
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
from kvstore.arrays.element_types import DTYPES, FLOATS, HALVES, bfloat16, dtype_named, name_of, same_type
from kvstore.arrays.host import is_array, readable_array, shape_template, writable_array
from kvstore.kernels import cpu

Array = npt.NDArray[Any]


def test_the_element_types_of_the_kernels_in_the_order_of_messages() -> None:
    assert DTYPES == ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
    assert (*HALVES, "float32", "float64") == FLOATS == DTYPES[:4]
    for name, (size, is_float) in cpu.dtypes().items():
        dtype = dtype_named(name)
        assert (dtype.name, dtype.itemsize, name in FLOATS) == (name, size, is_float)
        assert cpu.supported(dtype)
    assert cpu.supported(np.dtype(np.longlong))
    assert not cpu.supported(np.dtype(np.int16))


def sample(shape: tuple[int, ...] = (4, 6), dtype: Any = np.float32) -> Array:
    return np.arange(np.prod(shape), dtype=np.float64).reshape(shape).astype(dtype)


class OnlyInterface:
    """Memory that shows itself by one protocol alone."""

    def __init__(self, memory: Array) -> None:
        self.memory = memory
        self.shape = memory.shape

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return dict(self.memory.__array_interface__)


class OnlyDLPack:
    def __init__(self, memory: Array) -> None:
        self.memory = memory

    def __dlpack__(self, **options: Any) -> Any:
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.memory.__dlpack_device__()


class OldDLPack(OnlyDLPack):
    """A producer from before DLPack 1.0: its capsule cannot say whether the memory may be written."""

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return self.memory.__dlpack__()


class Pinned(OnlyDLPack):
    """Host memory that a GPU reaches too."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (3, 0)


class MXNetArray:
    """As MXNet 1.9.1's NDArray: no __dlpack__, capsules under other names."""

    stype = "default"

    class context:  # noqa: N801
        device_type = "cpu"

    def __init__(self, memory: Array) -> None:
        self.memory = memory
        self.written = False

    def to_dlpack_for_read(self) -> Any:
        return self.memory.__dlpack__()

    def to_dlpack_for_write(self) -> Any:
        self.written = True
        return self.memory.__dlpack__()


def strided(value: Array) -> Array:
    memory = np.zeros((*value.shape[:-1], 2 * value.shape[-1]), value.dtype)
    view = memory[..., ::2]
    view[...] = value
    return view


def reversed_(value: Array) -> Array:
    return np.ascontiguousarray(value[::-1])[::-1]


def fortran(value: Array) -> Array:
    return np.asfortranarray(value)


def swapped(value: Array) -> Array:
    return value.astype(value.dtype.newbyteorder())


def misaligned(value: Array) -> Array:
    memory = np.zeros(value.nbytes + 1, np.uint8)
    view = memory[1:].view(value.dtype).reshape(value.shape)
    view[...] = value
    assert not view.flags.aligned
    return view


def subclass(value: Array) -> Array:
    class Mine(np.ndarray):  # type: ignore[type-arg]
        def __array_ufunc__(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("nobody may compute with a subclass")

    return value.copy().view(Mine)


def matrix(value: Array) -> Array:
    with pytest.warns(PendingDeprecationWarning):
        return np.matrix(value)


def via_dlpack(value: Array) -> Any:
    return OnlyDLPack(value.copy())


KINDS: list[Callable[[Array], Any]] = [
    np.copy,
    strided,
    reversed_,
    fortran,
    swapped,
    misaligned,
    subclass,
    via_dlpack,
    lambda value: OldDLPack(value.copy()),
    lambda value: Pinned(value.copy()),
    lambda value: OnlyInterface(value.copy()),
    lambda value: OnlyInterface(strided(value)),
    lambda value: OnlyDLPack(strided(value)),
    lambda value: MXNetArray(value.copy()),
    lambda value: memoryview(value.copy()),
    lambda value: memoryview(strided(value)),
]
NAMES = [
    "plain", "strided", "reversed", "fortran", "swapped", "misaligned", "subclass", "dlpack", "old-dlpack",
    "pinned", "interface", "strided-interface", "strided-dlpack", "mxnet", "memoryview", "strided-memoryview",
]  # fmt: skip


def content(obj: Any) -> Array:
    memory = getattr(obj, "memory", obj)
    return np.array(memory)


def pulled(store: kv.KVStore) -> Array:
    out = np.empty_like(sample())
    store.pull("a", out=out)
    return out


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_values_of_every_kind(store: kv.KVStore, kind: Callable[[Array], Any]) -> None:
    one, two = kind(sample()), kind(10 * sample())
    store.init("a", kind(sample()))
    np.testing.assert_array_equal(pulled(store), sample())
    store.push("a", [one, two, one])
    np.testing.assert_array_equal(pulled(store), 12 * sample())
    np.testing.assert_array_equal(content(one), sample())
    np.testing.assert_array_equal(content(two), 10 * sample())


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_outs_of_every_kind(store: kv.KVStore, kind: Callable[[Array], Any]) -> None:
    store.init("a", sample())
    out, other = kind(np.zeros_like(sample())), np.zeros((4, 6))
    store.pull("a", out=[out, other])
    np.testing.assert_array_equal(content(out), sample())
    np.testing.assert_array_equal(other, sample())
    store.pushpull("a", 2 * sample(), out=out)
    np.testing.assert_array_equal(content(out), 2 * sample())
    store.pushpull("a", [out, kind(sample())])
    np.testing.assert_array_equal(content(out), 3 * sample())


@pytest.mark.parametrize(
    "kind", [strided, fortran, swapped, misaligned, via_dlpack], ids=lambda kind: kind.__name__
)
def test_outs_of_every_kind_and_another_type(store: kv.KVStore, kind: Callable[[Array], Any]) -> None:
    store.init("a", sample())
    out = kind(np.zeros((4, 6)))
    store.pull("a", out=out)
    np.testing.assert_array_equal(content(out), sample())


# Before DLPack 1.0 a producer cannot say that its memory is read-only; NumPy then refuses to hand it out.
TELLS = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
MAY_BE_READ_ONLY = [
    pytest.param(kind, id=name)
    for kind, name in zip(KINDS, NAMES, strict=True)
    if name not in ("old-dlpack", "pinned", "mxnet", "memoryview", "strided-memoryview")
    and (TELLS or "dlpack" not in name)
]


@pytest.mark.parametrize("kind", MAY_BE_READ_ONLY)
def test_read_only_arrays_are_values_and_no_outs(store: kv.KVStore, kind: Callable[[Array], Any]) -> None:
    value = kind(sample())
    getattr(value, "memory", value).flags.writeable = False
    store.init("a", value)
    store.push("a", value)
    with pytest.raises(kv.ArrayError, match="read-only"):
        store.pull("a", out=value)
    with pytest.raises(kv.ArrayError, match="read-only"):
        store.pushpull("a", value)
    np.testing.assert_array_equal(content(value), sample())


@pytest.mark.parametrize("strides", [(0, 4), (24, 0), (0, 0), (4, 4), (20, 4), (-4, 4), (24, -2)])
def test_outs_that_overlap_themselves_are_refused(store: kv.KVStore, strides: tuple[int, int]) -> None:
    store.init("a", sample())
    memory = np.full(200, 7, np.float32)
    out = np.lib.stride_tricks.as_strided(memory[100:], (4, 6), strides)
    for call in (lambda: store.pull("a", out=out), lambda: store.pushpull("a", 2 * sample(), out=out)):
        with pytest.raises(kv.ArrayError, match=r"out of key 'a' has several elements at one place"):
            call()
    with pytest.raises(kv.ArrayError, match="several elements at one place"):
        store.pushpull("a", out)
    assert (memory == 7).all()
    store.pull("a", out=memory[:24].reshape(4, 6))
    np.testing.assert_array_equal(memory[:24].reshape(4, 6), sample())


@pytest.mark.parametrize(
    "cut", [np.s_[::2, ::3], np.s_[::-1, ::-2], np.s_[:, :1], np.s_[2:2], np.s_[:0, ::2]]
)
def test_outs_that_are_slices(store: kv.KVStore, cut: tuple[slice, slice]) -> None:
    for number, whole in enumerate((np.zeros((4, 6), np.float32), np.zeros((6, 4), np.float32).T)):
        value = sample()[cut]
        store.init(number, value)
        store.pull(number, out=whole[cut])
        np.testing.assert_array_equal(whole[cut], value)
        assert np.count_nonzero(whole) == np.count_nonzero(value)


def test_zero_dimensions(store: kv.KVStore) -> None:
    store.init("a", np.array(3, np.float32))
    out = np.array(0, np.float32)
    store.pushpull("a", [np.array(1, np.float32)] * 3, out=out)
    assert out == 3
    with pytest.raises(kv.ShapeError):
        store.pull("a", out=np.zeros(1, np.float32))


def test_scalars_are_no_arrays(store: kv.KVStore) -> None:
    # A NumPy scalar cannot be written: a pull into one would be lost without a word.
    for scalar in (np.float32(1), np.float64(1), np.int8(1), 1.0, 1, True, 1j):
        with pytest.raises(kv.ArrayError, match="must be an array"):
            store.init("a", scalar)
    store.init("a", np.array(3, np.float32))
    with pytest.raises(kv.ArrayError):
        store.pull("a", out=np.float32(0))


@pytest.mark.parametrize(
    "obj",
    [None, "text", b"bytes", [1.0], (1.0,), {"a": 1}, {1.0}, range(3), object(), Exception(), type, len],
    ids=lambda given: type(given).__name__,
)
def test_what_is_no_array(obj: Any) -> None:
    assert not is_array(obj)
    for door in (readable_array, writable_array):
        with pytest.raises(kv.ArrayError, match="array"):
            door(obj)


def test_masked_arrays_are_refused(store: kv.KVStore) -> None:
    store.init("a", sample())
    masked = np.ma.array(sample(), mask=sample() > 3)
    for call in (lambda: store.push("a", masked), lambda: store.pull("a", out=masked)):
        with pytest.raises(kv.ArrayError, match=r"mask.*filled"):
            call()


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_structured_and_record_arrays_are_refused(dtype: Any) -> None:
    with pytest.raises(kv.DTypeError):
        readable_array(np.zeros(3, [("x", dtype)]))
    with pytest.raises(kv.DTypeError):
        writable_array(np.rec.array([(1, 2.0)], dtype=[("x", dtype), ("y", dtype)]))


def test_matrices(store: kv.KVStore) -> None:
    store.init("a", matrix(sample()))
    out = matrix(np.zeros((4, 6), np.float32))
    store.pull("a", out=out)
    np.testing.assert_array_equal(out, sample())
    if not store.type.startswith("dist"):  # there are no views
        assert type(store.view("a")) is np.ndarray


def test_memory_mapped_files(store: kv.KVStore, tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    mapped = np.memmap(path, np.float32, "w+", shape=(4, 6))
    mapped[...] = sample()
    store.init("a", np.memmap(path, np.float32, "r", shape=(4, 6)))
    store.push("a", [mapped, mapped])
    store.pull("a", out=mapped)
    mapped.flush()
    np.testing.assert_array_equal(np.fromfile(path, np.float32), 2 * sample().ravel())
    with pytest.raises(kv.ArrayError, match="read-only"):
        store.pull("a", out=np.memmap(path, np.float32, "r", shape=(4, 6)))


@pytest.mark.parametrize("code", ["f", "d", "b", "B", "i", "q"])
def test_arrays_of_the_standard_library(store: kv.KVStore, code: str) -> None:
    value = array.array(code, [1, 2, 3])
    store.init("a", value)
    store.push("a", [value, value])
    out = array.array(code, [0, 0, 0])
    store.pull("a", out=out)
    assert out.tolist() == [2, 4, 6]
    assert value.tolist() == [1, 2, 3]


def test_buffers(store: kv.KVStore) -> None:
    store.init("a", memoryview(b"\x01\x02\x03"))
    out = bytearray(3)
    store.pushpull("a", [bytearray(b"\x01\x01\x01"), memoryview(b"\x02\x02\xff")], out=out)
    assert out == b"\x03\x03\x00"
    numbers = (ctypes.c_float * 3)(1, 2, 3)
    store.init("b", numbers)
    numbers[0] = 9
    store.pull("b", out=numbers)
    assert list(numbers) == [1, 2, 3]
    with pytest.raises(kv.ArrayError, match="read-only"):
        store.pull("a", out=memoryview(b"\x01\x02\x03"))


@pytest.mark.parametrize("code", ["u", "h", "I"])
def test_buffers_of_other_types_are_refused(code: str) -> None:
    value = array.array(code, "abc" if code == "u" else [1, 2, 3])
    with pytest.raises(kv.KVStoreError):
        readable_array(value)


def test_bfloat16(store: kv.KVStore) -> None:
    value = sample(dtype=ml_dtypes.bfloat16)
    for key, kind in enumerate((np.copy, strided, fortran, subclass)):
        store.init(key, kind(value))
        out = kind(np.zeros_like(value))
        store.pushpull(key, [kind(value), value], out=out)
        np.testing.assert_array_equal(np.array(out, subok=False), (2 * sample()).astype(value.dtype))
    wide = np.zeros((4, 6))
    store.pull(0, out=wide)
    np.testing.assert_array_equal(wide, 2 * sample())


class Cuda:
    """A GPU array as Numba shows it."""

    shape = (2, 3)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (2, 3), "typestr": "<f4", "data": (0xDEAD0000, False), "version": 3}


class CudaWithDLPack(Cuda):
    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("nobody may ask for the memory of a device")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


@pytest.mark.parametrize("kind", [Cuda, CudaWithDLPack])
def test_arrays_of_a_device_are_refused(store: kv.KVStore, kind: type) -> None:
    assert is_array(kind())
    if store.type != "local":
        pytest.skip("takes them: tests/stores/device/test_device.py, test_device_shared.py, test_dist_gpu.py")
    store.init("a", np.zeros((2, 3), np.float32))
    for call in (
        lambda: store.init("b", kind()),
        lambda: store.push("a", kind()),
        lambda: store.pull("a", out=[np.zeros((2, 3), np.float32), kind()]),
    ):
        with pytest.raises(
            kv.MissingBackendError, match=rf"device: .*{kind.__name__} of shape \(2, 3\).*host"
        ):
            call()


class Broken:
    """Producers that fail do so with our error, not with theirs."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __dlpack__(self, **_: Any) -> Any:
        raise self.error

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class WithoutDevice(Broken):
    def __dlpack_device__(self) -> tuple[int, int]:
        raise self.error


@pytest.mark.parametrize("kind", [Broken, WithoutDevice])
@pytest.mark.parametrize("error", [BufferError, RuntimeError, TypeError, ValueError])
def test_producers_that_fail(kind: type, error: type[Exception]) -> None:
    for door in (readable_array, writable_array):
        with pytest.raises(kv.KVStoreError, match="no way"):
            door(kind(error("no way")))


class BadInterface:
    def __init__(self, interface: Any) -> None:
        self.__array_interface__ = interface


@pytest.mark.parametrize(
    "interface", [{}, None, {"shape": (3,), "typestr": "??", "data": (0, False), "version": 3}]
)
def test_broken_interfaces(interface: Any) -> None:
    with pytest.raises(kv.KVStoreError):
        readable_array(BadInterface(interface))


@pytest.mark.parametrize("stype", ["csr", "row_sparse", "coo"])
def test_sparse_arrays_of_others_are_refused(stype: str) -> None:
    class Foreign:
        format = stype

        def __array_interface__(self) -> Any:
            raise AssertionError

    with pytest.raises(kv.ArrayError, match="RowSparseArray"):
        readable_array(Foreign())


def test_scipy_s_sparse_arrays_are_refused(store: kv.KVStore) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    store.init("a", sample())
    for kind in (sparse.csr_matrix, sparse.coo_array, sparse.lil_matrix, sparse.dia_array):
        with pytest.raises(kv.ArrayError, match="RowSparseArray"):
            store.push("a", kind(sample()))


# ------------------------------------------------------------------------------------------------- no copies


@pytest.mark.parametrize("kind", [np.copy, via_dlpack, subclass, lambda v: OnlyInterface(v.copy())])
def test_memory_is_shared_where_it_can_be(kind: Callable[[Array], Any]) -> None:
    obj = kind(sample())
    view = readable_array(obj)
    target, deliver = writable_array(obj)
    memory = getattr(obj, "memory", obj)
    assert type(view) is type(target) is np.ndarray
    assert np.shares_memory(view, memory)
    assert np.shares_memory(target, memory)
    assert deliver is None


@pytest.mark.parametrize("kind", [strided, fortran, swapped, misaligned])
def test_a_buffer_is_delivered(kind: Callable[[Array], Array]) -> None:
    obj = kind(np.zeros_like(sample()))
    target, deliver = writable_array(obj)
    assert not np.shares_memory(target, obj)
    assert target.flags.c_contiguous
    assert target.flags.aligned
    assert target.dtype.isnative
    target[...] = 5
    assert not (obj == 5).any()
    assert deliver is not None
    deliver()
    assert (obj == 5).all()


def test_the_memory_of_a_producer_is_kept_alive() -> None:
    view = readable_array(OldDLPack(np.full(100_000, 7.0)))
    np.full(100_000, 8.0)  # would take the memory if it had been given back
    assert (view == 7).all()


@given(
    hnp.arrays(
        dtype=st.sampled_from([np.float32, np.int8, np.dtype(">f8"), np.dtype(">i4")]),
        shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
        elements=st.integers(-100, 100),
    ),
    st.data(),
)
def test_any_view_of_any_array(base: Array, data: st.DataObject) -> None:
    axes = data.draw(st.permutations(range(base.ndim)))
    steps = [slice(None, None, data.draw(st.sampled_from([1, 2, -1, -2]))) for _ in axes]
    index = (..., *steps)  # with the dots, an array of no dimension stays an array
    view = base.transpose(axes)[index]
    with kv.create() as store:
        store.init("a", view)
        np.testing.assert_array_equal(store.view("a"), view)
        with np.errstate(all="ignore"):
            wanted = view + view
        store.push("a", [view, view])
        out = np.zeros_like(base).transpose(axes)[index]
        store.pull("a", out=out)
        np.testing.assert_array_equal(out, wanted)
        store.pushpull("a", [view])
        np.testing.assert_array_equal(store.view("a"), view)


def test_types_that_differ_in_byte_order_only() -> None:
    assert same_type(np.dtype(">f4"), np.dtype("<f4"))
    assert not same_type(np.dtype(">f4"), np.dtype("<i4"))


# --------------------------------------------------------------------------------------------------- PyTorch


@pytest.fixture
def torch() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torch")


def tensor(torch: Any, dtype: str = "float32") -> Any:
    return torch.arange(24, dtype=getattr(torch, dtype)).reshape(4, 6)


TORCH_TYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"]


@pytest.mark.parametrize("dtype", TORCH_TYPES)
def test_torch_tensors(store: kv.KVStore, torch: Any, dtype: str) -> None:
    value, out = tensor(torch, dtype), torch.zeros(4, 6, dtype=getattr(torch, dtype))
    store.init("w", value)
    store.push("w", [value, value])
    store.pull("w", out=out)
    assert torch.equal(out, value + value)
    store.pushpull("w", [value, out])
    assert torch.equal(value, out)
    assert torch.equal(value, 3 * tensor(torch, dtype))


def test_torch_memory_is_shared(torch: Any) -> None:
    for dtype in TORCH_TYPES:
        value = tensor(torch, dtype)
        assert readable_array(value).ctypes.data == value.data_ptr()
        target, deliver = writable_array(value)
        assert (target.ctypes.data, deliver) == (value.data_ptr(), None)


def test_torch_parameters_and_gradients(store: kv.KVStore, torch: Any) -> None:
    layer = torch.nn.Linear(3, 2)
    names = [name for name, _ in layer.named_parameters()]
    parameters = list(layer.parameters())
    store.init(names, parameters)
    store.set_optimizer(kv.optimizer.SGD(learning_rate=0.5))
    layer(torch.ones(1, 3)).sum().backward()
    wanted = [p.detach() - 0.5 * p.grad for p in parameters]
    store.push(names, [p.grad for p in parameters])
    store.pull(names, out=parameters)
    for parameter, value in zip(parameters, wanted, strict=True):
        assert parameter.requires_grad
        assert torch.equal(parameter.detach(), value)


def test_torch_values_that_need_gradients(store: kv.KVStore, torch: Any) -> None:
    leaf = torch.ones(2, 3, requires_grad=True)
    store.init("w", leaf * 2)  # not a leaf
    store.push("w", [leaf, leaf * 3])
    out = torch.zeros(2, 3, requires_grad=True)
    store.pull("w", out=out)
    assert torch.equal(out.detach(), torch.full((2, 3), 4.0))


def test_torch_strided_tensors(store: kv.KVStore, torch: Any) -> None:
    value = tensor(torch).t()
    store.init("w", value)
    out = torch.zeros(4, 12)[:, ::2].t()
    store.pushpull("w", [value, value], out=out)
    assert torch.equal(out, 2 * value)
    store.pull("w", out=torch.nn.Parameter(out).data)
    store.init("b", tensor(torch, "bfloat16").t())
    halves = torch.zeros(4, 12, dtype=torch.bfloat16)[:, ::2].t()
    store.pull("b", out=halves)
    assert torch.equal(halves, tensor(torch, "bfloat16").t())


def test_torch_shapes(store: kv.KVStore, torch: Any) -> None:
    for dtype in ("float32", "bfloat16"):
        for shape in ((), (0,), (2, 0), (1, 1, 1)):
            key = f"{dtype}{shape}"
            value = torch.ones(shape, dtype=getattr(torch, dtype))
            store.init(key, value)
            out = torch.zeros_like(value)
            store.pushpull(key, [value, value], out=out)
            assert torch.equal(out, value + value)


def test_torch_slices_of_one_tensor(store: kv.KVStore, torch: Any) -> None:
    flat = torch.arange(10, dtype=torch.float32)
    store.init(["a", "b"], [flat[:4], flat[5:]])
    store.push(["a", "b"], [[flat[:4], flat[1:5]], flat[5:]])
    store.pull(["a", "b"], out=[flat[:4], flat[5:]])
    assert flat.tolist() == [1, 3, 5, 7, 4, 5, 6, 7, 8, 9]


def test_what_torch_has_and_a_store_has_not(store: kv.KVStore, torch: Any) -> None:
    store.init("w", torch.zeros(2, 2))
    wrong = [
        torch.zeros(2, 2, dtype=torch.bool),
        torch.zeros(2, 2, dtype=torch.complex64),
        torch.zeros(2, 2, dtype=torch.float8_e4m3fn),
        torch.zeros(2, 2, dtype=torch.int16),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, 2, device="meta"),
    ]
    for value in wrong:
        with pytest.raises(kv.KVStoreError):
            store.push("w", value)
        with pytest.raises(kv.KVStoreError):
            store.pull("w", out=value)


def test_old_torch_hands_out_capsules_without_a_version(store: kv.KVStore, torch: Any) -> None:
    class OldTensor(OnlyDLPack):
        def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
            return torch.utils.dlpack.to_dlpack(self.memory)

    memory = torch.zeros(4, 6)
    store.init("w", OldTensor(tensor(torch)))
    store.pull("w", out=OldTensor(memory))
    assert torch.equal(memory, tensor(torch))


def test_jax_arrays(store: kv.KVStore) -> None:
    jax = pytest.importorskip("jax.numpy")
    for dtype in ("float32", "bfloat16", "float16", "int32", "uint8"):
        value = jax.arange(6).reshape(2, 3).astype(dtype)
        store.init(dtype, value)
        store.push(dtype, [value, value])
        out = np.zeros((2, 3))
        store.pull(dtype, out=out)
        np.testing.assert_array_equal(out, 2 * np.arange(6).reshape(2, 3))
        with pytest.raises(kv.ArrayError, match=r"read-only.*NumPy array.*kvstore\.jax"):
            store.pull(dtype, out=value)


def test_without_ml_dtypes_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    for error in (kv.DTypeError, kv.MissingBackendError):
        with pytest.raises(error, match=r"a value is bfloat16.*pip install 'kvstore-train\[bfloat16\]'"):
            bfloat16("a value")
    with pytest.raises(kv.DTypeError, match=r"kvstore-train\[bfloat16\]"):
        dtype_named("bfloat16")


@pytest.mark.parametrize("verb", ["", "_optimizer_states"])
def test_a_file_of_bfloat16_without_ml_dtypes_is_not_called_damaged(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = np.ones(3, ml_dtypes.bfloat16)
    with kv.create() as store, kv.create() as again, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store.init("a", value)
        for one in (store, again):
            one.set_optimizer(kv.optimizer.Adam())
        store.push("a", value)
        getattr(store, f"save{verb}")(tmp_path / "f")
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
        with pytest.raises(kv.StateFileError, match=r"kvstore-train\[bfloat16\]") as caught:
            getattr(again, f"load{verb}")(tmp_path / "f")
        assert "damaged" not in str(caught.value)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (1000, 1000, 1000)])
def test_a_template_is_of_a_shape_and_type_and_takes_no_memory(name: str, shape: tuple[int, ...]) -> None:
    made = shape_template(shape, dtype_named(name))
    assert (made.shape, name_of(made.dtype), made.strides) == (shape, name, (0,) * len(shape))
    assert not made.flags.writeable
    assert not made.size or made[(0,) * len(shape)] == 0
