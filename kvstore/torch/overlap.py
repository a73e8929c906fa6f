"""Whether gradients are exchanged while the backward pass runs, or after it."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from ..store import KVStore, is_bound_by_processors
from .tensors import Tensor


def is_faster_at_once(store: KVStore) -> bool:
    """Return whether to exchange all gradients in one call after the pass takes less time than beside it.

    It does where the exchange needs the processors that compute: what is done beside the pass takes their
    time all the same, and their caches as well.
    """
    computing = store.num_workers * torch.get_num_threads()
    return is_bound_by_processors(store) and computing >= len(os.sched_getaffinity(0))


def overlaps(store: KVStore, wanted: bool | None, parameters: Iterable[Tensor]) -> bool:
    """Return what is wanted; where that is None, what is faster: GPUs compute without the processors."""
    if wanted is not None:
        return wanted
    return any(one.device.type != "cpu" for one in parameters) or not is_faster_at_once(store)
