"""Which store a trainer works with, and whether that store updates the weights; the rules are Gluon's."""

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
from .parameter import Trainable

#: Elements above which weights that are only `local` are updated by the trainer, as Gluon does.
_LARGE = 16 * 1024 * 1024


@dataclass(frozen=True)
class Choice:
    """What a trainer works with.

    Attributes
    ----------
    store : KVStore, KVStoreBase or None
    made : bool
        Whether it was made here, so that it is the trainer's to close.
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
    def awaited(self) -> bool:
        """Whether other workers wait for this one's part of each sum."""
        return self.distributed and "async" not in self.store.type

    def close(self) -> None:
        """Close the store, if it was made here."""
        close = getattr(self.store, "close", None)
        if self.made and close is not None:
            close()


def choose(kvstore: Any, update: bool | None, params: Sequence[Trainable], replicas: int) -> Choice:
    """Choose a store and who updates.

    Parameters
    ----------
    kvstore : KVStoreBase, str or None
    update : bool or None
        As the caller wants it; None: the environment says (MXNET_UPDATE_ON_KVSTORE), else the store updates
        where it can.
    params : sequence of Trainable
    replicas : int
        Number of replicas of each.

    Raises
    ------
    ArgumentError
        `kvstore` is none of these.
    ConfigError, CapabilityError
        The store cannot do what the parameters or the caller need.
    """
    sparse_weights = any(_is_sparse(param.list_data()) for param in params)
    sparse_grads = any(_is_sparse(param.list_grad()) for param in params if param.grad_req != "null")
    needed = sparse_weights or bool(update)
    store = _selected(kvstore, replicas, needed)
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
            updates = _decided(store, update, updates, distributed)
        return Choice(store, made, updates, distributed)
    except BaseException:
        Choice(store, made, False, False).close()
        raise


def _is_sparse(arrays: list[Any]) -> bool:
    return bool(arrays) and isinstance(arrays[0], RowSparseArray)


# --------------------------------------------------------------------------------------------- the store


def _selected(kvstore: Any, replicas: int, needed: bool) -> Any:
    if isinstance(kvstore, str):
        alone = _stays_here(kvstore.lower())
        return None if alone and replicas == 1 and not needed else create(kvstore)
    if kvstore is None and needed:
        raise ConfigError(
            "row-sparse weights and update_on_kvstore=True need a store, and kvstore is None: name one"
        )
    if kvstore is not None and not isinstance(kvstore, KVStoreBase):
        raise ArgumentError(f"kvstore must be a store, the name of one, or None, not {kvstore!r}")
    return kvstore


def _stays_here(name: str) -> bool:
    """Whether a store of this name has one worker, this process, so that one replica needs no store."""
    kind = None if name in KVStoreBase.kv_registry else STORES.get(name)
    alone = kind is not None and kind.one_process and not (kind.joins and has_peers())
    alone = alone or KVStoreBase.kv_registry.get(name) is TestStore
    if alone:
        warn_if_apart(name)
    return alone


# ------------------------------------------------------------------------------------------- who updates


def _by_default(store: Any, kvstore: Any, params: Sequence[Trainable]) -> bool:
    """Say who updates where the caller does not."""
    text = text_of("update_on_kvstore")
    if not text.isdecimal():
        raise ConfigError(f"MXNET_UPDATE_ON_KVSTORE={text!r} must be 1 or 0")
    wanted = bool(int(text))
    if store is None:
        return False
    if kvstore == "local" and max(map(_size, params), default=0) > _LARGE:
        wanted = False
    return bool(store.is_capable(KVStoreBase.OPTIMIZER)) and wanted


def _size(param: Trainable) -> int:
    arrays = param.list_data()
    return math.prod(arrays[0].shape) if arrays else 0


def _decided(store: Any, update: bool | None, default: bool, distributed: bool) -> bool:
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
    """Leave updates to the trainer where no other worker takes part, as Gluon does."""
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
