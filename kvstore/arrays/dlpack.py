"""DLPack capsules, for the host and for GPUs: read with ctypes, written by NumPy.

NumPy's reader does not know GPUs and bfloat16, before NumPy 2.1 returns read-only arrays only, and returns
new memory with any content for a capsule without memory. That of cuda-core, which is only installed with the
extra `cuda`, does not compare the device in the capsule with the device that the object names, and returns
address 0 for such a capsule. The layouts are those of dlpack.h, versions 0.8 (``dltensor``) and 1.0
(``dltensor_versioned``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import ArrayError, DTypeError
from .addresses import Strides, array_at, byte_extent, is_contiguous, is_possible
from .element_types import bfloat16

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
#: Kinds of devices whose memory the host, or a GPU, can read at its address.
ON_HOST, ON_GPU = (CPU, CUDA_HOST), (CUDA, CUDA_MANAGED)
_MOST_DIMENSIONS = 64  # of NumPy 2
_READ_ONLY = 1
_BFLOAT = 4
_KINDS = {0: "int", 1: "uint", 2: "float", _BFLOAT: "bfloat"}


class _DLDevice(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _ManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _VersionedTensor(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


def _python_function(name: str, result: Any, *arguments: Any) -> Any:
    prototype = ctypes.PYFUNCTYPE(result, *arguments)
    return prototype((name, ctypes.pythonapi))


_pointer = _python_function("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_is_valid = _python_function("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_rename = _python_function("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)

_LAYOUTS: dict[bytes, Any] = {b"dltensor_versioned": _VersionedTensor, b"dltensor": _ManagedTensor}
# A capsule keeps a pointer to its name.
_USED = {name: b"used_" + name for name in _LAYOUTS}


def capsule_of(obj: Any, versioned: bool = True, **options: Any) -> Any:
    """Return the capsule of an object; `options` such as the stream are for its `__dlpack__`."""
    if not versioned:
        return obj.__dlpack__(**options)
    try:
        return obj.__dlpack__(max_version=(1, 0), **options)
    except TypeError:  # a producer older than DLPack 1.0
        return obj.__dlpack__(**options)


def _name_of(capsule: Any) -> bytes | None:
    """Return the name of an unused capsule; None if the object is no such capsule."""
    return next((name for name in _LAYOUTS if _is_valid(capsule, name)), None)


def _struct_of(capsule: Any, name: bytes | None) -> Any:
    """Return the struct of a capsule with this name; ValueError if the name is wrong."""
    at = _pointer(capsule, name)
    return _LAYOUTS[name or b""].from_address(at)


class ImportedTensor:
    """The tensor in a capsule of another library; it is released when this object is deleted.

    Parameters
    ----------
    capsule : PyCapsule
    what : str
        Name of the tensor in errors.
    kinds : tuple of int
        Kinds of devices on which the tensor can be.

    Attributes
    ----------
    address, shape, strides, dtype, device, readonly, versioned
        Strides count bytes, and are None if the tensor is C-contiguous; `dtype` is a NumPy dtype.

    Raises
    ------
    ArrayError
        The object is no capsule, or was used before; or the tensor is on another kind of device, or has no
        memory for its elements.
    DTypeError
        NumPy does not know the element type.
    """

    def __init__(self, capsule: Any, what: str, kinds: tuple[int, ...]) -> None:
        self._release: Callable[[], None] | None = None
        name = _name_of(capsule)
        if name is None:
            raise ArrayError(f"{what} gave no DLPack capsule that can be read: {capsule!r}")
        managed = _struct_of(capsule, name)
        at, tensor = ctypes.addressof(managed), managed.tensor
        _rename(capsule, _USED[name])
        if managed.deleter:
            deleter = _Deleter(managed.deleter)
            self._release = lambda: deleter(at)
        self.device_kind, self.device = tensor.device.kind, tensor.device.index
        if self.device_kind not in kinds:
            raise ArrayError(f"{what} gave a DLPack capsule of device {self.device_kind}, and named another")
        self.dtype = _tensor_dtype(tensor.dtype, what)
        self.shape = _tensor_shape(tensor, what)
        self.address = (tensor.data or 0) + tensor.byte_offset
        self.strides = _tensor_strides(tensor, self.shape, self.dtype.itemsize)
        #: Whether the capsule can express that its memory is read-only.
        self.versioned = name == b"dltensor_versioned"
        self.readonly = self.versioned and bool(managed.flags & _READ_ONLY)
        _check_memory(tensor, self.shape, self.strides, self.dtype.itemsize, what)

    def __del__(self) -> None:
        release, self._release = getattr(self, "_release", None), None
        if release is not None:
            release()


def _tensor_shape(tensor: _DLTensor, what: str) -> tuple[int, ...]:
    count = tensor.ndim
    if not 0 <= count <= _MOST_DIMENSIONS or (count and not tensor.shape):
        raise ArrayError(f"{what} gave a DLPack capsule of {count} dimensions; pass one of at most 64")
    shape = tuple(tensor.shape[:count])
    if min(shape, default=0) < 0:
        raise ArrayError(f"{what} gave a DLPack capsule of shape {shape}")
    return shape


def _tensor_strides(tensor: _DLTensor, shape: tuple[int, ...], itemsize: int) -> Strides:
    if not tensor.strides:
        return None
    found = tuple(step * itemsize for step in tensor.strides[: tensor.ndim])
    return None if is_contiguous(shape, found, itemsize) else found


def _check_memory(
    tensor: _DLTensor, shape: tuple[int, ...], strides: Strides, itemsize: int, what: str
) -> None:
    """Raise unless all elements are in the range of valid addresses."""
    begin, end = byte_extent(shape, strides, itemsize)
    if not is_possible(tensor.data + tensor.byte_offset if tensor.data else 0, begin, end):
        raise ArrayError(
            f"{what} gave a DLPack capsule of shape {shape} without memory for it (address "
            f"{tensor.data or 0}, offset {tensor.byte_offset}); the array may have been freed"
        )


def _tensor_dtype(found: _DataType, what: str) -> np.dtype[Any]:
    kind = _KINDS.get(found.code)
    if kind is None or found.lanes != 1 or found.bits % 8:
        raise DTypeError(f"{what} has the DLPack type ({found.code}, {found.bits}, {found.lanes})")
    if kind == "bfloat":
        return bfloat16(what)
    try:
        return np.dtype(f"{kind}{found.bits}")
    except TypeError:
        raise DTypeError(f"{what} has element type {kind}{found.bits}, which NumPy does not know") from None


def export_capsule(
    owner: Any,
    address: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    device: tuple[int, int],
    readonly: bool,
    max_version: tuple[int, int] | None,
) -> Any:
    """Return a capsule of C-contiguous memory; `owner` stays alive until the consumer releases the capsule.

    NumPy makes the capsule, of a view of this memory, and this function changes device and type in it.

    Raises
    ------
    BufferError
        The memory is read-only, and the consumer's version of DLPack (`max_version`), or NumPy before 2.1,
        cannot express this.
    """
    versioned = max_version is not None and max_version[0] >= 1
    if readonly and not versioned:
        raise BufferError("this memory is read-only, which DLPack expresses from version 1.0 on; copy it")
    is_bfloat = dtype.name == "bfloat16"
    view = array_at(address, shape, np.dtype(np.uint16) if is_bfloat else dtype, None, owner, readonly)
    capsule = capsule_of(view, versioned)
    tensor = _struct_of(capsule, _name_of(capsule)).tensor
    tensor.device = _DLDevice(*device)
    if is_bfloat:
        tensor.dtype.code = _BFLOAT
    if 0 in shape:
        tensor.data = None
    return capsule
