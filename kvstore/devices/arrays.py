"""GPU arrays of any library as addresses, without importing that library; and GPU arrays of kvstore.

`device_of` returns the GPU of an object, `stream_for` the current stream of its owner, and `view_array` its
address, type and shape. The module of the type distinguishes torch, CuPy and JAX, so that no library is
imported.
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
from ..arrays.addresses import Strides, describe_object, is_contiguous, overlaps_itself, unusable_array_error
from ..arrays.element_types import DTYPES, unsupported_error
from ..arrays.host import is_jax_type, overlapping_elements_error, refuse_non_array
from ..arrays.sparse import RowSparseArray
from ..errors import ArrayError, KVStoreError
from . import driver, streams
from .memory import DeviceMemory, host_copy
from .streams import DeviceStream

_HOST_TYPES = (np.ndarray, np.generic, RowSparseArray, str, bytes, bool, int, float, complex, list, tuple)


@dataclass(eq=False, slots=True)
class DeviceView:
    """The description of an array on a GPU for kernels.

    Attributes
    ----------
    address, device : int
    dtype : numpy.dtype
    shape : tuple of int
    contiguous, readonly : bool
    kind : str
        Library of the array: ``"torch"``, ``"cupy"``, ``"jax"``, ``"own"``, or ``"any"`` for others with
        ``__cuda_array_interface__`` or DLPack.
    owner : object
        Keeps the memory alive.
    producer : Stream or None
        The stream that writes its content, if the array has that information.
    stream : Stream or None
        The stream of the work, for a view that was made before the work.
    strides : tuple of int or None
        In bytes; None if the protocol has none. Used to check that elements of outs do not overlap.
    """

    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    device: int
    owner: Any
    kind: str = "any"
    contiguous: bool = True
    readonly: bool = False
    producer: DeviceStream | None = None
    stream: DeviceStream | None = None
    strides: Strides = None

    @property
    def nbytes(self) -> int:
        """Size of its elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class DeviceArray:
    """A C-contiguous array of a store on a GPU, as returned by `KVStore.view` and passed to updaters.

    It has ``__cuda_array_interface__`` (version 3) and DLPack, so ``torch.from_dlpack(array)``,
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
        memory: DeviceMemory,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        stream: DeviceStream,
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
        """Size of its elements in bytes."""
        return self.size * self.dtype.itemsize

    def numpy(self) -> npt.NDArray[Any]:
        """Copy to the host; blocks until the store's work on it is complete."""
        array = np.empty(self.shape, self.dtype)
        host_copy(driver.get_driver(), self._memory.address, array, self._stream.handle, self.device)
        return array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the protocol. bfloat16 is described as two bytes without a type, as PyTorch does."""
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
            raise BufferError("this array is exported on its device and without a copy only; copy it first")
        if stream != -1:
            streams.order_streams(
                driver.get_driver(), self._stream, DeviceStream(self.device, stream or driver.LEGACY_STREAM)
            )
        return dlpack.export_capsule(
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


# ------------------------------------------------------------------------------------------- location


def _kind_of(cls: Any) -> str:
    """Return the library of an array type; "host" if its arrays cannot be on a GPU."""
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
    """Return the number of the GPU on which an object is; None if it is on the host, or is not an array.

    Raises
    ------
    ArrayError
        It is on a device of another vendor.
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
    """Raise `ArrayError` unless all values of one push are on GPUs."""
    for value in values:
        if device_of(value) is None:
            refuse_non_array(value, f"value of key {key!r}")
            raise ArrayError(
                f"the values of key {key!r} lie on the host and on a GPU; give arrays of one kind in one list"
            )


def _device_of_any(obj: Any) -> int | None:
    """Return the GPU of an object in one of the protocols.

    None also for an object that raises: the reader for the host makes the error.
    """
    shown = getattr(obj, "__cuda_array_interface__", None)
    if shown is not None:
        address = _read_interface(shown, obj, "an array").address
        return _memory_place(address) if address else 0
    ask = getattr(obj, "__dlpack_device__", None)
    try:
        kind, index = (0, 0) if ask is None else (int(part) for part in ask())
    except Exception:  # any exception: a deleted array of JAX, for example
        return None
    return index if kind in dlpack.ON_GPU else None


def _memory_place(address: int) -> int:
    return driver.get_driver().device_of(address)


def any_on_device(arrays: Iterable[Any]) -> bool:
    """Return whether one of these arrays is on a GPU."""
    return any(type(array) is not np.ndarray and device_of(array) is not None for array in arrays)


def addresses_of(objects: list[Any]) -> list[int]:
    """Return the present addresses of arrays on GPUs."""
    if all(_kind(type(one)) == "torch" for one in objects):
        return [one.data_ptr() for one in objects]
    return [address_of(one) for one in objects]


def is_tensor(obj: Any) -> bool:
    """Return whether an object is a tensor of PyTorch."""
    return _kind(type(obj)) == "torch"


def address_of(obj: Any) -> int:
    """Return the present address of an array on a GPU."""
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


def stream_for(arrays: Iterable[Any], device: int) -> DeviceStream:
    """Return the current stream of the owner of these arrays.

    PyTorch's current stream of the device if an array is PyTorch's; else CuPy's; else the stream of the
    protocol of an array; else the legacy default stream, which synchronises with all other streams.
    """
    named: DeviceStream | None = None
    cupy = False
    for array in arrays:
        kind = _kind(type(array))
        if kind == "torch":
            return streams.of_torch(device)
        if kind == "view" and array.stream is not None and array.stream.device == device:
            ahead: DeviceStream = array.stream
            return ahead
        cupy = cupy or kind == "cupy"
        if named is None and kind == "any" and device_of(array) == device:
            handle = (getattr(array, "__cuda_array_interface__", None) or {}).get("stream")
            named = None if handle is None else DeviceStream(device, handle)
    if cupy:
        return streams.of_cupy(device)
    return named or DeviceStream(device, driver.LEGACY_STREAM)


def stream_owner(objects: list[Any]) -> list[Any]:
    """Return the array that determines the stream of `stream_for`, or None."""
    kinds = [_kind(type(one)) for one in objects]
    for kind in ("torch", "cupy"):
        if kind in kinds:
            return [objects[kinds.index(kind)]]
    named = (one for one in objects if (getattr(one, "__cuda_array_interface__", None) or {}).get("stream"))
    return list(itertools.islice(named, 1))


def work_on(stream: DeviceStream, kind: str) -> AbstractContextManager[Any]:
    """Return a context in which a library runs its own operations on a stream."""
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


def view_array(obj: Any, what: str, stream: DeviceStream, write: bool = False) -> DeviceView:
    """View an array on a GPU by its address.

    Parameters
    ----------
    obj : array
        An array for which `device_of` returns a GPU.
    what : str
        Name of the array in errors.
    stream : Stream
        The stream of the work; a producer of a DLPack capsule orders its own work before it.
    write : bool
        Whether the array will be written.

    Raises
    ------
    ArrayError
        The array is read-only or immutable and would be written; or it is sparse, masked, or not a plain
        array.
    DTypeError
        An element type outside of `kvstore.arrays.element_types.DTYPES`.
    """
    kind = _kind(type(obj))
    made: DeviceView = obj if kind == "view" else _readers[kind](obj, what, stream)
    if not _is_supported(made.dtype):
        raise unsupported_error(what, made.dtype)
    if write and made.readonly:
        raise ArrayError(f"{what} is read-only: {describe_object(obj)}; pass an array that may be written")
    if write and not made.contiguous and overlaps_itself(made.shape, made.strides, made.dtype.itemsize):
        raise overlapping_elements_error(what, made.strides, obj)
    return made


@lru_cache(maxsize=64)
def _is_supported(dtype: np.dtype[Any]) -> bool:
    return dtype.name in DTYPES and dtype.isnative


def _of_torch(tensor: Any, what: str, stream: DeviceStream) -> DeviceView:
    seen = tensors.memory_of(tensor, what)
    plain = tensor.detach() if tensor.requires_grad else tensor
    whole = seen.strides is None and not seen.negated
    return DeviceView(
        seen.address, seen.dtype, seen.shape, tensor.device.index, plain, "torch", whole, strides=seen.strides
    )


def _of_cupy(array: Any, what: str, stream: DeviceStream) -> DeviceView:
    whole, device = bool(array.flags.c_contiguous), int(array.device.id)
    dtype, shape = np.dtype(array.dtype), tuple(array.shape)
    return DeviceView(
        array.data.ptr, dtype, shape, device, array, "cupy", whole, strides=tuple(array.strides)
    )


def _of_own(array: DeviceArray, what: str, stream: DeviceStream) -> DeviceView:
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


def _of_any(array: Any, what: str, stream: DeviceStream) -> DeviceView:
    shown = getattr(array, "__cuda_array_interface__", None)
    if shown is None:
        return _of_dlpack(array, what, stream)
    seen = _read_interface(shown, array, what)
    if seen.stream == 0:
        raise ArrayError(f"{what}: its __cuda_array_interface__ has stream 0, which is not permitted")
    device = _memory_place(seen.address) if seen.address else 0
    return DeviceView(
        seen.address,
        seen.dtype,
        seen.shape,
        device,
        array,
        "any",
        is_contiguous(seen.shape, seen.strides, seen.dtype.itemsize),
        seen.readonly,
        None if seen.stream is None else DeviceStream(device, seen.stream),
        strides=seen.strides,
    )


def _read_interface(shown: Any, array: Any, what: str) -> interface.ArrayInterface:
    seen = interface.read_interface(shown, array, what)
    if seen.buffer is not None:
        raise unusable_array_error(array, what, TypeError("its data is a buffer, not an address"))
    return seen


def _of_dlpack(array: Any, what: str, stream: DeviceStream) -> DeviceView:
    immutable = _kind(type(array)) == "jax"
    try:
        lent = dlpack.ImportedTensor(dlpack.capsule_of(array, stream=stream.handle), what, dlpack.ON_GPU)
    except KVStoreError:
        raise
    except Exception as error:
        raise ArrayError(f"{what} cannot be viewed: {describe_object(array)} ({error})") from error
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


_readers: dict[str, Callable[[Any, str, DeviceStream], DeviceView]] = {
    "torch": _of_torch,
    "cupy": _of_cupy,
    "own": _of_own,
    "any": _of_any,
    "jax": _of_dlpack,
}


# ------------------------------------------------------------------------------------- strided arrays


def gather_copy(seen: DeviceView, what: str, stream: DeviceStream) -> DeviceView:
    """Return a contiguous copy of a strided array, made by its own library on `stream`."""
    with work_on(stream, seen.kind):
        if seen.kind == "torch":
            return _of_torch(tensors.resolved_tensor(seen.owner, what).contiguous(), what, stream)
        if seen.kind == "cupy":
            return _of_cupy(seen.owner.copy(order="C"), what, stream)
    raise _strided_error(what, seen)


def contiguous_out(
    seen: DeviceView, what: str, stream: DeviceStream
) -> tuple[DeviceView, Callable[[], None]]:
    """Return contiguous memory for a strided out, and a function that copies its content to the out."""
    with work_on(stream, seen.kind):
        if seen.kind == "torch":
            buffer, bring = tensors.contiguous_out(seen.owner, what)
            return _of_torch(buffer, what, stream), lambda: _copy_back(seen.kind, bring, stream)
        if seen.kind == "cupy":
            buffer, out = sys.modules["cupy"].empty(seen.shape, seen.owner.dtype), seen.owner
            bring = partial(out.__setitem__, Ellipsis, buffer)
            return _of_cupy(buffer, what, stream), lambda: _copy_back(seen.kind, bring, stream)
    raise _strided_error(what, seen)


def _copy_back(kind: str, bring: Callable[[], None], stream: DeviceStream) -> None:
    with work_on(stream, kind):
        bring()


def _strided_error(what: str, seen: DeviceView) -> ArrayError:
    return ArrayError(
        f"{what} is not contiguous ({describe_object(seen.owner)}); strided arrays are copied for PyTorch "
        "and CuPy only: pass a contiguous one"
    )
