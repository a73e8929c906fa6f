"""Stores for JAX: functions that push and pull trees of arrays, and a gradient transformation for optax.

JAX arrays are immutable, so the results are new arrays. Outside of ``jax.jit`` a call is a plain call of the
store. Inside of ``jax.jit`` it becomes an ordered callback to the host, which copies the results once more
and whose errors JAX wraps. It is better to compile the gradient and the update, and to call `pushpull`
between them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from .arrays.host import check_jax_array
from .averaging.agreement import StepAgreement, make_agreement
from .averaging.checks import (
    check_made,
    check_not_late,
    check_rounds,
    check_store,
    check_sums,
    has_optimizer,
    mean_parts,
)
from .collective.objects import ArrayKind
from .errors import ArgumentError, ArrayError, ConfigError, DTypeError, KeyNotFoundError, MissingBackendError
from .store import KVStore, collective_of

try:
    import jax
    from jax.experimental import io_callback
except ImportError as _error:
    raise MissingBackendError(f"kvstore.jax needs JAX: pip install jax; {_error}") from _error

Tree = Any
Array = Any

#: A call with this array is traced if JAX is tracing.
_ZERO = np.float32(0)

#: Comparisons of workers, by store and prefix of keys.
_agreements: WeakKeyDictionary[KVStore, dict[str, StepAgreement | None]] = WeakKeyDictionary()


class GradientTransformation(NamedTuple):
    """A pair of functions with the interface of optax.

    Attributes
    ----------
    init : callable
        ``init(params) -> state``
    update : callable
        ``update(updates, state, params=None) -> (updates, state)``
    """

    init: Callable[..., Any]
    update: Callable[..., Any]


def broadcast(store: KVStore, tree: Tree, prefix: str = "") -> Tree:
    """Initialise a key for each array, and return the tree with the values of rank 0.

    Parameters
    ----------
    store : KVStore
        The store.
    tree : pytree of arrays
        The first values. All workers must pass the same paths, shapes and types. The keys are the paths, for
        example ``"layers/0/w"``.
    prefix : str
        Prefix of the keys, before the paths.

    Returns
    -------
    pytree
        New arrays, on the devices of the arrays of `tree`.

    Raises
    ------
    ArrayError
        An array is sparse or is sharded over several devices, or the call is inside of ``jax.jit``.
    DuplicateKeyError, ShapeError, DTypeError
        See `KVStore.broadcast`.
    """
    check_made(store)
    keys, leaves, form = _flat_tree(tree, prefix)
    if _is_traced(leaves):
        raise ArrayError("broadcast does not work inside of jax.jit: call it before")
    values = [_host_value(key, leaf) for key, leaf in zip(keys, leaves, strict=True)]
    outs = [np.empty(value.shape, value.dtype) for value in values]
    if keys:
        store.broadcast(keys, values, out=outs)
    return jax.tree_util.tree_unflatten(form, list(map(_place_result, outs, leaves)))


def pushpull(
    store: KVStore, tree: Tree, prefix: str = "", *, average: bool = False, priority: int = 0
) -> Tree:
    """Sum each array over all workers. If the store has an optimizer, return the updated weights.

    Parameters
    ----------
    store : KVStore
        The store.
    tree : pytree of arrays
        The gradients. All workers must pass the same paths, shapes and types.
    prefix : str
        Prefix of the keys, before the paths. Unknown keys are initialised, unless the store has an optimizer,
        which needs the weights of `broadcast`.
    average : bool
        If True, return means: each value is divided by the number of workers before the sum, so that no sum
        overflows. It raises an error if the store has an optimizer, because the results are weights, and for
        integer types, which cannot represent means.
    priority : int
        Priority relative to the operations of other threads.

    Returns
    -------
    pytree
        New arrays, on the devices of the arrays of `tree`.

    Raises
    ------
    KeyNotFoundError
        The store has an optimizer but no weights. Call `broadcast` with the weights.
    ConfigError
        The store has an optimizer and `average` is True; or it has no optimizer and no rounds
        (``"dist_async"``), so that a push replaces the value.
    ArrayError, DTypeError
        An array is sparse or is sharded over several devices, or a leaf cannot be summed.
    ArgumentError
        `kvstore.create` did not create `store`, or `prefix` is not a str.
    KVStoreError
        See `KVStore.pushpull`. Inside of ``jax.jit`` JAX raises it as a ``JaxRuntimeError`` with the same
        text, when the program waits for the result.
    """
    check_made(store)
    return _exchange_tree(store, tree, prefix, partial(_check_meaning, store, average), average, priority)


def all_reduce_tree(store: KVStore, tree: Tree, *, average: bool = False) -> Tree:
    """Return the sums or means of arrays over all workers, without keys: for metrics and counts.

    An optimizer of the store is not used. `all_reduce`, in contrast, is a transformation of gradients.

    Parameters
    ----------
    store : KVStore
        A store of all workers.
    tree : pytree of arrays
        All workers must pass the same paths, shapes and types.
    average : bool
        If True, return means; see `pushpull`.

    Returns
    -------
    pytree
        New arrays, on the devices of the arrays of `tree`.

    Raises
    ------
    ArrayError, ArgumentError, DTypeError, ShapeError, CapabilityError, PeerLostError
        See `pushpull` and `KVStore.all_reduce`.
    """
    check_made(store)
    keys, leaves, form = _flat_tree(tree, "")
    return _call_with_leaves(partial(_host_reducer, store, average), keys, leaves, form)


def _host_reducer(store: KVStore, average: bool, *values: Array) -> list[Any]:
    """Reduce copies of arrays on the host."""
    arrays = [np.array(value) for value in values]
    store.all_reduce(arrays, average=average)
    return arrays


def broadcast_object(store: KVStore, value: Any = None, root: int = 0) -> Any:
    """Return the object of worker `root`; as `KVStore.broadcast_object`, where JAX arrays stay JAX arrays."""
    check_made(store)
    return collective_of(store).broadcast_object(value, root, _ARRAYS)


def all_gather_object(store: KVStore, value: Any) -> list[Any]:
    """Return the objects of all workers, by rank; see `broadcast_object`."""
    check_made(store)
    return collective_of(store).all_gather_object(value, _ARRAYS)


def _host_view(value: Any) -> np.ndarray[Any, Any] | None:
    """View an array of JAX on the host."""
    return np.asarray(value) if isinstance(value, jax.Array) else None


_ARRAYS = ArrayKind(_host_view, jax.numpy.asarray)


def _exchange_tree(
    store: KVStore, tree: Tree, prefix: str, check: Callable[[], None], average: bool, priority: int = 0
) -> Tree:
    keys, leaves, form = _flat_tree(tree, prefix)
    call = partial(_exchange_arrays, store, keys, check, average, priority)
    return _call_with_leaves(partial(_call_compared, store, prefix, call), keys, leaves, form)


def _call_compared(store: KVStore, prefix: str, call: Callable[..., list[Any]], *values: Array) -> list[Any]:
    """Call an exchange; raise KVStoreError if a worker has closed its store: sums lack its part."""
    outs = call(*values)
    agreement = _agreement_of(store, prefix)
    if agreement is not None:
        agreement.compare(0)
    return outs


def _agreement_of(store: KVStore, prefix: str) -> StepAgreement | None:
    """Return the comparison of the workers that exchange keys with this prefix."""
    known = _agreements.setdefault(store, {})
    if prefix not in known:
        known[prefix] = make_agreement(store, f"jax/{prefix}", 0, restarts=True)
    return known[prefix]


def _call_with_leaves(call: Callable[..., list[Any]], keys: list[str], leaves: list[Any], form: Any) -> Tree:
    """Call a function of arrays that returns as many arrays, also inside of ``jax.jit``."""
    if not keys:
        found: list[Any] = []
    elif _is_traced(leaves):
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in map(jax.numpy.asarray, leaves)]
        found = io_callback(call, shapes, *leaves, ordered=True)
    else:
        outs = call(*(_host_value(key, leaf) for key, leaf in zip(keys, leaves, strict=True)))
        found = list(map(_place_result, outs, leaves))
    return jax.tree_util.tree_unflatten(form, found)


def all_reduce(store: KVStore, *, average: bool = True, prefix: str = "gradients/") -> GradientTransformation:
    """Return a gradient transformation that averages over all workers. Put it first in a chain of optax.

    Parameters
    ----------
    store : KVStore
        A store without an optimizer.
    average : bool
        If True, return means; see `pushpull`.
    prefix : str
        Prefix of the keys, before the paths. Models that share a store need different prefixes.

    Returns
    -------
    GradientTransformation
        The type of optax if optax is imported, else the type of this module. Its state is empty.

    Raises
    ------
    ConfigError, CapabilityError
        The store has an optimizer or no rounds, or this worker was restarted while the job continued.
    """
    check_store(store)
    check_not_late(store)

    def init(params: Tree) -> tuple[()]:
        return ()

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        return _exchange_tree(store, updates, prefix, partial(check_sums, store), average), state

    optax = sys.modules.get("optax")
    return (optax.GradientTransformation if optax else GradientTransformation)(init, update)


def _check_meaning(store: KVStore, average: bool) -> None:
    """Raise if the result would be neither the requested sums or means nor the weights."""
    if not has_optimizer(store):
        check_rounds(store)
    elif average:
        raise ConfigError(
            f"this {store.type!r} store has an optimizer, so pushpull returns weights, which must not be "
            "divided by the number of workers: remove average=True, and create the optimizer with "
            "rescale_grad=1/store.num_workers"
        )


def _exchange_arrays(
    store: KVStore, keys: list[str], check: Callable[[], None], average: bool, priority: int, *values: Array
) -> list[Any]:
    """Push and pull host arrays, and initialise keys that are new.

    The check is here and not in the traced function, because the optimizer of a store can be set after
    tracing.
    """
    check()
    arrays = [np.asarray(value) if _on_host(value) else value for value in values]
    arrays = mean_parts(store, keys, arrays) if average else arrays
    outs = [np.empty(array.shape, array.dtype) for array in arrays]
    try:
        store.pushpull(keys, arrays, out=outs, priority=priority)
    except KeyNotFoundError as error:
        _init_keys(store, keys, arrays, error)
        store.pushpull(keys, arrays, out=outs, priority=priority)
    return outs


def _init_keys(store: KVStore, keys: list[str], arrays: list[Any], error: KeyNotFoundError) -> None:
    if has_optimizer(store):
        raise KeyNotFoundError(
            f"{error}: the store's optimizer has no weights to update; first call "
            "kvstore.jax.broadcast(store, params) with the same prefix"
        ) from error
    known = set(store.keys())
    new = [(key, array) for key, array in zip(keys, arrays, strict=True) if key not in known]
    store.init([key for key, _ in new], [np.zeros(array.shape, array.dtype) for _, array in new])


def _flat_tree(tree: Tree, prefix: str) -> tuple[list[str], list[Any], Any]:
    """Return keys by path, leaves, and the structure of the tree."""
    if not isinstance(prefix, str):
        raise ArgumentError(f"prefix must be a str, '' for none, not {prefix!r}")
    pairs, form = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_sparse)
    keys = [prefix + jax.tree_util.keystr(path, simple=True, separator="/") or "value" for path, _ in pairs]
    leaves = [leaf for _, leaf in pairs]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ArgumentError(f"two arrays of the tree have the path {twice!r}; rename a key of a dict")
    for key, leaf in zip(keys, leaves, strict=True):
        _check_leaf(key, leaf)
    return keys, leaves, form


def _check_leaf(key: str, leaf: Any) -> None:
    if _is_sparse(leaf):
        raise ArrayError(
            f"{key!r} is a {type(leaf).__name__}: pass leaf.todense(), or push a kv.RowSparseArray to "
            "the store"
        )
    dtype = getattr(leaf, "dtype", None)
    if dtype == jax.dtypes.float0:
        raise DTypeError(
            f"{key!r} is of type float0, which jax.grad returns for integers: it cannot be summed, so pass "
            "None in its place"
        )
    if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        raise DTypeError(f"{key!r} is a key of random numbers: pass jax.random.key_data(key)")


def _is_sparse(leaf: Any) -> bool:
    """Return whether it is a sparse array of JAX: a tree for JAX, whose indices must not be summed."""
    sparse = sys.modules.get("jax.experimental.sparse")
    return sparse is not None and isinstance(leaf, sparse.JAXSparse)


def _is_traced(leaves: list[Any]) -> bool:
    """Return whether JAX traces this call; all leaves can be constants, as in a branch of ``lax.cond``."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in (*leaves, jax.lax.neg(_ZERO)))


def _host_value(key: str, leaf: Any) -> Array:
    """Return an array of one device, and NumPy's view of it if it is on the host."""
    array = leaf if isinstance(leaf, jax.Array) else _as_array(key, leaf)
    check_jax_array(array, repr(key))
    if len(array.sharding.device_set) > 1:
        if not array.is_fully_replicated:
            raise ArrayError(
                f"{key!r} is sharded over {len(array.sharding.device_set)} devices, but stores accept arrays "
                "on one device: gather it, or pass a tree of leaf.addressable_data(n)"
            )
        array = array.addressable_data(0)
    return np.asarray(array) if _on_host(array) else array


def _as_array(key: str, leaf: Any) -> Array:
    try:
        return jax.numpy.asarray(leaf)
    except TypeError as error:
        raise ArrayError(f"{key!r} must be an array or a number, not {leaf!r}: {error}") from error


def _on_host(array: Any) -> bool:
    return not isinstance(array, jax.Array) or all(device.platform == "cpu" for device in array.devices())


def _place_result(out: Any, leaf: Any) -> Array:
    """Copy a result to the device of the value."""
    if isinstance(leaf, jax.Array):
        return jax.device_put(out, leaf.sharding)
    return jax.numpy.asarray(out)


__all__ = [
    "GradientTransformation",
    "all_gather_object",
    "all_reduce",
    "all_reduce_tree",
    "broadcast",
    "broadcast_object",
    "pushpull",
]
