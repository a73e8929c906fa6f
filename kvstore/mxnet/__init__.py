"""kvstore's stores for MXNet 1.9.1: for Gluon's Trainer, for Module, and in MXNet's own registry.

``kvstore.mxnet.create("shared")`` returns a store with the interface of MXNet's stores. Importing this module
imports MXNet, and registers every store with it under the name ``kvstore_<name>``.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..arrays.grouping import group_values
from ..arrays.sparse import RowSparseArray
from ..errors import ArgumentError, CapabilityError
from ..factory import create as create_ours
from ..optimizer import Optimizer, states
from ..optimizer.optimizer import Index
from ..store import KVStore as OurKVStore
from ..store_kinds import STORES, is_on_servers
from .arrays import (
    RowSparseOuts,
    as_ndarray,
    converted_values,
    gradient_as_ndarray,
    is_rows,
    put_rows,
    state_as_ndarrays,
)
from .errors import all_raise_mxnet_errors, raises_mxnet_error
from .library import mx
from .optimizers import (
    ForeignOptimizer,
    TranslatedOptimizer,
    check_scale,
    indices_of,
    keeps_states_only,
    translation_obstacle,
)

log = logging.getLogger("kvstore.mxnet")

PathLike = str | os.PathLike[str]


class _StateHolder(NamedTuple):
    """The object that MXNet's trainer expects as `_updater`.

    The states are NDArrays on the store's memory.
    """

    optimizer: Any
    states: dict[Index, Any]


@all_raise_mxnet_errors
class KVStore(mx.kvstore.KVStore):  # type: ignore[misc] # MXNet has no types
    """A store of kvstore with the interface of MXNet's stores.

    MXNet's arrays are used in place, after MXNet's engine has finished writing them. The results are complete
    when a call returns; MXNet's engine runs no part of a call. Arrays must be on the CPU. Every error of
    `kvstore.errors` that a method raises is also an ``mxnet.base.MXNetError``.

    Parameters
    ----------
    store : kvstore.KVStore
        The store. The caller must close it, unless this object comes from `create`.

    Attributes
    ----------
    store : kvstore.KVStore
        The store, with the methods that MXNet's stores do not have: `save`, `load`, `statistics` and others.
    """

    def __init__(self, store: OurKVStore) -> None:
        # The constructor of MXNet's class would make a native store.
        self.store = store
        self.handle = None
        self._is_p3 = False
        self._made = False
        self._tables: set[Index] = set()  # keys of row-sparse weights
        self._rule: TranslatedOptimizer | ForeignOptimizer | None = None

    def __del__(self) -> None:
        if getattr(self, "_made", False):
            with contextlib.suppress(Exception):  # during the end of the interpreter
                self.store.close()

    # ------------------------------------------------------------------------------------------ verbs

    def init(self, key: Any, value: Any) -> None:
        """Initialise keys; see `kvstore.KVStore.init`."""
        self.store.init(key, converted_values(value))
        self._note_tables(key, value)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Initialise keys with the values of rank 0, and write these values to `out`."""
        self.store.broadcast(key, converted_values(value), RowSparseOuts(out).arrays, priority)
        self._note_tables(key, value)

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Sum the values of each key, then update the stored weight with the sum, or replace it."""
        values = converted_values(value)
        self._apply_changes(key, values)
        self.store.push(key, values, priority=priority)
        self._count_updates(key, values)

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Write the stored values to `out`; to row-sparse outputs only if `ignore_sparse` is False."""
        if ignore_sparse or out is None:
            self.store.pull(key, out if out is None else RowSparseOuts(out).arrays, priority)
            return
        for name, outs in group_values(key, out, "out"):
            self._pull_all(name, outs, priority)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push dense values, and write the result to `out`, or without `out` to the values."""
        values = converted_values(value)
        self._apply_changes(key, values)
        self.store.pushpull(key, values, None if out is None else RowSparseOuts(out).arrays, priority)
        self._count_updates(key, values)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """Write the requested rows of row-sparse keys to `out`, sorted and unique."""
        outs = RowSparseOuts(out)
        self.store.row_sparse_pull(key, outs.arrays, priority, row_ids)
        outs.deliver()

    def _pull_all(self, key: Index, outs: list[Any], priority: int) -> None:
        """Write a key's value to outs, also to row-sparse ones, for dense and row-sparse keys."""
        rows = [out for out in outs if is_rows(out)]
        dense = [out for out in outs if not is_rows(out)]
        if dense:
            self.store.pull(key, dense, priority)
        if rows:
            value = self._pull_table(key, rows[0], priority)
            for out in rows:
                put_rows(value, out)

    def _pull_table(self, key: Index, like: Any, priority: int) -> RowSparseArray:
        if key in self._tables:
            table = RowSparseArray.zeros(like.shape, np.dtype(like.dtype))
            self.store.pull(key, table, priority, ignore_sparse=False)
            return table
        dense = np.empty(like.shape, like.dtype)
        self.store.pull(key, dense, priority)
        return RowSparseArray.from_dense(dense)

    def _note_tables(self, key: Any, value: Any) -> None:
        self._tables.update(
            name for name, values in group_values(key, value) if values and is_rows(values[0])
        )

    # ---------------------------------------------------------------------------------------- updates

    def set_optimizer(self, optimizer: Any) -> None:
        """Update the stored weights with an optimizer of MXNet or of kvstore on every later push.

        If an optimizer of MXNet has the formula of an optimizer of kvstore, it is translated. Later changes
        of its settings take effect at the next push; a changed schedule must be a new object. Otherwise the
        store calls the optimizer of MXNet itself. That is slower and works only in stores on this machine:
        ``"local"``, ``"device"`` and, if the optimizer keeps data in its states only, ``"shared"``.

        Raises
        ------
        CapabilityError
            The optimizer cannot be translated and the store cannot run it. The message says why.
        ArgumentError
            The argument is not an optimizer.
        ConfigError
            Its ``rescale_grad``, which Gluon computes from the batch size, is negative, infinite or NaN. If
            it is changed later, a push raises this error. A push also raises it for a schedule of MXNet that
            was changed in place, and a CapabilityError for a change after which the formulas differ.
        """
        if isinstance(optimizer, Optimizer):
            self.store.set_optimizer(optimizer)
            self._rule = None
            return
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise ArgumentError(f"set_optimizer takes an optimizer of MXNet or of kvstore, not {optimizer!r}")
        check_scale(optimizer)
        why = translation_obstacle(optimizer)
        rule = self._foreign_optimizer(optimizer, why) if why else TranslatedOptimizer(optimizer)
        self.store.set_optimizer(rule.ours if isinstance(rule, TranslatedOptimizer) else rule)
        self._rule = rule

    def _foreign_optimizer(self, optimizer: Any, why: str) -> ForeignOptimizer:
        name = type(optimizer).__name__
        runs = not is_on_servers(self.store) and (self.num_workers == 1 or keeps_states_only(optimizer))
        if runs:
            log.info("MXNet's own code runs %s: %s", name, why)
            return ForeignOptimizer.for_mxnet(optimizer, self._tables)
        raise CapabilityError(
            f"{name} cannot be translated ({why}), and a store of type {self.type!r} cannot run MXNet's code "
            "for it: pass update_on_kvstore=False to the Trainer, so that MXNet updates in the workers, or "
            "use an optimizer of kvstore.optimizer"
        )

    def _apply_changes(self, key: Any, values: Any) -> None:
        """Pass the changes of MXNet's optimizer to the store."""
        if self._rule is not None:
            check_scale(self._rule.theirs)
        if isinstance(self._rule, TranslatedOptimizer):
            self._rule.apply_changes(_key_list(key, values), self.store.update_optimizer)

    def _count_updates(self, key: Any, values: Any) -> None:
        if isinstance(self._rule, TranslatedOptimizer):
            self._rule.count_updates(_key_list(key, values))

    def set_gradient_compression(self, compression_params: dict[str, Any]) -> None:
        """Compress gradients; see `kvstore.KVStore.set_gradient_compression`."""
        self.store.set_gradient_compression(compression_params)

    def _set_updater(self, updater: Any) -> None:
        """Call ``updater(key, merged, stored)`` with MXNet's arrays on each push."""
        if isinstance(updater, mx.optimizer.Updater):
            self.set_optimizer(updater.optimizer)
            return
        self._rule = None
        self.store.set_updater(updater if updater is None else _with_their_arrays(updater))

    @property
    def _updater(self) -> _StateHolder | None:
        """The updater with the optimizer: MXNet's trainer reads it here after it has loaded states."""
        ours = self.store._updater
        if ours is None:
            return None
        if self._rule is None:
            return _StateHolder(
                ours.optimizer, {key: state_as_ndarrays(state) for key, state in ours.states.items()}
            )
        states = {key: state_as_ndarrays(self._rule.mxnet_state(state)) for key, state in ours.states.items()}
        return _StateHolder(self._rule.theirs, states)

    # ----------------------------------------------------------------------------------------- states

    def save_optimizer_states(self, fname: PathLike, dump_optimizer: bool = False) -> None:
        """Write the states and update counts to a safetensors file; it works with every type of store.

        With `dump_optimizer`, the file also contains the settings of a translated optimizer. If MXNet's code
        runs the optimizer, its settings are only in MXNet's object.
        """
        self.store.save_optimizer_states(
            fname, dump_optimizer and not isinstance(self._rule, ForeignOptimizer)
        )

    def load_optimizer_states(self, fname: PathLike) -> None:
        """Read the states that `save_optimizer_states` wrote, also into MXNet's object.

        Raises
        ------
        StateFileError
            The file is damaged or has another format, for example a pickle of MXNet.
        """
        self.store.load_optimizer_states(fname)
        if not isinstance(self._rule, TranslatedOptimizer):
            return
        content = states.read_states(fname)
        theirs, counts = self._rule.theirs, dict(content.counts)
        theirs._all_index_update_counts, theirs._index_update_count = {0: counts}, counts
        theirs.num_update = content.num_update
        if content.optimizer is not None:
            self._rule.apply_loaded(content.optimizer)

    # ---------------------------------------------------------------------------------------- job

    @property
    def type(self) -> str:
        """Name of the store, without the prefix of MXNet's registry."""
        return self.store.type

    @property
    def rank(self) -> int:
        """Rank of this worker in its job, from 0."""
        return self.store.rank

    @property
    def local_rank(self) -> int:
        """Rank of this worker among the workers on its machine, from 0."""
        return self.store.local_rank

    @property
    def num_workers(self) -> int:
        """Number of workers in the store."""
        return self.store.num_workers

    def is_capable(self, capability: str) -> bool:
        """Return whether the store has a capability; ``"optimizer"`` is the only one."""
        return self.store.is_capable(capability)

    def _barrier(self) -> None:
        """Wait until every worker has called this method."""
        self.store.barrier()

    def _send_command_to_servers(self, head: int, body: str) -> None:
        """Send a command to every server; without servers the call does nothing."""
        self.store.send_command_to_servers(head, body)

    def close(self) -> None:
        """Close the store and free its memory. A second call does nothing."""
        self.store.close()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *error: Any) -> None:
        """Close the store. If an error ends the block, the other workers see this worker as lost."""
        self.store.__exit__(*error)

    def __repr__(self) -> str:
        return f"<kvstore.mxnet of {self.store!r}>"


@raises_mxnet_error
def create(name: str = "local", **options: Any) -> KVStore:
    """Create a store of kvstore for MXNet.

    It raises the errors of `kvstore.create`; each of them is also an ``mxnet.base.MXNetError``.

    Parameters
    ----------
    name : str
        A name for `kvstore.create`; ``kvstore_<name>`` means the same.
    **options
        Options for `kvstore.create`.

    Returns
    -------
    KVStore
        An ``mxnet.kvstore.KVStore``. Gluon's ``Trainer(params, "sgd", kvstore=...)`` and Module accept it.

    Raises
    ------
    ArgumentError
        The name is ``"teststore"`` or that of a class registered with kvstore.
    """
    store = create_ours(_without_prefix(name), **options)
    if not isinstance(store, OurKVStore):
        raise ArgumentError(
            f"{name!r} is a registered class: register it with mxnet.kvstore.KVStoreBase.register instead"
        )
    made = KVStore(store)
    made._made = True
    return made


_PREFIX = "kvstore_"


def _without_prefix(name: Any) -> Any:
    """Return the name for `kvstore.create`; raise for an invalid name."""
    return name[len(_PREFIX) :] if isinstance(name, str) and name.lower().startswith(_PREFIX) else name


def _register_store(name: str) -> None:
    """Register a store, so that ``mxnet.kvstore.create("kvstore_<name>")`` creates it."""

    @raises_mxnet_error
    def __init__(self: KVStore) -> None:  # noqa: N807 - the constructor of the class below
        KVStore.__init__(self, create_ours(name))
        self._made = True

    mx.kvstore.KVStoreBase.register(type(_PREFIX + name, (KVStore,), {"__init__": __init__}))


def _key_list(key: Any, values: Any) -> list[Index]:
    return list(indices_of(group_values(key, values)))


def _with_their_arrays(updater: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    def call(key: Any, merged: Any, stored: Any) -> None:
        weight = as_ndarray(stored)
        updater(key, gradient_as_ndarray(merged), weight)
        weight.wait_to_read()

    return call


for _name in STORES:
    _register_store(_name)

__all__ = ["KVStore", "create"]
