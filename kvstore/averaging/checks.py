"""Checks whether a module for a framework can average gradients over the workers of a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays.means import check_mean, divided_array
from ..errors import ArgumentError, CapabilityError, ConfigError
from ..settings import launchers
from ..settings.environment import text_of
from ..store import KVStore, outlives_workers, updater_of
from ..store_kinds import is_synchronous


def check_store(store: Any, sums: bool = True) -> None:
    """Check that a module for a framework can use a store.

    Parameters
    ----------
    store : KVStore
        The store.
    sums : bool
        Whether the caller needs sums of the pushed values. If False, it gives the store an optimizer.

    Raises
    ------
    ArgumentError
        `kvstore.create` did not create the store.
    ConfigError
        The store has an optimizer; or `sums` is True and the store has no rounds.
    """
    check_made(store)
    _check_no_optimizer(store)
    if sums:
        check_rounds(store)


def check_size(store: KVStore, size: int) -> None:
    """Raise ConfigError unless a store has as many workers as the process group of the framework."""
    if size == store.num_workers:
        return
    cure = "create 'shared', or another store of all processes"
    if launchers.detect_placement().launcher == "none":
        cure = (
            "no variable of a launcher is set. Start the processes with torchrun or `kvstore run`; or, if "
            "the "
            "program starts them (torch.multiprocessing.spawn), set RANK, WORLD_SIZE, LOCAL_RANK, "
            "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each process before it creates 'shared'"
        )
    raise ConfigError(
        f"the process group has {size} processes, store {store.type!r} has {store.num_workers}: {cure}"
    )


def check_made(store: Any) -> None:
    """Raise ArgumentError unless `kvstore.create` has created the store."""
    if not isinstance(store, KVStore):
        raise ArgumentError(f"store must be a store of kvstore.create, not {store!r}")


def check_sums(store: KVStore) -> None:
    """Raise ConfigError unless a push gives the sum over all workers; cheap enough for every step."""
    _check_no_optimizer(store)
    check_rounds(store)


def check_rounds(store: KVStore) -> None:
    """Raise ConfigError for a store without rounds, in which each push replaces the value."""
    if not is_synchronous(store):
        raise ConfigError(
            f"store {store.type!r} has no rounds: without an optimizer each push replaces the value, and "
            "nothing is summed over the workers; use a synchronous store ('shared', 'dist_sync'), or let the "
            "store update the weights (set_optimizer, update_on_kvstore=True)"
        )


def _check_no_optimizer(store: KVStore) -> None:
    if has_optimizer(store):
        raise ConfigError(
            f"this {store.type!r} store already has an optimizer, which would use gradients as updates: "
            "create another store for sums, or let the store update the weights (update_on_kvstore=True)"
        )


def has_optimizer(store: KVStore) -> bool:
    """Return whether a push is an update."""
    return store.is_capable("optimizer") and updater_of(store) is not None


def mean_parts(store: KVStore, keys: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Return arrays whose sums over the workers are the means of the given arrays.

    Raises
    ------
    DTypeError
        An array has an integer type, which cannot represent means.
    """
    for key, array in zip(keys, arrays, strict=True):
        check_mean(array.dtype, f"the value of {key!r}")
    workers = store.num_workers
    return [
        divided_array(array, workers) if isinstance(array, np.ndarray) else array / workers
        for array in arrays
    ]


def check_not_late(store: KVStore) -> None:
    """Raise CapabilityError in a restarted worker: the store cannot give it the current weights."""
    again = text_of("restart") != "0"
    if again and outlives_workers(store):
        raise CapabilityError(
            f"worker {store.rank} was restarted, but the store holds gradients, not weights: let the store "
            "update the weights, or use on_peer_loss='raise' and a checkpoint"
        )
