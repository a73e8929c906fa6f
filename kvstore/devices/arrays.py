"""GPU arrays of any library, seen by address, without importing that library; and arrays of our own.

`device_of` says on which GPU an object lies, `stream_for` on which stream its owner works, and `view` gives
address, type and shape. Torch, CuPy and JAX are told by the module of the type, so that nothing is imported.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import dlpack, interface, tensors
from ..arrays.addresses import Strides, describe, is_contiguous, overlaps_itself, unusable
from ..arrays.element_types import DTYPES, unsupported
from ..arrays.host import is_jax_type, refuse_what_is_no_array, several_at_one_place
from ..arrays.sparse import RowSparseArray
from ..errors import ArrayError, KVStoreError
from . import driver, streams
from .memory import Memory, host_copy
from .streams import Stream

_HOST_TYPES = (np.ndarray, np.generic, RowSparseArray, str, bytes, bool, int, float, complex, list, tuple)


@dataclass(eq=False, slots=True)
class DeviceView:
    """What must be known of an array on a GPU to let a kernel have it.

    Attributes
    ----------
    address, device : int
    dtype : numpy.dtype
    shape : tuple of int
    contiguous, readonly : bool
    kind : str
        Which library's it is: ``"torch"``, ``"cupy"``, ``"jax"``, ``"own"``, or ``"any"`` of those that speak
        ``__cuda_array_interface__`` or DLPack.
    owner : object
        Keeps the memory alive.
    producer : Stream or None
        Where its content is written, if the array says so.
    stream : Stream or None
        On which stream to work, for a view that was made ahead of the work.
    strides : tuple of int or None
        In bytes; None where the protocol has none. For the check of outs that overlap themselves.
    """

    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    device: int
    owner: Any
    kind: str = "any"
    contiguous: bool = True
    readonly: bool = False
    producer: Stream | None = None
    stream: Stream | None = None
    strides: Strides = None

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class DeviceArray:
    """A C-contiguous array of a store on a GPU, as `KVStore.view` and updaters get it.

    It speaks ``__cuda_array_interface__`` (version 3) and DLPack, so ``torch.from_dlpack(array)``,
    ``torch.as_tensor(array, device="cuda")``, ``cupy.asarray(array)`` and ``numba.cuda.as_cuda_array(array)``
    share its memory.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    device : int
        Number of the GPU.
    readonly : bool
    """

    def __init__(
        self,
        memory: Memory,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        stream: Stream,
        readonly: bool = False,
    ) -> None:
        self._memory, self._stream = memory, stream
        self.dtype, self.shape, self.device, self.readonly = dtype, shape, memory.device, readonly

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.size * self.dtype.itemsize

    def numpy(self) -> npt.NDArray[Any]:
        """Copy to the host; blocks until the store's work on it is done."""
        array = np.empty(self.shape, self.dtype)
        host_copy(driver.get(), self._memory.address, array, self._stream.handle, self.device)
        return array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3. bfloat16 goes as two bytes without a meaning, as PyTorch has it."""
        typestr = "<V2" if self.dtype.name == "bfloat16" else self.dtype.str
        return {
            "shape": self.shape,
            "typestr": typestr,
            "data": (self._memory.address, self.readonly),
            "strides": None,
            "version": 3,
            "stream": self._stream.handle,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CUDA, self.device)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("this array is lent where it lies; copy it yourself")
        if stream != -1:
            streams.order(driver.get(), self._stream, Stream(self.device, stream or driver.LEGACY_STREAM))
        return dlpack.export(
            self,
            self._memory.address,
            self.shape,
            self.dtype,
            self.__dlpack_device__(),
            self.readonly,
            max_version,
        )

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype} {self.shape} on cuda:{self.device}>"


# ------------------------------------------------------------------------------------------- where it lies


def _kind_of(cls: Any) -> str:
    """Which library's arrays a type is of; "host" where none of them can lie on a GPU."""
    if issubclass(cls, DeviceView):
        return "view"
    if issubclass(cls, DeviceArray):
        return "own"
    if issubclass(cls, _HOST_TYPES) or cls is type(None):
        return "host"
    if tensors.is_tensor_type(cls):
        return "torch"
    roots = {base.__module__.partition(".")[0] for base in cls.__mro__}
    if "cupy" in roots and hasattr(cls, "__cuda_array_interface__"):
        return "cupy"
    return "jax" if is_jax_type(cls) else "any"


_kind: Callable[[Any], str] = lru_cache(maxsize=1024)(_kind_of)


def device_of(obj: Any) -> int | None:
    """Return the number of the GPU on which an object lies; None where it lies on the host, or is no array.

    Raises
    ------
    ArrayError
        It lies on a device of another make.
    """
    kind = _kind(type(obj))
    if kind == "host":
        return None
    if kind == "torch":
        return obj.device.index if obj.is_cuda else None
    if kind in ("view", "own"):
        device: int = obj.device
        return device
    if kind == "cupy":
        return int(obj.device.id)
    return _device_of_any(obj)


def check_all_on_devices(values: Iterable[Any], key: object) -> None:
    """Raise `ArrayError` unless all values of one push lie on GPUs."""
    for value in values:
        if device_of(value) is None:
            refuse_what_is_no_array(value, f"value of key {key!r}")
            raise ArrayError(
                f"the values of key {key!r} lie on the host and on a GPU; give arrays of one kind in one list"
            )


def _device_of_any(obj: Any) -> int | None:
    """Return the GPU that a protocol names.

    None also for an object that fails: the host's reader explains it.
    """
    shown = getattr(obj, "__cuda_array_interface__", None)
    if shown is not None:
        address = _read(shown, obj, "an array").address
        return _place(address) if address else 0
    ask = getattr(obj, "__dlpack_device__", None)
    try:
        kind, index = (0, 0) if ask is None else (int(part) for part in ask())
    except Exception:  # a foreign object may raise anything here, such as a deleted array of JAX
        return None
    return index if kind in dlpack.ON_GPU else None


def _place(address: int) -> int:
    return driver.get().device_of(address)


def any_on_device(arrays: Iterable[Any]) -> bool:
    """Whether one of these lies on a GPU."""
    return any(type(array) is not np.ndarray and device_of(array) is not None for array in arrays)


def addresses_of(objects: list[Any]) -> list[int]:
    """Where arrays on GPUs begin now."""
    if all(_kind(type(one)) == "torch" for one in objects):
        return [one.data_ptr() for one in objects]
    return [address_of(one) for one in objects]


def is_tensor(obj: Any) -> bool:
    """Whether it is PyTorch's."""
    return _kind(type(obj)) == "torch"


def address_of(obj: Any) -> int:
    """Where an array on a GPU begins now."""
    kind = _kind(type(obj))
    if kind == "torch":
        return int(obj.data_ptr())
    if kind == "cupy":
        return int(obj.data.ptr)
    if kind == "view":
        return int(obj.address)
    if kind == "own":
        return int(obj._memory.address)
    interface = getattr(obj, "__cuda_array_interface__", None)
    return 0 if interface is None else int(interface["data"][0] or 0)


# ----------------------------------------------------------------------------------------------- streams


def stream_for(arrays: Iterable[Any], device: int) -> Stream:
    """Return the stream on which the owner of these arrays works now.

    PyTorch's current stream of the device if one of them is PyTorch's; else CuPy's; else the stream that an
    array names; else the legacy default stream, which waits for all others and they for it.
    """
    named: Stream | None = None
    cupy = False
    for array in arrays:
        kind = _kind(type(array))
        if kind == "torch":
            return streams.of_torch(device)
        if kind == "view" and array.stream is not None and array.stream.device == device:
            ahead: Stream = array.stream
            return ahead
        cupy = cupy or kind == "cupy"
        if named is None and kind == "any" and device_of(array) == device:
            handle = (getattr(array, "__cuda_array_interface__", None) or {}).get("stream")
            named = None if handle is None else Stream(device, handle)
    if cupy:
        return streams.of_cupy(device)
    return named or Stream(device, driver.LEGACY_STREAM)


def speaker(objects: list[Any]) -> list[Any]:
    """Return the one array, if there is one, by which `stream_for` decides for all of these."""
    kinds = [_kind(type(one)) for one in objects]
    for kind in ("torch", "cupy"):
        if kind in kinds:
            return [objects[kinds.index(kind)]]
    named = (one for one in objects if (getattr(one, "__cuda_array_interface__", None) or {}).get("stream"))
    return list(itertools.islice(named, 1))


def work_on(stream: Stream, kind: str) -> AbstractContextManager[Any]:
    """Let a library's own operations run on a stream."""
    if kind == "torch":
        cuda = sys.modules["torch"].cuda
        if stream.handle == driver.LEGACY_STREAM:
            return cuda.stream(cuda.default_stream(stream.device))  # type: ignore[no-any-return]
        return cuda.stream(cuda.ExternalStream(stream.handle, stream.device))  # type: ignore[no-any-return]
    if kind == "cupy":
        made = sys.modules["cupy"].cuda.ExternalStream(stream.handle, stream.device)
        return made  # type: ignore[no-any-return]
    return nullcontext()


# ------------------------------------------------------------------------------------------------- views


def view(obj: Any, what: str, stream: Stream, write: bool = False) -> DeviceView:
    """See an array on a GPU by its address.

    Parameters
    ----------
    obj : array
        For which `device_of` names a GPU.
    what : str
        How to call it in an error.
    stream : Stream
        Where it will be used; a producer that is asked for DLPack orders its own work before that.
    write : bool
        Whether it is to be written.

    Raises
    ------
    ArrayError
        Read-only or immutable where it is to be written; sparse, masked, or otherwise no plain array.
    DTypeError
        An element type outside of `kvstore.arrays.element_types.DTYPES`.
    """
    kind = _kind(type(obj))
    made: DeviceView = obj if kind == "view" else _readers[kind](obj, what, stream)
    if not _is_supported(made.dtype):
        raise unsupported(what, made.dtype)
    if write and made.readonly:
        raise ArrayError(f"{what} is read-only: {describe(obj)}; pass an array that may be written")
    if write and not made.contiguous and overlaps_itself(made.shape, made.strides, made.dtype.itemsize):
        raise several_at_one_place(what, made.strides, obj)
    return made


@lru_cache(maxsize=64)
def _is_supported(dtype: np.dtype[Any]) -> bool:
    return dtype.name in DTYPES and dtype.isnative


def _of_torch(tensor: Any, what: str, stream: Stream) -> DeviceView:
    seen = tensors.memory_of(tensor, what)
    plain = tensor.detach() if tensor.requires_grad else tensor
    whole = seen.strides is None and not seen.negated
    return DeviceView(
        seen.address, seen.dtype, seen.shape, tensor.device.index, plain, "torch", whole, strides=seen.strides
    )


def _of_cupy(array: Any, what: str, stream: Stream) -> DeviceView:
    whole, device = bool(array.flags.c_contiguous), int(array.device.id)
    dtype, shape = np.dtype(array.dtype), tuple(array.shape)
    return DeviceView(
        array.data.ptr, dtype, shape, device, array, "cupy", whole, strides=tuple(array.strides)
    )


def _of_own(array: DeviceArray, what: str, stream: Stream) -> DeviceView:
    memory = array._memory
    return DeviceView(
        memory.address,
        array.dtype,
        array.shape,
        array.device,
        array,
        "own",
        readonly=array.readonly,
        producer=array._stream,
    )


def _of_any(array: Any, what: str, stream: Stream) -> DeviceView:
    shown = getattr(array, "__cuda_array_interface__", None)
    if shown is None:
        return _of_dlpack(array, what, stream)
    seen = _read(shown, array, what)
    if seen.stream == 0:
        raise ArrayError(f"{what}: a __cuda_array_interface__ with stream 0, which the protocol rules out")
    device = _place(seen.address) if seen.address else 0
    return DeviceView(
        seen.address,
        seen.dtype,
        seen.shape,
        device,
        array,
        "any",
        is_contiguous(seen.shape, seen.strides, seen.dtype.itemsize),
        seen.readonly,
        None if seen.stream is None else Stream(device, seen.stream),
        strides=seen.strides,
    )


def _read(shown: Any, array: Any, what: str) -> interface.Interface:
    seen = interface.read(shown, array, what)
    if seen.buffer is not None:
        raise unusable(array, what, TypeError("its data is a buffer, not an address"))
    return seen


def _of_dlpack(array: Any, what: str, stream: Stream) -> DeviceView:
    immutable = _kind(type(array)) == "jax"
    try:
        lent = dlpack.Imported(dlpack.capsule_of(array, stream=stream.handle), what, dlpack.ON_GPU)
    except KVStoreError:
        raise
    except Exception as error:
        raise ArrayError(f"{what} cannot be viewed: {describe(array)} ({error})") from error
    return DeviceView(
        lent.address,
        lent.dtype,
        lent.shape,
        lent.device,
        lent,
        "jax" if immutable else "any",
        lent.strides is None,
        lent.readonly or immutable,
        strides=lent.strides,
    )


_readers: dict[str, Callable[[Any, str, Stream], DeviceView]] = {
    "torch": _of_torch,
    "cupy": _of_cupy,
    "own": _of_own,
    "any": _of_any,
    "jax": _of_dlpack,
}


# ------------------------------------------------------------------------------------- strided arrays


def gathered(seen: DeviceView, what: str, stream: Stream) -> DeviceView:
    """Return a contiguous copy of a strided array, made by its own library on `stream`."""
    with work_on(stream, seen.kind):
        if seen.kind == "torch":
            return _of_torch(tensors.resolved(seen.owner, what).contiguous(), what, stream)
        if seen.kind == "cupy":
            return _of_cupy(seen.owner.copy(order="C"), what, stream)
    raise _strided(what, seen)


def room_for(seen: DeviceView, what: str, stream: Stream) -> tuple[DeviceView, Callable[[], None]]:
    """Return contiguous memory in place of a strided out, and what brings its content home."""
    with work_on(stream, seen.kind):
        if seen.kind == "torch":
            buffer, bring = tensors.room_for(seen.owner, what)
            return _of_torch(buffer, what, stream), lambda: _bring(seen.kind, bring, stream)
        if seen.kind == "cupy":
            buffer, out = sys.modules["cupy"].empty(seen.shape, seen.owner.dtype), seen.owner
            bring = partial(out.__setitem__, Ellipsis, buffer)
            return _of_cupy(buffer, what, stream), lambda: _bring(seen.kind, bring, stream)
    raise _strided(what, seen)


def _bring(kind: str, bring: Callable[[], None], stream: Stream) -> None:
    with work_on(stream, kind):
        bring()


def _strided(what: str, seen: DeviceView) -> ArrayError:
    return ArrayError(
        f"{what} is not contiguous ({describe(seen.owner)}); strided arrays are copied for PyTorch and CuPy "
        "only: pass a contiguous one"
    )
