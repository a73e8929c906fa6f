"""The choice of the store of a trainer, and of the place of updates (store or trainer).

The rules are Gluon's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..arrays.sparse import RowSparseArray
from ..base import KVStoreBase, TestStore
from ..errors import ArgumentError, CapabilityError, ConfigError
from ..factory import create, has_peers, warn_if_apart
from ..settings.environment import text_of
from ..store import KVStore
from ..store_kinds import STORES, is_on_servers, is_synchronous
from .parameter import TrainableParameter

#: Size in elements of a weight from which on the trainer updates with a `local` store, as in Gluon.
_LARGE = 16 * 1024 * 1024


@dataclass(frozen=True)
class StoreChoice:
    """The store of a trainer, and the place of updates.

    Attributes
    ----------
    store : KVStore, KVStoreBase or None
    made : bool
        Whether the trainer has created the store and closes it.
    updates : bool
        Whether the store updates the weights.
    distributed : bool
        Whether other workers take part.
    """

    store: Any
    made: bool
    updates: bool
    distributed: bool

    @property
    def is_awaited(self) -> bool:
        """Return whether other workers wait for this worker's part of each sum."""
        return self.distributed and "async" not in self.store.type

    def close(self) -> None:
        """Close the store, if it was created here."""
        close = getattr(self.store, "close", None)
        if self.made and close is not None:
            close()


def choose_store(
    kvstore: Any, update: bool | None, params: Sequence[TrainableParameter], replicas: int
) -> StoreChoice:
    """Choose the store and the place of updates.

    Parameters
    ----------
    kvstore : KVStoreBase, str or None
    update : bool or None
        The choice of the caller. None: the choice of the environment (MXNET_UPDATE_ON_KVSTORE), else the
        store updates if it can.
    params : sequence of Trainable
    replicas : int
        Number of replicas of each parameter.

    Raises
    ------
    ArgumentError
        `kvstore` has another type.
    ConfigError, CapabilityError
        The store does not support the parameters or the caller's choice.
    """
    sparse_weights = any(_is_sparse(param.list_data()) for param in params)
    sparse_grads = any(_is_sparse(param.list_grad()) for param in params if param.grad_req != "null")
    needed = sparse_weights or bool(update)
    store = _select_store(kvstore, replicas, needed)
    made = isinstance(kvstore, str) and store is not None
    try:
        updates = _by_default(store, kvstore, params)
        several = isinstance(store, KVStore) and store.num_workers > 1
        distributed = store is not None and (several or is_on_servers(store))
        if sparse_weights:
            updates = _checked_for_sparse_weights(store, update)
        elif sparse_grads:
            updates = _decided_for_sparse_grads(store, update, distributed)
        else:
            updates = _decide_update(store, update, updates, distributed)
        return StoreChoice(store, made, updates, distributed)
    except BaseException:
        StoreChoice(store, made, False, False).close()
        raise


def _is_sparse(arrays: list[Any]) -> bool:
    return bool(arrays) and isinstance(arrays[0], RowSparseArray)


# --------------------------------------------------------------------------------------------- the store


def _select_store(kvstore: Any, replicas: int, needed: bool) -> Any:
    if isinstance(kvstore, str):
        alone = _has_one_worker(kvstore.lower())
        return None if alone and replicas == 1 and not needed else create(kvstore)
    if kvstore is None and needed:
        raise ConfigError(
            "row-sparse weights and update_on_kvstore=True need a store, and kvstore is None: name one"
        )
    if kvstore is not None and not isinstance(kvstore, KVStoreBase):
        raise ArgumentError(f"kvstore must be a store, the name of one, or None, not {kvstore!r}")
    return kvstore


def _has_one_worker(name: str) -> bool:
    """Return whether a store of this name has this process as its only worker: one replica needs no store."""
    kind = None if name in KVStoreBase.kv_registry else STORES.get(name)
    alone = kind is not None and kind.one_process and not (kind.joins and has_peers())
    alone = alone or KVStoreBase.kv_registry.get(name) is TestStore
    if alone:
        warn_if_apart(name)
    return alone


# ------------------------------------------------------------------------------------------- place of updates


def _by_default(store: Any, kvstore: Any, params: Sequence[TrainableParameter]) -> bool:
    """Return whether the store updates if the caller makes no choice."""
    text = text_of("update_on_kvstore")
    if not text.isdecimal():
        raise ConfigError(f"MXNET_UPDATE_ON_KVSTORE={text!r} must be 1 or 0")
    wanted = bool(int(text))
    if store is None:
        return False
    if kvstore == "local" and max(map(_parameter_size, params), default=0) > _LARGE:
        wanted = False
    return bool(store.is_capable(KVStoreBase.OPTIMIZER)) and wanted


def _parameter_size(param: TrainableParameter) -> int:
    arrays = param.list_data()
    return math.prod(arrays[0].shape) if arrays else 0


def _decide_update(store: Any, update: bool | None, default: bool, distributed: bool) -> bool:
    if _has_no_rounds(store, distributed):
        _check_may_update(store, update)
        default = True
    updates = default if update is None else update
    if updates and not store.is_capable(KVStoreBase.OPTIMIZER):
        raise ConfigError(
            f"store {store.type!r} ({type(store).__name__}) updates no weights: pass update_on_kvstore=False"
        )
    return updates


def _has_no_rounds(store: Any, distributed: bool) -> bool:
    return distributed and not is_synchronous(store)


def _check_may_update(store: Any, update: bool | None) -> None:
    if update is False:
        raise ConfigError(
            f"store {store.type!r} has no rounds, so there is no sum to update with: leave "
            "update_on_kvstore=False out"
        )


def _checked_for_sparse_weights(store: Any, update: bool | None) -> bool:
    if update is False:
        raise ConfigError("row-sparse weights are updated where they are: leave update_on_kvstore=False out")
    _check_takes_rows(store)
    if not store.is_capable(KVStoreBase.OPTIMIZER):
        raise CapabilityError(
            f"store {store.type!r} updates no weights, and row-sparse weights are updated where they are: "
            "use 'local', 'shared' or 'dist_sync'"
        )
    return True


def _decided_for_sparse_grads(store: Any, update: bool | None, distributed: bool) -> bool:
    """Let the trainer update if no other worker takes part, as in Gluon."""
    if store is not None:
        _check_takes_rows(store)
    if _has_no_rounds(store, distributed):
        _check_may_update(store, update)
    return distributed if update is None else update


def _check_takes_rows(store: Any) -> None:
    if not isinstance(store, KVStore):
        raise ConfigError(
            f"{type(store).__name__} has no verbs for row-sparse arrays; use a store of kvstore.create"
        )
