"""The memory of PyTorch tensors, on the host and on GPUs; torch is not imported.

A tensor can refer to memory that does not exist (a freed storage, the device meta, a FakeTensor) or that has
other values than the tensor (the negative bit). `memory_of` checks this before an address is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArrayError, DTypeError
from .addresses import Strides, byte_extent, describe_object
from .element_types import bfloat16, unsupported_error

Tensor = Any

#: Remedies for tensors whose class gives the memory another meaning.
_WITHIN = {"DTensor": "x.to_local()", "NestedTensor": "x.values()", "FakeTensor": "a tensor with memory"}


class TensorMemory(NamedTuple):
    """The memory of a tensor.

    Attributes
    ----------
    address : int
    dtype : numpy.dtype
    shape, strides : tuple of int
        Strides are in bytes, and None for a C-contiguous tensor.
    storage : object
        Keeps the memory alive, also if the tensor gets another storage.
    negated : bool
        Whether the values of the tensor are those in memory with the opposite sign.
    """

    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: Strides
    storage: Any
    negated: bool


def _is_tensor_type(cls: Any) -> bool:
    """Return whether a class is one of PyTorch's tensors."""
    return hasattr(cls, "data_ptr") and any(
        base.__module__.partition(".")[0] == "torch" for base in cls.__mro__
    )


is_tensor_type: Callable[[Any], bool] = lru_cache(maxsize=1024)(_is_tensor_type)


def memory_of(tensor: Tensor, what: str) -> TensorMemory:
    """Return the memory of a tensor, after checks that it exists.

    Raises
    ------
    ArrayError
        The tensor has no memory, or not enough for its elements; or its class or layout gives the memory
        another meaning.
    DTypeError
        NumPy does not support its element type, or no store sums it.
    """
    if (problem := _problem_of(type(tensor))) is not None:
        raise ArrayError(f"{what} is {describe_object(tensor)}, {problem}")
    try:
        storage = tensor.untyped_storage()
        address, shape = tensor.data_ptr(), tuple(tensor.shape)
        steps = None if tensor.is_contiguous() else tensor.stride()
        begin, held = tensor.storage_offset(), storage.nbytes()
        negated, name = tensor.is_neg(), tensor.dtype
        needed = tensor.nbytes
    except Exception as error:  # torch raises several classes for tensors without a storage
        raise _no_storage_error(tensor, what, error) from error
    dtype = _numpy_type(name)
    if dtype is None:
        raise _not_summed_error(tensor, what)
    strides = None
    if steps is not None:
        strides = tuple(step * dtype.itemsize for step in steps)
        _, needed = byte_extent(shape, strides, dtype.itemsize)
    if needed and (not address or begin * dtype.itemsize + needed > held):
        raise _too_small_error(tensor, what, held)
    return TensorMemory(address, dtype, shape, strides, storage, negated)


def whole_address(tensor: Tensor, nbytes: int, itemsize: int) -> int | None:
    """Return the address of a contiguous tensor of that size, if `memory_of` would accept it; else None.

    After None, call `memory_of`. This function is for repeated calls, in which the time of each check counts.
    """
    if _problem_of(type(tensor)) is not None or not tensor.is_contiguous() or tensor.is_neg():
        return None
    try:
        held = tensor.untyped_storage().nbytes() - tensor.storage_offset() * itemsize
        address: int = tensor.data_ptr()
    except Exception:  # torch raises several classes for tensors without a storage
        return None
    return address if held >= nbytes and (address or not nbytes) else None


def resolved_tensor(tensor: Tensor, what: str) -> Tensor:
    """Return a tensor whose memory has its values, outside of any graph."""
    try:
        return tensor.detach().resolve_neg()
    except Exception as error:  # a dispatch mode of the caller can refuse any operation of torch
        raise _not_copied_error(tensor, what, error) from error


def contiguous_out(out: Tensor, what: str) -> tuple[Tensor, Callable[[], None]]:
    """Return a contiguous tensor in place of an out, and the function that copies its content to the out."""
    try:
        plain = out.detach()
        buffer = sys.modules["torch"].empty(plain.shape, dtype=plain.dtype, device=plain.device)
    except Exception as error:  # as above
        raise _not_copied_error(out, what, error) from error
    return buffer, lambda: plain.__setitem__(Ellipsis, buffer)


def forbid_resize(storage: Any) -> None:
    """Let torch refuse to free or resize a storage on the host, as for memory that NumPy shares."""
    torch = sys.modules["torch"]
    torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def _find_problem(cls: Any) -> str | None:
    """Return the reason why tensors of a class cannot be used, as the end of a sentence; None if they can."""
    names = {base.__name__ for base in cls.__mro__}
    if "UninitializedTensorMixin" in names:
        return (
            "which has no shape and no memory yet: run a batch through the model, or load its weights, first"
        )
    root = next(
        (base for base in cls.__mro__ if base.__module__ == "torch" and base.__name__ == "Tensor"), cls
    )
    own, plain = (getattr(one, "__torch_dispatch__", None) for one in (cls, root))
    if own == plain:
        return None
    within = next((cure for name, cure in _WITHIN.items() if name in names), "the tensor that it wraps")
    return f"whose class decides what its memory means (__torch_dispatch__): pass {within}"


_problem_of: Callable[[Any], str | None] = lru_cache(maxsize=1024)(_find_problem)


@lru_cache(maxsize=64)
def _numpy_type(dtype: Any) -> np.dtype[Any] | None:
    name = str(dtype).partition(".")[2]
    if name == "bfloat16":
        return bfloat16("a tensor")
    try:
        found = np.dtype(name)
    except TypeError:
        return None
    return None if found.kind == "c" else found


def _not_summed_error(tensor: Tensor, what: str) -> DTypeError:
    cure = ""
    if tensor.is_complex():
        cure = "; pass torch.view_as_real(x.resolve_conj())"
    elif tensor.is_quantized:
        cure = "; pass x.dequantize()"
    return unsupported_error(what, tensor.dtype, cure)


def _no_storage_error(tensor: Tensor, what: str, error: Exception) -> ArrayError:
    text, cure = str(error), "pass a dense, strided tensor"
    if "sparse" in str(tensor.layout):
        cure = "pass kv.RowSparseArray(data, indices, shape), or x.to_dense()"
    elif str(tensor.layout) == "torch._mkldnn":
        cure = "pass x.to_dense()"
    elif tensor.is_nested:
        cure = "pass x.values(), or each of its parts"
    elif "BatchedTensor" in text or "TensorWrapper" in text:
        cure = "it is inside torch.vmap or a transform of torch.func: call the store outside"
    return ArrayError(
        f"{what} has no memory that can be used: {describe_object(tensor)} ({tensor.layout}: {text}); {cure}"
    )


def _not_copied_error(tensor: Tensor, what: str, error: Exception) -> ArrayError:
    return ArrayError(
        f"{what} has the negative bit or strides, and torch cannot copy it here: {describe_object(tensor)} "
        f"({error}); pass a contiguous tensor after x.resolve_neg()"
    )


def _too_small_error(tensor: Tensor, what: str, held: int) -> ArrayError:
    if tensor.device.type == "meta":
        return ArrayError(
            f"{what} is on device meta and has no memory yet: {describe_object(tensor)}; "
            "load or initialise it first"
        )
    return ArrayError(
        f"{what} has no memory for all of its elements: {describe_object(tensor)}, in a storage of {held} "
        "bytes. The storage was freed or resized, as FSDP does between uses, or the tensor stands for "
        "another; pass a tensor that holds its elements"
    )
