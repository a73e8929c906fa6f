"""Sums and means of tensors, and objects, over all workers: for metrics, counts, settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ..averaging.checks import check_made
from ..collective.objects import ArrayKind
from ..engine import Work
from ..errors import ArgumentError
from ..store import KVStore, collective_of
from .tensors import Tensor, as_array, check_tensor, copied_tensor, in_memory_order, memory_order, type_name


def all_reduce(
    store: KVStore, tensors: Tensor | Iterable[Tensor], *, average: bool = False, async_op: bool = False
) -> Work | None:
    """Replace tensors by their sums or means over all workers, without keys: for metrics and counts.

    Parameters
    ----------
    store : KVStore
        Any store of all workers. An optimizer of the store is not used.
    tensors : tensor, or iterable of tensors
        They are overwritten in place. All workers pass the same shapes and types.
    average : bool
        If True, return means of floating-point tensors.
    async_op : bool
        If True, return a `Work`. Do not use the tensors until it is done.

    Raises
    ------
    ArgumentError
        `kvstore.create` did not create `store`, or a value is not a tensor.
    ShapeError, DTypeError, ArrayError, CapabilityError, PeerLostError
        See `KVStore.all_reduce`.
    """
    check_made(store)
    several = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for number, tensor in enumerate(several):
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"all_reduce takes tensors, not {type_name(tensor)} (number {number})")
        check_tensor(f"tensor {number}", tensor)
    arrays = [as_array(in_memory_order(tensor, memory_order(tensor))) for tensor in several]
    return store.all_reduce(arrays, average=average, async_op=async_op)


def broadcast_object(store: KVStore, value: Any = None, root: int = 0) -> Any:
    """Return the object of worker `root`; as `KVStore.broadcast_object`, where tensors stay tensors.

    Received tensors are in host memory.
    """
    check_made(store)
    return collective_of(store).broadcast_object(value, root, _TENSORS)


def all_gather_object(store: KVStore, value: Any) -> list[Any]:
    """Return the objects of all workers, by rank; see `broadcast_object`."""
    check_made(store)
    return collective_of(store).all_gather_object(value, _TENSORS)


def _host_view(value: Any) -> np.ndarray[Any, Any] | None:
    """View a tensor of a type that NumPy supports, on the host."""
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bfloat16:
        return None
    found: np.ndarray[Any, Any] = value.detach().cpu().resolve_conj().resolve_neg().numpy()
    return found


_TENSORS = ArrayKind(_host_view, copied_tensor)
