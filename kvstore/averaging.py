"""What a store must be for gradients to be averaged over its workers by a front door."""

from __future__ import annotations

from typing import Any

from .errors import ArgumentError, CapabilityError, ConfigError
from .settings import launchers
from .settings.variables import text_of
from .store import KVStore, outlives_workers, updater_of
from .store_kinds import is_synchronous


def check_store(store: Any, sums: bool = True) -> None:
    """Make sure that a store can be a front door's.

    Parameters
    ----------
    store : KVStore
    sums : bool
        Whether sums of what is pushed are wanted; False: the front door gives the store an optimizer.

    Raises
    ------
    ArgumentError
        It was not made by `kvstore.create`, or has not all verbs.
    ConfigError
        It has an optimizer; or sums are wanted, and it has no rounds.
    """
    check_made(store)
    _check_no_optimizer(store)
    if sums:
        check_rounds(store)


def check_size(store: KVStore, size: int) -> None:
    """Raise ConfigError where a store has not the workers that the front door's framework knows of."""
    if size == store.num_workers:
        return
    cure = "create 'shared', or another store of all of them"
    if launchers.detect().launcher == "none":
        cure = (
            "nothing says here that there are others. Start the processes with torchrun or `kvstore run`; or "
            "where the program starts them (torch.multiprocessing.spawn), set RANK, WORLD_SIZE, LOCAL_RANK, "
            "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each before it creates 'shared'"
        )
    raise ConfigError(
        f"the process group has {size} processes, and store {store.type!r} {store.num_workers}: {cure}"
    )


def check_made(store: Any) -> None:
    """Raise ArgumentError for what `kvstore.create` has not made."""
    if not isinstance(store, KVStore):
        raise ArgumentError(f"store must be one that kvstore.create has made, not {store!r}")


def check_sums(store: KVStore) -> None:
    """Raise ConfigError where a push does not give the sum over all workers; cheap enough for every step."""
    _check_no_optimizer(store)
    check_rounds(store)


def check_rounds(store: KVStore) -> None:
    """Raise ConfigError where workers do not wait for each other; each push replaces the value there."""
    if not is_synchronous(store):
        raise ConfigError(
            f"store {store.type!r} has no rounds: without an optimizer a push replaces the value there, and "
            "nothing is summed over the workers; use a synchronous store ('shared', 'dist_sync'), or let the "
            "store update the weights (set_optimizer, update_on_kvstore=True)"
        )


def _check_no_optimizer(store: KVStore) -> None:
    if has_optimizer(store):
        raise ConfigError(
            f"this {store.type!r} store has an optimizer already, which would take gradients for updates: "
            "use a store of its own for sums, or let the front door give the store its optimizer"
        )


def has_optimizer(store: KVStore) -> bool:
    """Whether a push is an update."""
    return store.is_capable("optimizer") and updater_of(store) is not None


def check_not_late(store: KVStore) -> None:
    """Raise CapabilityError in a worker that came back: there is nothing that could tell it the weights."""
    again = text_of("restart") != "0"
    if again and outlives_workers(store):
        raise CapabilityError(
            f"worker {store.rank} was started again, and the store has gradients to offer, not weights: let "
            "the store update the weights, or use on_peer_loss='raise' and a checkpoint"
        )
