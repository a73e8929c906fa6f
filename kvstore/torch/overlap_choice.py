"""The choice between an exchange of gradients during the backward pass and one after it."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from ..store import KVStore, uses_only_local_cpu
from .tensors import Tensor


def is_faster_at_once(store: KVStore) -> bool:
    """Return whether one exchange of all gradients after the pass is faster than an exchange during the pass.

    It is faster if the exchange needs the processors that run the pass: an exchange during the pass uses the
    same processor time, and displaces the data in the caches.
    """
    computing = store.num_workers * torch.get_num_threads()
    return uses_only_local_cpu(store) and computing >= len(os.sched_getaffinity(0))


def overlaps_backward(store: KVStore, wanted: bool | None, parameters: Iterable[Tensor]) -> bool:
    """Return `wanted`; if that is None, the faster choice: True for models on GPUs."""
    if wanted is not None:
        return wanted
    return any(one.device.type != "cpu" for one in parameters) or not is_faster_at_once(store)
