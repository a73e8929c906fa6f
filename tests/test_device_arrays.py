"""Arrays of GPUs, seen by address: protocols, streams, and refusals."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from fake_torch import FakeTorch
from lazy_driver import GpuArray, LazyDriver, installed, new_stream

import kvstore as kv
from kvstore.arrays import dlpack
from kvstore.arrays.element_types import DTYPES
from kvstore.devices import arrays, driver, gpu_context, memory, streams

Array = npt.NDArray[Any]

EXPRESSES_READ_ONLY = np.lib.NumpyVersion(np.__version__) >= "2.1.0"  # in capsules


@pytest.fixture
def fake() -> Iterator[LazyDriver]:
    with installed(2) as made:
        yield made


@pytest.fixture
def torch(fake: LazyDriver, monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    made = FakeTorch(fake)
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


def seen(obj: Any, write: bool = False) -> arrays.DeviceView:
    return arrays.view_array(obj, "it", streams.DeviceStream(0, 1), write)


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


# ---------------------------------------------------------------------------------------------- where it lies


@pytest.mark.parametrize(
    "obj", [np.zeros(3), None, "text", 3, [1], 2.5, np.float32(1), kv.RowSparseArray.zeros((3, 2)), object()]
)
def test_what_lies_on_the_host_never_asks_the_driver(obj: Any) -> None:
    before = driver.replace_driver(None)
    try:
        assert arrays.device_of(obj) is None
        assert driver.replace_driver(None) is None
    finally:
        driver.replace_driver(before)


def test_an_interface_tells_its_device_by_its_address(fake: LazyDriver) -> None:
    assert arrays.device_of(GpuArray(fake, np.zeros(3), device=1)) == 1
    assert arrays.device_of(GpuArray(fake, np.zeros(0), device=1)) == 0  # no address to check


class Lender:
    """Memory of the host, shown as memory of any device."""

    def __init__(self, array: Array, kind: int = dlpack.CUDA, old: bool = False) -> None:
        self.array, self.kind, self.old = array, kind, old
        self.asked: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.kind, 1)

    def __dlpack__(self, **options: Any) -> Any:
        if self.old and "max_version" in options:
            raise TypeError
        self.asked.append(options)
        shape, address = self.array.shape, self.array.ctypes.data
        version, device = options.get("max_version"), self.__dlpack_device__()
        return dlpack.export_capsule(self, address, shape, self.array.dtype, device, False, version)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


@pytest.mark.parametrize(("kind", "device"), [(1, None), (2, 1), (3, None), (13, 1), (10, None)])
def test_dlpack_tells_its_device(kind: int, device: int | None) -> None:
    assert arrays.device_of(Lender(np.zeros(3), kind)) == device


# ----------------------------------------------------------------------------------------------------- DLPack


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4), (1, 1)])
@pytest.mark.parametrize("version", [None, (1, 0), (1, 3)])
def test_capsules_go_there_and_back(name: str, shape: tuple[int, ...], version: Any) -> None:
    array = np.ones(shape, dtype_of(name))
    owner = Lender(array)
    capsule = dlpack.export_capsule(owner, array.ctypes.data, shape, array.dtype, (2, 5), False, version)
    got = dlpack.ImportedTensor(capsule, "it", dlpack.ON_GPU)
    assert (got.address, got.shape, got.dtype) == (
        array.ctypes.data if array.size else got.address,
        shape,
        array.dtype,
    )
    assert (got.device_kind, got.device, got.strides, got.readonly) == (2, 5, None, False)
    alive = weakref.ref(owner)
    del owner, capsule
    assert (alive() is not None) == bool(array.size)
    del got
    assert alive() is None


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_capsule_that_is_not_used_releases_its_memory(version: Any) -> None:
    owner = Lender(np.ones(3))
    alive = weakref.ref(owner)
    dlpack.export_capsule(owner, owner.array.ctypes.data, (3,), owner.array.dtype, (2, 0), False, version)
    del owner
    assert alive() is None


def test_a_consumer_that_fails_gets_its_own_error() -> None:
    """The capsule is released while the error of NumPy, which reads no memory of GPUs, is set."""
    lender = Lender(np.ones(3))
    alive = weakref.ref(lender)
    with pytest.raises((RuntimeError, BufferError), match="device"):
        np.from_dlpack(lender)  # type: ignore[arg-type]
    del lender
    gc.collect()
    assert alive() is None


def test_numpy_reads_our_capsules() -> None:
    array = np.arange(6.0).reshape(2, 3)
    lender = Lender(array, kind=1)
    lender.__dlpack_device__ = lambda: (1, 0)  # type: ignore[method-assign]
    view = np.from_dlpack(lender)  # type: ignore[arg-type]
    np.testing.assert_array_equal(view, array)
    assert np.shares_memory(view, array)
    alive = weakref.ref(lender)
    del lender.__dlpack_device__, lender
    assert alive() is not None
    del view
    assert alive() is None


def test_we_read_numpy_s_capsules() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    for given, strides in ((array, None), (array.T, (4, 16)), (array[:, ::2], (16, 8))):
        got = dlpack.ImportedTensor(given.__dlpack__(), "it", dlpack.ON_HOST)
        assert (got.address, got.shape, got.strides) == (given.ctypes.data, given.shape, strides)
        assert (got.dtype, got.device_kind) == (np.int32, 1)


def test_read_only_memory_is_lent_to_consumers_that_can_be_told() -> None:
    array = np.ones(3)
    with pytest.raises(BufferError, match="read-only"):
        dlpack.export_capsule(array, array.ctypes.data, (3,), array.dtype, (2, 0), True, None)
    if not EXPRESSES_READ_ONLY:
        with pytest.raises(BufferError, match="readonly"):
            dlpack.export_capsule(array, array.ctypes.data, (3,), array.dtype, (2, 0), True, (1, 0))
        return
    capsule = dlpack.export_capsule(array, array.ctypes.data, (3,), array.dtype, (2, 0), True, (1, 0))
    assert dlpack.ImportedTensor(capsule, "it", dlpack.ON_GPU).readonly
    with pytest.raises(kv.ArrayError, match="no DLPack capsule"):
        dlpack.ImportedTensor(capsule, "it", dlpack.ON_GPU)  # it was used


def test_what_is_no_capsule() -> None:
    with pytest.raises(kv.ArrayError, match="it gave no DLPack capsule"):
        dlpack.ImportedTensor(object(), "it", dlpack.ON_GPU)


@pytest.mark.parametrize("old", [False, True])
def test_a_dlpack_producer_orders_its_work_before_our_stream(fake: LazyDriver, old: bool) -> None:
    lender = Lender(np.ones((2, 3), np.float32), old=old)
    view = arrays.view_array(lender, "it", streams.DeviceStream(1, 0x77, None))
    assert lender.asked[0]["stream"] == 0x77
    assert (view.address, view.device, view.shape) == (lender.array.ctypes.data, 1, (2, 3))
    assert view.contiguous
    assert not view.readonly


def test_a_producer_that_fails_says_why(fake: LazyDriver) -> None:
    class Broken(Lender):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("on another planet")

    with pytest.raises(kv.ArrayError, match="on another planet"):
        seen(Broken(np.ones(3)))


def test_jax_arrays_are_values_but_no_outs(fake: LazyDriver) -> None:
    class ArrayImpl(Lender):
        pass

    ArrayImpl.__module__ = "jaxlib._jax"
    array = ArrayImpl(np.ones(3, np.float32))
    assert seen(array).kind == "jax"
    with pytest.raises(kv.ArrayError, match="read-only"):
        seen(array, write=True)


# ----------------------------------------------------------------------------------- __cuda_array_interface__


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_every_type_and_shape(fake: LazyDriver, name: str, shape: tuple[int, ...]) -> None:
    array = GpuArray(fake, np.ones(shape, dtype_of(name)))
    view = seen(array, write=True)
    assert (view.address, view.dtype, view.shape, view.device) == (array.address, array.dtype, shape, 0)
    assert view.contiguous


class Interface:
    """Any ``__cuda_array_interface__``."""

    def __init__(self, base: GpuArray, **changes: Any) -> None:
        interface = {**base.__cuda_array_interface__, **changes}
        self._base = base
        self.__cuda_array_interface__ = {name: v for name, v in interface.items() if v != "absent"}
        self.shape = base.shape


def test_an_interface_of_version_2_has_no_stream(fake: LazyDriver) -> None:
    view = seen(Interface(GpuArray(fake, np.ones(3)), version=2, stream="absent", strides="absent"))
    assert view.producer is None
    assert view.contiguous


@pytest.mark.parametrize(("stream", "handle"), [(None, None), (1, 1), (2, 2), (0x1234, 0x1234)])
def test_the_stream_of_an_interface(fake: LazyDriver, stream: int | None, handle: int | None) -> None:
    view = seen(Interface(GpuArray(fake, np.ones(3)), stream=stream))
    assert (None if view.producer is None else view.producer.handle) == handle


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"stream": 0}, "stream 0"),
        ({"mask": object()}, "masked"),
        ({"typestr": ">f8"}, "element type >f8"),
        ({"typestr": "<c8"}, "element type complex64"),
        ({"typestr": "|b1"}, "element type bool"),
        ({"typestr": "<i2"}, "element type int16"),
        ({"typestr": "nonsense"}, "element type"),
    ],
)
def test_interfaces_that_are_refused(fake: LazyDriver, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(kv.KVStoreError, match=match):
        seen(Interface(GpuArray(fake, np.ones(3)), **changes))


def test_a_read_only_array_is_no_out(fake: LazyDriver) -> None:
    array = GpuArray(fake, np.ones(3), readonly=True)
    assert seen(array).readonly
    with pytest.raises(kv.ArrayError, match="it is read-only"):
        seen(array, write=True)


@pytest.mark.parametrize(
    ("shape", "strides", "whole"),
    [((2, 3), (24, 8), True), ((2, 3), (8, 16), False), ((1, 3), (999, 8), True), ((0, 3), (1, 1), True)],
)
def test_strides(fake: LazyDriver, shape: tuple[int, ...], strides: tuple[int, ...], whole: bool) -> None:
    view = seen(Interface(GpuArray(fake, np.ones((6,))), shape=shape, strides=strides))
    assert view.contiguous is whole
    if not whole:
        with pytest.raises(kv.ArrayError, match="not contiguous"):
            arrays.gather_copy(view, "it", streams.DeviceStream(0, 1))


def test_memory_of_the_host_behind_an_interface(fake: LazyDriver) -> None:
    host = np.ones(3)
    with pytest.raises(kv.ArrayError, match="memory of the host"):
        arrays.device_of(Interface(GpuArray(fake, host), data=(host.ctypes.data, False)))


# ---------------------------------------------------------------------------------------------------- PyTorch


def test_tensors(torch: FakeTorch) -> None:
    tensor = torch.tensor([[1, 2, 3]], device=1, requires_grad=True)
    assert arrays.device_of(tensor) == 1
    view = seen(tensor, write=True)
    assert (view.address, view.dtype, view.shape) == (tensor.data_ptr(), np.float32, (1, 3))
    assert (view.device, view.kind, view.contiguous) == (1, "torch", True)
    tensor.is_cuda = False
    assert arrays.device_of(tensor) is None


@pytest.mark.parametrize("name", ["bfloat16", "float16", "uint8", "int64"])
def test_types_of_tensors(torch: FakeTorch, name: str) -> None:
    tensor = torch.tensor([1, 2])
    tensor.dtype = f"torch.{name}"
    assert seen(tensor).dtype == dtype_of(name)


@pytest.mark.parametrize("name", ["bool", "int16", "complex64", "float8_e4m3fn"])
def test_types_of_tensors_that_are_refused(torch: FakeTorch, name: str) -> None:
    tensor = torch.tensor([1, 2])
    tensor.dtype = f"torch.{name}"
    with pytest.raises(kv.DTypeError, match="element type"):
        seen(tensor)


def test_sparse_tensors_are_refused(torch: FakeTorch) -> None:
    tensor = torch.tensor([1, 2])
    tensor.layout = "torch.sparse_coo"
    with pytest.raises(kv.ArrayError, match=r"torch\.sparse_coo.*RowSparseArray"):
        seen(tensor)


def test_subclasses_of_tensors_are_tensors(torch: FakeTorch) -> None:
    import fake_torch

    parameter = fake_torch.Parameter(torch, np.ones(3, np.float32))
    mine = type("Mine", (fake_torch.Tensor,), {"__module__": "somewhere.else"})(torch, np.ones(3, np.float32))
    for tensor in (parameter, mine):
        assert seen(tensor).kind == "torch"


def test_transposed_tensors_are_gathered_by_torch_on_our_stream(torch: FakeTorch, fake: LazyDriver) -> None:
    stream = streams.DeviceStream(0, new_stream(), torch)
    content = np.arange(6, dtype=np.float32).reshape(2, 3)
    view = arrays.view_array(torch.tensor(content, transposed=True), "it", stream)
    assert not view.contiguous
    whole = arrays.gather_copy(view, "it", stream)
    host = np.empty((2, 3), np.float32)
    memory.host_copy(fake, whole.address, host, stream.handle, 0)  # type: ignore[arg-type]
    np.testing.assert_array_equal(host, content)


# ---------------------------------------------------------------------------------------------------- streams


def test_the_caller_s_stream_is_torch_s_current_one(torch: FakeTorch, fake: LazyDriver) -> None:
    tensor, other = torch.tensor([1]), GpuArray(fake, np.ones(3), stream=new_stream())
    mine = new_stream()
    with torch.use((0, mine)):
        assert arrays.stream_for([other, tensor], 0).handle == mine
    assert arrays.stream_for([tensor], 0).handle == 1  # torch says 0 for the legacy stream
    assert arrays.stream_for([other], 0).handle == other.stream


def test_one_array_speaks_for_all(torch: FakeTorch, fake: LazyDriver) -> None:
    silent, named, tensor = (
        GpuArray(fake, np.ones(3)),
        GpuArray(fake, np.ones(3), stream=new_stream()),
        torch.tensor([1]),
    )
    for objects, chosen in (
        ([silent, named, tensor], [tensor]),
        ([silent, named], [named]),
        ([silent], []),
        ([], []),
    ):
        assert arrays.stream_owner(objects) == chosen
        assert arrays.stream_for(chosen, 0).handle == arrays.stream_for(objects, 0).handle


def test_without_a_word_on_streams_it_is_the_legacy_one(fake: LazyDriver) -> None:
    assert arrays.stream_for([GpuArray(fake, np.ones(3)), np.ones(3)], 0).handle == 1
    assert arrays.stream_for([], 1).handle == 1


def test_cupy_s_current_stream(monkeypatch: pytest.MonkeyPatch, fake: LazyDriver) -> None:
    class Stream:
        ptr = 0x55

    cuda = types.SimpleNamespace(get_current_stream=lambda device: Stream())
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    ndarray = type("ndarray", (GpuArray,), {"__module__": "cupy"})
    found = arrays.stream_for([ndarray(fake, np.ones(3))], 0)
    assert found.handle == 0x55
    assert isinstance(found.owner, Stream)  # and lives as long as we refer to it


def test_a_tail_makes_others_wait(fake: LazyDriver) -> None:
    for seed in range(20):
        fake._random.seed(seed)
        array, copy = GpuArray(fake, np.zeros(4)), GpuArray(fake, np.zeros(4))
        first, then = streams.DeviceStream(0, new_stream(), fake), streams.DeviceStream(0, new_stream(), fake)
        tail = streams.StreamCursor(fake, first)  # type: ignore[arg-type]
        fake.run_all()
        ones = np.ones(4)
        fake.copy(array.address, ones.ctypes.data, 32, first.handle, 0)
        tail.note_work()
        tail.hold_stream(then)
        fake.copy(copy.address, array.address, 32, then.handle, 0)
        copy.stream = then.handle
        np.testing.assert_array_equal(copy.get(), ones)


def test_a_stream_of_unknown_life_is_never_used_later(fake: LazyDriver) -> None:
    first, then = streams.DeviceStream(0, new_stream()), streams.DeviceStream(0, new_stream())
    tail = streams.StreamCursor(fake, first)  # type: ignore[arg-type]
    tail.note_work()
    queued = len(fake._streams[0, first.handle])
    tail.hold_stream(then)
    assert len(fake._streams[0, first.handle]) == queued


# ------------------------------------------------------------------------------------------------- our memory


def test_memory_goes_back(fake: LazyDriver) -> None:
    held = memory.DeviceMemory(fake, 1, 100)  # type: ignore[arg-type]
    assert fake.in_use(1) == 100
    del held
    assert fake.leftovers() == {"bytes": 0, "events": 0, "streams": 0}
    assert memory.DeviceMemory(fake, 0, 0).address == 0  # type: ignore[arg-type]


def test_pinned_blocks_are_used_again_only_when_their_copy_is_made(fake: LazyDriver) -> None:
    spot = gpu_context.GpuContext(fake, 0)  # type: ignore[arg-type]
    targets = [GpuArray(fake, np.zeros(8)) for _ in range(30)]
    fake.run_all()
    stream = streams.DeviceStream(0, new_stream(), fake)
    for number, target in enumerate(targets):
        content = np.full(8, float(number))
        spot.upload(target.address, content, stream)
        content[:] = -1
    assert fake.waits == 0
    for number, target in enumerate(targets):
        target.stream = stream.handle
        np.testing.assert_array_equal(target.get(), number)
    spot.close()
    for target in targets:
        target.release()
    assert fake.leftovers() == {"bytes": 0, "events": 0, "streams": 0}


def test_what_is_kept_is_kept_until_the_work_is_done(fake: LazyDriver) -> None:
    spot = gpu_context.GpuContext(fake, 0)  # type: ignore[arg-type]
    stream = streams.DeviceStream(0, new_stream(), fake)
    held = Lender(np.ones(3))
    alive = weakref.ref(held)
    spot.hold_references([held], stream)
    del held
    assert alive() is not None
    fake.run_all()
    spot.hold_references([], stream)
    assert alive() is None
    spot.close()


def own(fake: LazyDriver, content: Array, readonly: bool = False) -> arrays.DeviceArray:
    held = memory.DeviceMemory(fake, 0, content.nbytes)  # type: ignore[arg-type]
    stream = streams.DeviceStream(0, new_stream(), fake)
    if content.nbytes:
        fake.copy(held.address, content.ctypes.data, content.nbytes, stream.handle, 0)
    return arrays.DeviceArray(held, content.dtype, content.shape, stream, readonly)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)])
def test_our_arrays_speak_both_protocols(fake: LazyDriver, name: str, shape: tuple[int, ...]) -> None:
    content = np.ones(shape, dtype_of(name))
    mine = own(fake, content)
    assert (mine.ndim, mine.size, mine.nbytes) == (content.ndim, content.size, content.nbytes)
    np.testing.assert_array_equal(mine.numpy(), content)
    view = seen(Interface_of(mine))
    assert (view.shape, view.dtype, view.producer and view.producer.handle) == (
        shape, content.dtype, mine._stream.handle,
    )  # fmt: skip
    lent = dlpack.ImportedTensor(mine.__dlpack__(stream=1), "it", dlpack.ON_GPU)
    assert (lent.shape, lent.dtype, lent.device) == (shape, content.dtype, 0)
    assert repr(mine) == f"<DeviceArray {content.dtype} {shape} on cuda:0>"
    assert arrays.device_of(mine) == 0
    assert seen(mine).kind == "own"


class Interface_of:  # noqa: N801 - a function in all but name
    """Shows only the interface of an array of ours."""

    def __init__(self, mine: arrays.DeviceArray) -> None:
        self._mine = mine
        self.shape = mine.shape

    @property
    def __cuda_array_interface__(self) -> Any:
        return self._mine.__cuda_array_interface__


def test_a_consumer_of_our_array_waits_for_our_work(fake: LazyDriver) -> None:
    for seed in range(20):
        fake._random.seed(seed)
        mine, copy = own(fake, np.ones(4)), GpuArray(fake, np.zeros(4), stream=new_stream())
        lent = dlpack.ImportedTensor(mine.__dlpack__(stream=copy.stream), "it", dlpack.ON_GPU)
        fake.copy(copy.address, lent.address, 32, copy.stream or 1, 0)
        np.testing.assert_array_equal(copy.get(), 1)


def test_lengths_and_copies_of_our_arrays(fake: LazyDriver) -> None:
    assert len(own(fake, np.ones((4, 2)))) == 4
    with pytest.raises(TypeError, match="without dimensions"):
        len(own(fake, np.ones(())))
    mine = own(fake, np.ones(4), readonly=True)
    with pytest.raises(BufferError, match="read-only"):
        mine.__dlpack__(stream=-1)
    if EXPRESSES_READ_ONLY:
        assert dlpack.ImportedTensor(
            mine.__dlpack__(stream=-1, max_version=(1, 0)), "it", dlpack.ON_GPU
        ).readonly
    for options in ({"copy": True}, {"dl_device": (1, 0)}):
        with pytest.raises(BufferError, match="copy it first"):
            mine.__dlpack__(**options)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- the driver


def test_a_missing_extra_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(kv.MissingBackendError, match=r"kvstore-train\[cuda\]"):
        driver.CudaDriver()


def test_a_machine_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(flags: int) -> None:
        raise RuntimeError("libcuda.so.1 is nowhere")

    bindings = types.ModuleType("cuda.bindings.driver")
    monkeypatch.setattr(bindings, "cuInit", no_library, raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", bindings)
    with pytest.raises(kv.MissingBackendError, match=r"no usable NVIDIA driver or GPU .*: libcuda\.so\.1"):
        driver.CudaDriver()


def test_the_child_of_a_fork_is_told(fake: LazyDriver) -> None:
    fake.pid -= 1
    with pytest.raises(kv.KVStoreError, match="forked"):
        driver.get_driver()
    fake.pid += 1
