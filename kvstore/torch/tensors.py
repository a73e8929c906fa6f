"""Tensors as the arguments of stores: in the order of their memory, or as rows if they are sparse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ..arrays.element_types import FLOATS
from ..arrays.means import divided_array
from ..arrays.sparse import RowSparseArray
from ..arrays.tensors import memory_of
from ..errors import ArgumentError, ArrayError, DTypeError, MissingBackendError
from ..store import KVStore

Tensor = Any
Order = tuple[int, ...] | None

_FLOATS = tuple(getattr(torch, name) for name in FLOATS)


def broadcast(
    store: KVStore, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], prefix: str = ""
) -> None:
    """Copy the tensors of rank 0 to all workers, for example the buffers of a model or loaded weights.

    Parameters
    ----------
    store : KVStore
        The store.
    tensors : mapping, or pairs of a name and a tensor
        For example ``model.named_buffers()`` or ``model.state_dict()``. The tensors are overwritten in place.
        All workers must pass the same names, shapes and types.
    prefix : str
        Prefix of the keys, before the names. The keys must be new in the store.

    Raises
    ------
    DuplicateKeyError
        A key is already in the store. Pass another prefix.
    ArgumentError
        A value is not a tensor, for example part of a nested ``state_dict``. The message names it.
    ArrayError, DTypeError, MissingBackendError
        The store does not accept a tensor. The message names it.
    """
    check_prefix(prefix)
    pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(
                f"{name!r} is not a tensor but {type_name(tensor)}; broadcast takes a flat mapping of names "
                "to tensors: pass each part of a nested one by its own call"
            )
        check_tensor(name, tensor)
    plain = [(name, tensor.detach()) for name, tensor in pairs]
    plain = [(name, one.view(torch.uint8) if one.dtype == torch.bool else one) for name, one in plain]
    broadcast_by_key(store, [(prefix + name, name, one) for name, one in plain])


def broadcast_by_key(store: KVStore, named: list[tuple[str, str, Tensor]]) -> None:
    """Broadcast tensors by their keys; the names are for errors."""
    arrays = [as_array(in_memory_order(tensor, memory_order(tensor))) for _, _, tensor in named]
    try:
        store.broadcast([key for key, _, _ in named], arrays, out=arrays)
    except MissingBackendError as error:
        away = [(name, tensor.device) for _, name, tensor in named if tensor.device.type != "cpu"]
        if not away:
            raise
        raise MissingBackendError(
            f"{away[0][0]!r} is on {away[0][1]}, but store {store.type!r} of worker {store.rank} accepts "
            "only host arrays: create 'shared' for several processes or 'device' for one process, or move "
            "the model to the host"
        ) from error


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raise for a tensor that no store supports."""
    if torch.nn.parameter.is_lazy(tensor) or tensor.device.type == "meta":
        raise ArrayError(f"{name!r} has no memory yet: first run a batch through the model, or load it")
    if tensor.is_complex() or tensor.is_quantized:
        raise DTypeError(
            f"{name!r} is {tensor.dtype}, which stores do not sum; for complex numbers pass "
            "torch.view_as_real"
        )
    if tensor.layout != torch.strided:
        raise ArrayError(f"{name!r} is {tensor.layout}; stores accept only strided parameters")
    if tensor.is_floating_point() and tensor.dtype not in _FLOATS:
        raise DTypeError(f"{name!r} is {tensor.dtype}; stores accept floats of 16, 32 or 64 bits")
    memory_of(tensor, repr(name))


def check_prefix(prefix: Any) -> None:
    """Raise unless a prefix is a str."""
    if not isinstance(prefix, str):
        raise ArgumentError(f"prefix must be a str, not {type_name(prefix)}: {prefix!r}")


def type_name(thing: object) -> str:
    """Return the type of an object, for messages."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


# ----------------------------------------------------------------------------------------------- memory


def memory_order(tensor: Tensor) -> Order:
    """Return the order of dimensions in which the memory is contiguous.

    None if it is the tensor's own order.
    """
    if tensor.is_contiguous():
        return None
    return tuple(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def in_memory_order(tensor: Tensor, order: Order) -> Tensor:
    """View a tensor with its dimensions in this order, outside of any graph."""
    tensor = tensor.detach()
    return tensor if order is None else tensor.permute(order)


def as_array(tensor: Tensor) -> Any:
    """Return NumPy's view of a tensor if there is one, which stores check faster; else the tensor."""
    if tensor.device.type == "cpu" and tensor.dtype != torch.bfloat16 and not tensor.is_neg():
        view = tensor.numpy()
        if not (view.size and view.flags.owndata):  # NumPy allocates memory for a tensor without any
            return view
    return tensor


# ------------------------------------------------------------------------------------------------- rows


def rows_of(gradient: Tensor, what: str) -> RowSparseArray:
    """Return the rows of a sparse gradient; repeated rows are summed."""
    gradient = gradient.detach()
    if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
        raise ArrayError(f"the gradient of {what} is not sparse by rows ({gradient.layout}); make it dense")
    if gradient.device.type != "cpu":
        raise MissingBackendError(
            f"the sparse gradient of {what} is on {gradient.device}, but rows must be on the host: move the "
            "table to the host, or make its gradient dense"
        )
    gradient = gradient.coalesce()
    return RowSparseArray(as_array(gradient.values()), gradient.indices()[0].numpy(), tuple(gradient.shape))


def no_rows(like: Tensor) -> RowSparseArray:
    """Return a table of a tensor's shape and type, without rows."""
    return RowSparseArray(as_array(like.detach()[:0].contiguous()), np.zeros(0, np.int64), tuple(like.shape))


def divide_rows(rows: RowSparseArray, divisor: int) -> RowSparseArray:
    """Return new rows, each divided by `divisor`."""
    if divisor == 1:
        return rows
    return RowSparseArray(divided_array(rows.data, divisor), rows.indices, rows.shape)


def sparse_tensor(rows: RowSparseArray) -> Tensor:
    """Return a sparse tensor with its own memory."""
    ids = torch.from_numpy(np.array(rows.indices))
    values = copied_tensor(rows.data)
    return torch.sparse_coo_tensor(ids[None], values, rows.shape, is_coalesced=True, check_invariants=False)


def copied_tensor(data: Any) -> Tensor:
    """Return a tensor with its own memory."""
    if data.dtype.name == "bfloat16":  # torch does not support NumPy's bfloat16
        return torch.from_numpy(np.array(data).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(data))
