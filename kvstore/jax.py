"""Front door for JAX: trees of arrays through a store, by themselves or in a chain of optax.

Arrays of JAX do not change, so results are new arrays. Outside of ``jax.jit`` a call is a plain call of the
store. Inside, it becomes an ordered callback to the host, which costs a copy of what comes back, and whose
errors JAX wraps; so compile the gradient and the update, and let `pushpull` stand between the two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .averaging import check_made, check_not_late, check_rounds, check_store, check_sums, has_optimizer
from .errors import ArgumentError, ArrayError, ConfigError, DTypeError, KeyNotFoundError, MissingBackendError
from .store import KVStore

try:
    import jax
    from jax.experimental import io_callback
except ImportError as _error:
    raise MissingBackendError(f"kvstore.jax needs JAX: pip install jax; {_error}") from _error

Tree = Any
Array = Any


class GradientTransformation(NamedTuple):
    """A pair of functions, as optax has it.

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
    """Initialise a key for each array, and return the tree with rank 0's values.

    Parameters
    ----------
    store : KVStore
    tree : pytree of arrays
        Alike on all workers but for the values. Keys are the paths: ``"layers/0/w"``.
    prefix : str
        Goes before the paths.

    Returns
    -------
    pytree
        Of new arrays, where those of `tree` are.

    Raises
    ------
    ArrayError
        An array is sparse or lies on several devices; or this is inside of ``jax.jit``.
    DuplicateKeyError, ShapeError, DTypeError
        As `KVStore.broadcast`.
    """
    check_made(store)
    keys, leaves, form = _flat(tree, prefix)
    if _traced(leaves):
        raise ArrayError("broadcast is for arrays, not for what jax.jit traces: call it before")
    values = [_value(key, leaf) for key, leaf in zip(keys, leaves, strict=True)]
    outs = [np.empty(value.shape, value.dtype) for value in values]
    if keys:
        store.broadcast(keys, values, out=outs)
    return jax.tree_util.tree_unflatten(form, list(map(_placed, outs, leaves)))


def pushpull(
    store: KVStore, tree: Tree, prefix: str = "", *, average: bool = False, priority: int = 0
) -> Tree:
    """Sum each array over all workers; with an optimizer in the store, get the updated weights.

    Parameters
    ----------
    store : KVStore
    tree : pytree of arrays
        Alike on all workers but for the values.
    prefix : str
        Goes before the paths to make the keys. Unknown keys are initialised, unless the store has an
        optimizer: that updates the weights of `broadcast`.
    average : bool
        Divide the sums by the number of workers. Not with an optimizer in the store: weights come back then.
    priority : int
        Has an effect on other threads' operations only.

    Returns
    -------
    pytree
        Of new arrays, where those of `tree` are.

    Raises
    ------
    KeyNotFoundError
        The store has an optimizer and no weights; `broadcast` them.
    ConfigError
        The store has an optimizer, and `average` is True; or it has none and no rounds (``"dist_async"``), so
        that a push replaces the value.
    ArrayError, DTypeError
        An array is sparse, or lies on several devices; or a leaf is no array that could be summed.
    ArgumentError
        `store` was not made by `kvstore.create`, or `prefix` is no str.
    KVStoreError
        As `KVStore.pushpull`. Inside of ``jax.jit`` it comes as a ``JaxRuntimeError`` with its text, when the
        result is waited for.
    """
    check_made(store)
    return _through(store, tree, prefix, partial(_check_meaning, store, average), average, priority)


def _through(
    store: KVStore, tree: Tree, prefix: str, check: Callable[[], None], average: bool, priority: int = 0
) -> Tree:
    keys, leaves, form = _flat(tree, prefix)
    call = partial(_exchange, store, keys, check, average, priority)
    if not keys:
        found: list[Any] = []
    elif _traced(leaves):
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in map(jax.numpy.asarray, leaves)]
        found = io_callback(call, shapes, *leaves, ordered=True)
    else:
        outs = call(*(_value(key, leaf) for key, leaf in zip(keys, leaves, strict=True)))
        found = list(map(_placed, outs, leaves))
    return jax.tree_util.tree_unflatten(form, found)


def all_reduce(store: KVStore, *, average: bool = True, prefix: str = "gradients/") -> GradientTransformation:
    """Make the gradient transformation that averages over all workers: the first in a chain of optax.

    Parameters
    ----------
    store : KVStore
        Without an optimizer.
    average : bool
        Divide by the number of workers; False: sum.
    prefix : str
        Goes before the paths to make the keys; models that share a store need different ones.

    Returns
    -------
    GradientTransformation
        optax's own, if optax has been imported. Its state is empty.

    Raises
    ------
    ConfigError, CapabilityError
        The store has an optimizer or no rounds; or this worker came back to a job that went on without it.
    """
    check_store(store)
    check_not_late(store)

    def init(params: Tree) -> tuple[()]:
        return ()

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        return _through(store, updates, prefix, partial(check_sums, store), average), state

    optax = sys.modules.get("optax")
    return (optax.GradientTransformation if optax else GradientTransformation)(init, update)


def _check_meaning(store: KVStore, average: bool) -> None:
    """Raise where the result would be neither the sums or means that are asked for nor the weights."""
    if not has_optimizer(store):
        check_rounds(store)
    elif average:
        raise ConfigError(
            f"this {store.type!r} store has an optimizer, so pushpull returns weights, which are not to be "
            "divided by the number of workers: leave average=True out, and give the optimizer "
            "rescale_grad=1/store.num_workers"
        )


def _exchange(
    store: KVStore, keys: list[str], check: Callable[[], None], average: bool, priority: int, *values: Array
) -> list[Any]:
    """Push and pull host arrays, and initialise keys that are new.

    The check comes here, not where JAX traces: a store may have got an optimizer since.
    """
    check()
    arrays = [np.asarray(value) if _on_host(value) else value for value in values]
    outs = [np.empty(array.shape, array.dtype) for array in arrays]
    try:
        store.pushpull(keys, arrays, out=outs, priority=priority)
    except KeyNotFoundError as error:
        _initialise(store, keys, arrays, error)
        store.pushpull(keys, arrays, out=outs, priority=priority)
    if average and store.num_workers > 1:
        for out in outs:
            np.divide(out, store.num_workers, out=out, casting="unsafe")
    return outs


def _initialise(store: KVStore, keys: list[str], arrays: list[Any], error: KeyNotFoundError) -> None:
    if has_optimizer(store):
        raise KeyNotFoundError(
            f"{error}: the store's optimizer has no weights to update; kvstore.jax.broadcast(store, params) "
            "gives it some, under the same prefix"
        ) from error
    known = set(store.keys())
    new = [(key, array) for key, array in zip(keys, arrays, strict=True) if key not in known]
    store.init([key for key, _ in new], [np.zeros(array.shape, array.dtype) for _, array in new])


def _flat(tree: Tree, prefix: str) -> tuple[list[str], list[Any], Any]:
    """Keys by path, leaves, and what puts them together again."""
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
            f"{key!r} is of type float0, what jax.grad gives for integers: there is nothing to sum, so put "
            "None in its place"
        )
    if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        raise DTypeError(f"{key!r} is a key of random numbers: pass jax.random.key_data(key)")


def _is_sparse(leaf: Any) -> bool:
    """Whether it is one of JAX's sparse arrays: trees to JAX, whose indices must not be summed."""
    sparse = sys.modules.get("jax.experimental.sparse")
    return sparse is not None and isinstance(leaf, sparse.JAXSparse)


def _traced(leaves: list[Any]) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def _value(key: str, leaf: Any) -> Array:
    """Return an array of one device, and NumPy's view of it where that is the host."""
    array = leaf if isinstance(leaf, jax.Array) else _as_array(key, leaf)
    if len(array.sharding.device_set) > 1:
        if not array.is_fully_replicated:
            raise ArrayError(
                f"{key!r} is cut over {len(array.sharding.device_set)} devices, and stores take arrays of "
                "one: gather it, or make a tree of leaf.addressable_data(n)"
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


def _placed(out: Any, leaf: Any) -> Array:
    """Put a result where the value was."""
    if isinstance(leaf, jax.Array):
        return jax.device_put(out, leaf.sharding)
    return jax.numpy.asarray(out)


__all__ = ["GradientTransformation", "all_reduce", "broadcast", "pushpull"]
