"""Host arrays of any library as NumPy views, without importing that library and without a copy.

`readable` and `writable` are the two doors: what comes out is an exact `numpy.ndarray` that the compiled
kernels take. Memory is shared wherever it is contiguous, aligned and in native byte order; where it is not,
`readable` copies and `writable` gives a buffer and says how to bring it home.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..errors import ArrayError, DTypeError, KVStoreError, MissingBackendError
from ..kernels import cpu

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"

_by_size = sorted(cpu.dtypes().items(), key=lambda item: item[1])
FLOATS = tuple(name for name, (_, is_float) in _by_size if is_float)
HALVES = tuple(name for name, (size, is_float) in _by_size if is_float and size == 2)
#: Element types that the local, device, shared and dist stores take.
DTYPES = (*FLOATS, *(name for name, _ in _by_size if name not in FLOATS))

_OF_NONE = (
    ": the .grad of a parameter is None before the first backward, and where the loss does not use the "
    "parameter; leave the key out, or push zeros"
)
_ZERO = bytes(16)  # of any element type
_DLPACK_HOST = (1, 3)  # kDLCPU, kDLCUDAHost (pinned)


class RowSparse:
    """An array of ours that no dense view can stand for: `readable` and `writable` raise."""

    __slots__ = ()


def readable(obj: Any, what: str = "value") -> Array:
    """View `obj` as a NumPy array that may be read.

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
        C-contiguous, aligned, native; shares memory with `obj` where that is already so, else a copy.

    Raises
    ------
    ArrayError
        Not an array, or one that lies on a device.
    DTypeError
        An element type outside of `DTYPES`.
    """
    view = obj if type(obj) is np.ndarray else _view(obj, what)
    if cpu.is_plain(view):
        return view
    dtype = _native(view.dtype, what)
    if cpu.is_plain(view):  # a bfloat16 array, met for the first time
        return view
    return np.array(view, dtype=dtype, order="C", copy=True, subok=False)


def writable(obj: Any, what: str = "out") -> tuple[Array, Callable[[], None] | None]:
    """View `obj` as a NumPy array that may be written.

    Returns
    -------
    array : numpy.ndarray
        As from `readable`: the memory of `obj` itself, or a buffer of its shape.
    deliver : callable or None
        Where `array` is a buffer, call this once it holds the result: it copies to `obj`.

    Raises
    ------
    ArrayError
        Not an array, on a device, read-only, or one with several elements at one place.
    DTypeError
        An element type outside of `DTYPES`.
    """
    view = obj if type(obj) is np.ndarray else _view(obj, what, write=True)
    if not view.flags.writeable:
        raise ArrayError(f"{what} is read-only: {_describe(obj)}; pass an array that may be written")
    if cpu.is_plain(view):
        return view, None
    buffer = np.empty(view.shape, _native(view.dtype, what))
    if _overlaps_itself(view):
        raise ArrayError(
            f"{what} has several elements at one place in memory (strides {view.strides}): {_describe(obj)}; "
            "pass an array with room for all of them, such as a copy"
        )
    return buffer, lambda: np.copyto(view, buffer)


def _overlaps_itself(view: Array) -> bool:
    """Whether a step along one axis is shorter than what lies along the finer ones, as no slice has it."""
    reach = view.itemsize
    for stride, count in sorted((abs(s), n) for s, n in zip(view.strides, view.shape, strict=True) if n > 1):
        if stride < reach:
            return view.size > 0
        reach += stride * (count - 1)
    return False


def direct(obj: Any, write: bool = False) -> Array | None:
    """View the memory of `obj` itself, to be kept; None where `readable` or `writable` would have to copy."""
    view = obj if type(obj) is np.ndarray else _view(obj, "array", write)
    fits = cpu.is_plain(view) and (view.flags.writeable or not write)
    return view if fits else None


def is_array(obj: Any) -> bool:
    """Whether `obj` speaks one of the array protocols (it may still lie on a device)."""
    if isinstance(obj, np.ndarray):
        return True
    if isinstance(obj, (str, bytes, int, float, complex, list, tuple, dict, type(None), np.generic)):
        return False  # a NumPy scalar too: what is written to its view is lost
    names = ("__dlpack__", "__array_interface__", "__cuda_array_interface__", "to_dlpack_for_read")
    return any(hasattr(obj, name) for name in names) or _has_buffer(obj)


def same_type(a: np.dtype[Any], b: np.dtype[Any]) -> bool:
    """Whether two element types are the same but for byte order."""
    return a == b or a.newbyteorder("=") == b.newbyteorder("=")


@lru_cache(maxsize=64)
def name_of(dtype: np.dtype[Any]) -> str:
    """Name of an element type; NumPy works it out each time, which takes microseconds."""
    return dtype.name


def template(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return zeros that take no memory and cannot be written: for their shape and type."""
    return np.ndarray(shape, dtype, _ZERO, strides=(0,) * len(shape))


def dtype_named(name: str) -> np.dtype[Any]:
    """Element type by its name in `DTYPES`. Raises DTypeError for any other."""
    if name not in DTYPES:
        raise DTypeError(f"unknown element type {name!r}; supported are {', '.join(DTYPES)}")
    return _native(bfloat16("array"), "array") if name == "bfloat16" else np.dtype(name)


class _NoBfloat16(DTypeError, MissingBackendError):
    """NumPy knows bfloat16 through ml_dtypes, which is not installed."""


def bfloat16(what: str) -> np.dtype[Any]:
    """NumPy's name for bfloat16, which is ml_dtypes'.

    Raises
    ------
    DTypeError
        ml_dtypes is not installed; a MissingBackendError, too.
    """
    try:
        import ml_dtypes
    except ImportError:
        raise _NoBfloat16(
            f"{what} is bfloat16, which NumPy knows through ml_dtypes: pip install 'kvstore-train[bfloat16]'"
        ) from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def _describe(obj: Any) -> str:
    kind = type(obj)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    shape = getattr(obj, "shape", None)
    return name if shape is None else f"{name} of shape {tuple(shape)}"


def _native(dtype: np.dtype[Any], what: str) -> np.dtype[Any]:
    native = dtype.newbyteorder("=")
    if cpu.supported(native):
        return native
    if native.name == "bfloat16" and native.itemsize == 2:
        cpu.accept_bfloat16(native)
        return native
    raise DTypeError(f"{what} has element type {dtype}; supported are {', '.join(DTYPES)}")


def _view(obj: Any, what: str, write: bool = False) -> Array:
    """Find the protocol that `obj` speaks."""
    if isinstance(obj, np.ndarray):
        if isinstance(obj, np.ma.MaskedArray):
            raise ArrayError(f"{what} is a masked array, whose mask would be lost; pass .filled(...) instead")
        return obj.view(np.ndarray)
    refuse_what_is_no_array(obj, what)
    if hasattr(obj, "__dlpack__"):
        return _from_dlpack(obj, what, write)
    if hasattr(obj, "__cuda_array_interface__"):
        raise _on_device(obj, what)
    if hasattr(obj, "to_dlpack_for_read"):  # MXNet's NDArray; writing through it is what `write` asks for
        return _imported(_MXNetDLPack(obj, write), what, write)
    try:
        return np.asarray(obj) if hasattr(obj, "__array_interface__") else np.asarray(memoryview(obj))
    except (TypeError, ValueError, BufferError) as error:
        raise ArrayError(f"{what} is not a usable array: {_describe(obj)} ({error})") from error


def refuse_what_is_no_array(obj: Any, what: str) -> None:
    """Raise `ArrayError` for what is no dense array of any library; `what` it is to be, for the message."""
    if isinstance(obj, RowSparse):
        raise ArrayError(f"{what} is row-sparse where a dense array is needed: {obj!r}")
    _refuse_foreign_sparse(obj, what)
    if not is_array(obj):
        hint = _OF_NONE if obj is None and what.startswith("value") else ""
        raise ArrayError(
            f"{what} must be an array (NumPy, PyTorch, JAX, CuPy, MXNet ...), not {_describe(obj)}{hint}"
        )


def _refuse_foreign_sparse(obj: object, what: str) -> None:
    """Raise for SciPy, PyTorch or MXNet sparse arrays, which would lose their meaning as dense ones."""
    kind = getattr(obj, "stype", None) or getattr(obj, "format", None) or str(getattr(obj, "layout", ""))
    if kind in ("csr", "csc", "coo", "bsr", "dia", "dok", "lil", "row_sparse") or "sparse" in str(kind):
        raise ArrayError(f"{what} is a {kind} array; pass kv.RowSparseArray(data, indices, shape) instead")


def _on_device(obj: Any, what: str) -> MissingBackendError:
    return MissingBackendError(
        f"{what} lies on a device: {_describe(obj)}; this store takes host arrays only: "
        "copy it to the host first, or use create('device')"
    )


def _from_dlpack(obj: Any, what: str, write: bool) -> Array:
    if getattr(obj, "requires_grad", False) and hasattr(obj, "detach"):
        obj = obj.detach()  # a torch parameter: its memory, without its place in the graph
    if "bfloat16" in str(getattr(obj, "dtype", "")) and hasattr(obj, "data_ptr"):
        return _bfloat16_view(obj, what)
    immutable = type(obj).__module__.partition(".")[0] in ("jax", "jaxlib")
    return _imported(obj, what, write and not immutable)


def _imported(obj: Any, what: str, write: bool) -> Array:
    """Let NumPy import; whatever the producer raises, the caller gets our error."""
    try:
        if int(obj.__dlpack_device__()[0]) not in _DLPACK_HOST:
            raise _on_device(obj, what)
        view = np.from_dlpack(obj)
        if write and not view.flags.writeable and not _says_who_may_write(obj):
            return np.asarray(_Writable(view))
        return view
    except KVStoreError:
        raise
    except Exception as error:
        raise DTypeError(f"{what} cannot be viewed: {_describe(obj)} ({error})") from error


def _says_who_may_write(obj: Any) -> bool:
    """Whether it was the producer who marked its memory as read-only.

    Since DLPack 1.0 a capsule can say so, and NumPy 2.1 listens. All other memory NumPy marks by itself.
    """
    if np.lib.NumpyVersion(np.__version__) < "2.1.0":
        return False
    try:
        return "dltensor_versioned" in repr(obj.__dlpack__(max_version=(1, 0)))
    except TypeError:
        return False


class _Writable:
    """The memory of a view, marked as writable; keeps the view alive."""

    def __init__(self, view: Array) -> None:
        self._view = view
        self.__array_interface__ = {**view.__array_interface__, "data": (view.ctypes.data, False)}


def _bfloat16_view(obj: Any, what: str) -> Array:
    """Torch's bfloat16: NumPy's DLPack does not know the type, so take the address."""
    dtype = bfloat16(what)
    if not obj.is_contiguous():
        raise ArrayError(f"{what} is a strided bfloat16 tensor; pass a contiguous one")
    count = math.prod(obj.shape)
    if count == 0:
        return np.empty(tuple(obj.shape), dtype)
    memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(obj.data_ptr())
    memory._owner = obj  # the view keeps the memory, and that keeps the tensor
    return np.ndarray(tuple(obj.shape), dtype, buffer=memory)


class _MXNetDLPack:
    """MXNet 1.9.1 hands out DLPack capsules under names of its own."""

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
    except (TypeError, BufferError):
        return False
    return True
