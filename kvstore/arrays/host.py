"""Host arrays of any library as NumPy views, without importing that library and without a copy.

`readable_array` and `writable_array` return an exact `numpy.ndarray` for the compiled kernels. It shares
memory with the array if that is contiguous, aligned and in native byte order; else `readable_array` copies,
and `writable_array` returns a buffer and a function that copies the buffer to the array.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..errors import ArrayError, DTypeError, KVStoreError, MissingBackendError, ShapeError
from ..kernels import cpu
from . import tensors
from .addresses import array_at, byte_extent, describe_object, overlaps_itself, unusable_array_error
from .element_types import native_dtype

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"

_OF_NONE = (
    ": the .grad of a parameter is None before the first backward, and where the loss does not use the "
    "parameter; leave the key out, or push zeros"
)
_ZERO = bytes(16)  # of any element type


class RowSparseBase:
    """An array of kvstore without a dense view: `readable_array` and `writable_array` raise."""

    __slots__ = ()


def readable_array(obj: Any, what: str = "value") -> Array:
    """View `obj` as a NumPy array for reading.

    Parameters
    ----------
    obj : array
        A NumPy array, or anything with ``__dlpack__``, ``__array_interface__``, the buffer protocol, or
        MXNet's ``to_dlpack_for_read``.
    what : str
        How to call it in an error.

    Returns
    -------
    numpy.ndarray
        C-contiguous, aligned, in native byte order. It shares memory with `obj` if `obj` is such an array,
        else it is a copy.

    Raises
    ------
    ArrayError
        `obj` is not an array, or is on a device.
    DTypeError
        An element type outside of `DTYPES`.
    """
    view = obj if type(obj) is np.ndarray else _protocol_view(obj, what)
    if cpu.is_plain(view):
        return view
    dtype = native_dtype(view.dtype, what)
    if cpu.is_plain(view):  # the first bfloat16 array of this process
        return view
    return np.array(view, dtype=dtype, order="C", copy=True, subok=False)


def writable_array(obj: Any, what: str = "out") -> tuple[Array, Callable[[], None] | None]:
    """View `obj` as a NumPy array for writing.

    Returns
    -------
    array : numpy.ndarray
        As from `readable_array`: the memory of `obj` itself, or a buffer of its shape.
    deliver : callable or None
        If `array` is a buffer, a function that copies its content to `obj`; call it when the buffer has the
        result.

    Raises
    ------
    ArrayError
        `obj` is not an array, is on a device, is read-only, or has several elements at one address.
    DTypeError
        An element type outside of `DTYPES`.
    """
    view, deliver = (obj, None) if type(obj) is np.ndarray else _writable_view(obj, what)
    if not view.flags.writeable:
        raise ArrayError(f"{what} is read-only: {describe_object(obj)}; {_place_for_outs(obj)}")
    if cpu.is_plain(view):
        return view, deliver
    dtype = native_dtype(view.dtype, what)
    if cpu.is_plain(view):  # the first bfloat16 array of this process
        return view, deliver
    if overlaps_itself(view.shape, view.strides, view.itemsize):
        raise overlapping_elements_error(what, view.strides, obj)
    buffer = np.empty(view.shape, dtype)
    return buffer, lambda: np.copyto(view, buffer)


def overlapping_elements_error(what: str, strides: object, obj: Any) -> ArrayError:
    """Make the error for an out with overlapping elements, which cannot all be written."""
    return ArrayError(
        f"{what} has several elements at one place in memory (strides {strides}): {describe_object(obj)}; "
        "pass an array with room for all of them, such as a copy"
    )


def direct_view(obj: Any, write: bool = False) -> Array | None:
    """View the memory of `obj` itself; None if that would need a copy. The view can be kept."""
    if type(obj) is np.ndarray:
        view = obj
    elif tensors.is_tensor_type(type(obj)):
        seen = _tensor_memory(obj, "array")
        if seen.negated:
            return None
        tensors.forbid_resize(seen.storage)
        view = _tensor_view(seen)
    else:
        view = _protocol_view(obj, "array", write)
    fits = cpu.is_plain(view) and (view.flags.writeable or not write)
    return view if fits else None


def number_array(obj: Any, what: str) -> Array:
    """View an array, or a list of numbers, as an array of any type.

    Raises
    ------
    ShapeError
        The list has other elements than numbers, or its inner lists have different lengths.
    ArrayError, DTypeError
        As `readable_array`.
    """
    if isinstance(obj, np.ndarray):
        return exact_array(obj, what)
    if not isinstance(obj, (list, tuple)):
        return readable_array(obj, what)
    try:
        if any(map(tensors.is_tensor_type, {type(one) for one in obj})):
            obj = [readable_array(one, what) if tensors.is_tensor_type(type(one)) else one for one in obj]
        return np.asarray(obj)
    except KVStoreError:
        raise
    except Exception as error:  # the elements of a list can be any objects
        raise ShapeError(f"{what} are not a list of numbers: {error}") from error


def is_array(obj: Any) -> bool:
    """Return whether `obj` has one of the array protocols (it can be on a device)."""
    if isinstance(obj, np.ndarray):
        return True
    if isinstance(obj, (str, bytes, int, float, complex, list, tuple, dict, type(None), np.generic)):
        return False  # a NumPy scalar too: a write to its view would be lost
    names = ("__dlpack__", "__array_interface__", "__cuda_array_interface__", "to_dlpack_for_read")
    return any(hasattr(obj, name) for name in names) or _has_buffer(obj)


def shape_template(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return zeros that use no memory and cannot be written, as a description of shape and type."""
    return np.ndarray(shape, dtype, _ZERO, strides=(0,) * len(shape))


def _writable_view(obj: Any, what: str) -> tuple[Array, Callable[[], None] | None]:
    """View an out.

    If its values are not those in its memory, return a buffer and a function that copies it.
    """
    if not tensors.is_tensor_type(type(obj)):
        return _protocol_view(obj, what, write=True), None
    seen = _tensor_memory(obj, what)
    if not seen.negated:
        return _tensor_view(seen), None
    if overlaps_itself(seen.shape, seen.strides, seen.dtype.itemsize):
        raise overlapping_elements_error(what, seen.strides, obj)
    buffer, deliver = tensors.contiguous_out(obj, what)
    return _tensor_view(_tensor_memory(buffer, what)), deliver


def _protocol_view(obj: Any, what: str, write: bool = False) -> Array:
    """View an object by the protocol that it supports."""
    kind = type(obj)
    if tensors.is_tensor_type(kind):
        seen = _tensor_memory(obj, what)
        return _tensor_view(
            _tensor_memory(tensors.resolved_tensor(obj, what), what) if seen.negated else seen
        )
    if isinstance(obj, np.ndarray):
        return exact_array(obj, what)
    refuse_non_array(obj, what)
    if is_jax_type(kind):
        return _jax_view(obj, what)
    if hasattr(obj, "__dlpack__"):
        return _import_dlpack(obj, what, write)
    if hasattr(obj, "__cuda_array_interface__"):
        raise _on_device(obj, what)
    if hasattr(obj, "to_dlpack_for_read"):  # MXNet's NDArray; for `write`, through a capsule for writing
        return _import_dlpack(_MXNetDLPack(obj, write), what, write)
    return _interface_view(obj, what) if hasattr(obj, "__array_interface__") else _buffer_view(obj, what)


def refuse_non_array(obj: Any, what: str) -> None:
    """Raise `ArrayError` for an object that is not a dense array of any library.

    `what` names it in the message.
    """
    if isinstance(obj, RowSparseBase):
        raise ArrayError(f"{what} is row-sparse where a dense array is needed: {obj!r}")
    _refuse_foreign_sparse(obj, what)
    if not is_array(obj):
        hint = _OF_NONE if obj is None and what.startswith("value") else ""
        raise ArrayError(
            f"{what} must be an array (NumPy, PyTorch, JAX, CuPy, MXNet ...), "
            f"not {describe_object(obj)}{hint}"
        )


def _refuse_foreign_sparse(obj: object, what: str) -> None:
    """Raise for sparse arrays of SciPy, PyTorch or MXNet, whose dense reading would be wrong."""
    try:
        kind = getattr(obj, "stype", None) or getattr(obj, "format", None) or str(getattr(obj, "layout", ""))
    except Exception:  # any exception: a released memoryview, for example
        return
    if kind in ("csr", "csc", "coo", "bsr", "dia", "dok", "lil", "row_sparse") or "sparse" in str(kind):
        raise ArrayError(f"{what} is a {kind} array; pass kv.RowSparseArray(data, indices, shape) instead")


def _on_device(obj: Any, what: str) -> MissingBackendError:
    return MissingBackendError(
        f"{what} lies on a device: {describe_object(obj)}; this store takes host arrays only: "
        "copy it to the host first, or use create('device') if it lies on a CUDA GPU"
    )


def _place_for_outs(obj: Any) -> str:
    if is_jax_type(type(obj)):
        return (
            "arrays of JAX never change: pull into a NumPy array, or use kvstore.jax, which returns new ones"
        )
    return "pass an array that may be written"


# ---------------------------------------------------------------------------------- one protocol each


def _tensor_memory(tensor: Any, what: str) -> tensors.TensorMemory:
    seen = tensors.memory_of(tensor, what)
    if not tensor.is_cpu:
        raise _on_device(tensor, what)
    return seen


def _tensor_view(seen: tensors.TensorMemory) -> Array:
    return array_at(seen.address, seen.shape, seen.dtype, seen.strides, seen.storage, readonly=False)


def exact_array(array: Array, what: str) -> Array:
    """View an array of a subclass of NumPy's class as an exact NumPy array."""
    if isinstance(array, np.ma.MaskedArray):
        raise ArrayError(f"{what} is a masked array, whose mask would be lost; pass .filled(...) instead")
    if isinstance(array, np.memmap):
        _check_file(array, what)
    return array.view(np.ndarray)


def _check_file(array: np.memmap[Any, Any], what: str) -> None:
    """Raise for an array in a file that was truncated: a read there would end the process (SIGBUS)."""
    mapped: Any = getattr(array, "_mmap", None)
    if not isinstance(mapped, mmap.mmap) or not array.size:
        return
    start = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
    _, end = byte_extent(array.shape, array.strides, array.itemsize)
    position = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    needed = position + array.__array_interface__["data"][0] - start + end
    if mapped.size() < needed:
        raise ArrayError(
            f"{what} lies in the file {array.filename}, which has {mapped.size()} bytes where {needed} are "
            "needed: it was truncated after it was mapped"
        )


def _is_jax_type(cls: Any) -> bool:
    """Return whether a class is one of JAX's arrays."""
    return any(base.__module__.partition(".")[0] in ("jax", "jaxlib") for base in cls.__mro__)


is_jax_type: Callable[[Any], bool] = lru_cache(maxsize=1024)(_is_jax_type)


def check_jax_array(obj: Any, what: str) -> None:
    """Raise ArrayError for an array of JAX without a value: traced, deleted or donated."""
    if any(base.__name__ == "Tracer" for base in type(obj).__mro__):
        raise ArrayError(
            f"{what} is a traced array of JAX, which has no value yet: {describe_object(obj)}; call the "
            "store outside of jax.jit, grad and vmap, or use kvstore.jax"
        )
    if obj.is_deleted():
        raise ArrayError(
            f"{what} was deleted or donated to a jitted function: {describe_object(obj)}; pass its result"
        )


def _jax_view(obj: Any, what: str) -> Array:
    """View an array of JAX by its `__array__`, which supports all types and copies nothing on the host."""
    check_jax_array(obj, what)
    try:
        if any(device.platform != "cpu" for device in obj.devices()):
            raise _on_device(obj, what)
        return np.asarray(obj)
    except KVStoreError:
        raise
    except Exception as error:
        raise DTypeError(f"{what} cannot be viewed: {describe_object(obj)} ({error})") from error


def _import_dlpack(obj: Any, what: str, write: bool) -> Array:
    """View an array by DLPack; any exception of the producer becomes one of kvstore's errors."""
    from . import dlpack  # imported here and below: few programs need these modules

    try:
        if int(obj.__dlpack_device__()[0]) not in dlpack.ON_HOST:
            raise _on_device(obj, what)
        lent = dlpack.ImportedTensor(dlpack.capsule_of(obj), what, dlpack.ON_HOST)
    except KVStoreError:
        raise
    except Exception as error:
        raise DTypeError(f"{what} cannot be viewed: {describe_object(obj)} ({error})") from error
    readonly = lent.readonly or not (write or lent.versioned)
    return array_at(lent.address, lent.shape, lent.dtype, lent.strides, lent, readonly)


def _interface_view(obj: Any, what: str) -> Array:
    from . import interface

    try:
        given = obj.__array_interface__
    except Exception as error:
        raise unusable_array_error(obj, what, error) from error
    seen = interface.read_interface(given, obj, what)
    try:
        if seen.buffer is not None and 0 not in seen.shape:
            return np.ndarray(seen.shape, seen.dtype, seen.buffer, seen.address, seen.strides)
        return array_at(seen.address, seen.shape, seen.dtype, seen.strides, obj, seen.readonly)
    except ValueError as error:  # too many dimensions for NumPy
        raise unusable_array_error(obj, what, error) from error


def _buffer_view(obj: Any, what: str) -> Array:
    try:
        return np.asarray(memoryview(obj))
    except (TypeError, ValueError, BufferError) as error:
        raise unusable_array_error(obj, what, error) from error


class _MXNetDLPack:
    """An array of MXNet 1.9.1, whose methods for DLPack capsules have other names."""

    def __init__(self, array: Any, write: bool) -> None:
        self._array, self._write = array, write

    def __dlpack__(self, **_: Any) -> Any:
        return self._array.to_dlpack_for_write() if self._write else self._array.to_dlpack_for_read()

    def __dlpack_device__(self) -> tuple[int, int]:
        if self._array.context.device_type not in ("cpu", "cpu_pinned"):
            raise _on_device(self._array, "array")
        return (1, 0)


def _has_buffer(obj: Any) -> bool:
    try:
        memoryview(obj).release()
    except (TypeError, ValueError, BufferError):
        return False
    return True
