"""Bodies of workers with JAX; test_jax.py starts them in an environment that has it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import kvstore as kv
from kvstore.settings.launchers import detect_placement

os.environ["JAX_PLATFORMS"] = "cpu"

RATE, MOMENTUM, BATCH = 0.1, 0.9, 32


def first(rank: int) -> dict[str, Any]:
    """Weights of a small network; other ones on each worker, until they are broadcast."""
    import jax.numpy as jnp

    random = np.random.default_rng(rank)
    shapes = {"w": (64, 24), "b": (24,)}, {"w": (24, 10), "b": (10,)}
    return {
        "layers": [
            {name: jnp.asarray(random.normal(0, 0.2, shape), jnp.float32) for name, shape in layer.items()}
            for layer in shapes
        ]
    }


def loss(params: dict[str, Any], images: Any, labels: Any) -> Any:
    import jax
    import jax.numpy as jnp

    first, second = params["layers"]
    hidden = jax.nn.relu(images @ first["w"] + first["b"])
    logits = hidden @ second["w"] + second["b"]
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels])


def weights(params: Any) -> list[float]:
    import jax

    return [float(x) for leaf in jax.tree.leaves(params) for x in np.asarray(leaf, np.float64).ravel()]


def learn(how: str, store_name: str, folder: str, steps: int) -> list[float]:
    """Train on digits: all of each batch alone, or each worker a part of it."""
    import jax

    from kvstore.jax import broadcast

    place = detect_placement()
    data = np.load(f"{folder}/digits.npz")
    with kv.create(store_name) as store:
        params = broadcast(store, first(place.rank))
        if how == "store":
            store.set_optimizer(
                kv.optimizer.SGD(learning_rate=RATE, momentum=MOMENTUM, rescale_grad=1 / place.size)
            )
        step, state = _step(how, store, params)
        for number in range(steps):
            start = number * BATCH % (len(data["images"]) - BATCH)
            part = slice(
                start + place.rank * BATCH // place.size, start + (place.rank + 1) * BATCH // place.size
            )
            params, state = step(params, state, data["images"][part], data["labels"][part])
        return weights(jax.block_until_ready(params))


def _step(how: str, store: kv.KVStore, params: Any) -> tuple[Callable[..., Any], Any]:
    import jax
    import optax

    from kvstore.jax import all_reduce, pushpull

    gradient = jax.jit(jax.grad(loss))
    if how == "store":
        return lambda params, state, *batch: (pushpull(store, gradient(params, *batch)), None), None
    if how == "alone":
        chain = optax.sgd(RATE, MOMENTUM)
    else:
        chain = optax.chain(all_reduce(store), optax.sgd(RATE, MOMENTUM))

    def step(params: Any, state: Any, *batch: Any) -> Any:
        updates, state = chain.update(gradient(params, *batch), state, params)
        return optax.apply_updates(params, updates), state

    return (jax.jit(step) if how == "jit" else step), chain.init(params)


def trees(store_name: str) -> dict[str, Any]:
    """Trees of several kinds of leaves, in several ways."""
    import jax
    import jax.numpy as jnp

    from kvstore.jax import broadcast, pushpull

    rank = detect_placement().rank
    tree = {
        "f": [jnp.full((2, 3), rank + 1.0), (jnp.asarray(rank + 0.5, jnp.bfloat16),)],
        "i": jnp.arange(3) + rank,
        "none": None,
        "number": 2.0,
    }
    with kv.create(store_name) as store:
        found: dict[str, Any] = {"first": _plain(broadcast(store, tree, "first/"))}
        summed = pushpull(store, tree)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(summed))
        found["sum"] = _plain(summed)
        found["types"] = [str(leaf.dtype) for leaf in jax.tree.leaves(summed)]
        floats = {name: leaf for name, leaf in tree.items() if name != "i"}
        found["again"] = _plain(pushpull(store, floats, average=True))
        found["compiled"] = _plain(jax.jit(partial(pushpull, store, average=True))(floats))
        large = {"large": jnp.full(3, 40000, jnp.float16)}
        found["large"] = [
            _plain(pushpull(store, large, average=True)),
            _plain(jax.jit(partial(pushpull, store, average=True))(large)),
        ]
        try:
            pushpull(store, {"i": tree["i"]}, average=True)
        except kv.DTypeError as error:
            found["integers"] = str(error)
        found["empty"] = pushpull(store, {})
        found["array"] = float(pushpull(store, jnp.ones(()), "alone"))
        found["keys"] = sorted(map(str, store.keys()))
        # Work before and after it that is large enough to be under way while the host is called.
        big = jnp.full((600, 600), 1 / 600)
        chain = jax.jit(lambda x: pushpull(store, x @ x, "big") @ x)
        for _ in range(5):
            big = chain(big) / 2
        found["big"] = float(big.sum())
        return found


def _plain(tree: Any) -> Any:
    import jax

    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64).tolist(), tree)


def without_keys(store_name: str) -> dict[str, Any]:
    """Metrics and objects in a store whose optimizer has no part in them."""
    import jax
    import jax.numpy as jnp

    from kvstore.jax import all_gather_object, all_reduce_tree, broadcast, broadcast_object, pushpull

    rank = detect_placement().rank
    with kv.create(store_name) as store:
        weights = broadcast(store, {"w": jnp.ones(3)})
        store.set_optimizer(kv.optimizer.SGD(learning_rate=1.0))
        tree = {
            "loss": jnp.asarray(rank + 5.0),
            "counts": [jnp.arange(2) + rank, np.ones(2)],
            "long": jnp.ones(5000),
        }
        sums = all_reduce_tree(store, tree)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(sums))
        found = {"sums": _plain({**sums, "long": sums["long"].sum()})}
        means = {"loss": tree["loss"], "half": jnp.full(2, 40000, jnp.float16)}
        found["means"] = _plain(all_reduce_tree(store, means, average=True))
        found["compiled"] = _plain(jax.jit(partial(all_reduce_tree, store, average=True))(means))
        every = all_gather_object(store, {"rank": rank, "array": jnp.arange(rank + 1), "numpy": np.ones(1)})
        assert all(isinstance(one["array"], jax.Array) for one in every)
        assert all(type(one["numpy"]) is np.ndarray for one in every)
        found["every"] = [[one["rank"], one["array"].tolist()] for one in every]
        found["one"] = broadcast_object(store, ["of", rank], root=1)
        found["weights"] = _plain(pushpull(store, jax.tree.map(jnp.ones_like, weights)))
        found["keys"] = store.keys()
        return found


def mistakes() -> dict[str, str]:
    import jax
    import jax.numpy as jnp
    from jax.experimental import sparse

    from kvstore.jax import all_reduce, broadcast, pushpull

    found = {}

    def refused(name: str, what: Callable[[], Any]) -> None:
        try:
            what()
        except (kv.KVStoreError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
            return
        raise AssertionError(f"{name}: nothing was raised")

    ones = jnp.ones(3)
    with kv.create("local") as store, kv.create("local") as other:
        refused("sparse", lambda: pushpull(store, {"t": sparse.BCOO.fromdense(jnp.eye(3))}))
        refused("twice", lambda: pushpull(store, {"a": {"b": ones}, "a/b": ones}))
        refused("traced", lambda: jax.jit(partial(broadcast, store))(ones))
        refused("type", lambda: pushpull(store, {"c": jnp.ones(2, jnp.complex64)}))
        pushpull(store, {"s": ones})
        refused("shape", lambda: pushpull(store, {"s": jnp.ones(4)}))
        refused(
            "compiled", lambda: jax.jit(partial(pushpull, store))({"s": jnp.ones(4)})["s"].block_until_ready()
        )
        gradient = jax.grad(lambda p: p["w"].sum() * p["step"], allow_int=True)
        refused("float0", lambda: pushpull(store, gradient({"w": ones, "step": jnp.array(3)})))
        refused("random", lambda: pushpull(store, {"r": jax.random.key(0)}))
        refused("text", lambda: pushpull(store, {"t": "x"}))
        refused("prefix", lambda: pushpull(store, {"p": ones}, None))  # type: ignore[arg-type]
        refused("prefix of weights", lambda: broadcast(store, {"p": ones}, 5))  # type: ignore[arg-type]
        refused("no store", lambda: pushpull(None, {"p": ones}))  # type: ignore[arg-type]
        refused("no store of weights", lambda: broadcast(None, {"p": ones}))  # type: ignore[arg-type]
        refused("store", lambda: all_reduce(kv.TestStore()))  # type: ignore[arg-type]
        other.set_optimizer(kv.optimizer.SGD())
        refused("optimizer", lambda: all_reduce(other))
        refused("weights", lambda: pushpull(other, {"w": ones}))
        broadcast(other, {"v": ones})
        refused("average", lambda: pushpull(other, {"v": ones}, average=True))
        late = all_reduce(store, prefix="late/", average=False)
        late.update({"w": ones}, ())
        store.set_optimizer(kv.optimizer.SGD())
        refused("later", lambda: late.update({"w": ones}, ()))
    return found


def without_rounds(store_name: str) -> list[Any]:
    """Sums are refused, and updates are not."""
    import jax.numpy as jnp

    from kvstore.jax import all_reduce, broadcast, pushpull

    ones = jnp.ones(2)
    with kv.create(store_name) as store:
        found: list[Any] = [
            _text_of(lambda: all_reduce(store)),
            _text_of(lambda: pushpull(store, {"g": ones})),
        ]
        broadcast(store, {"w": ones * 8})
        store.set_optimizer(kv.optimizer.SGD(learning_rate=1))
        pushpull(store, {"w": ones})
        store.barrier()
        found.append(pushpull(store, {"w": ones * 0})["w"].tolist())
        store.barrier()
    return found


def _text_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except kv.ConfigError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def devices() -> dict[str, Any]:
    """Arrays over several devices of the process: copies are one, parts are not."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from kvstore.jax import pushpull

    mesh = Mesh(np.array(jax.devices()), ("d",))
    copied = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec()))
    cut = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, PartitionSpec("d")))
    with kv.create("local") as store:
        found = pushpull(store, copied)
        assert found.sharding == copied.sharding
        try:
            pushpull(store, {"cut": cut})
        except kv.ArrayError as error:
            return {"copied": found.tolist(), "cut": str(error)}
    return {}


def plain_pair() -> list[Any]:
    """Without optax a pair of functions of our own, with the same names."""
    import sys

    import jax.numpy as jnp

    from kvstore.jax import GradientTransformation, all_reduce

    assert "optax" not in sys.modules
    with kv.create("shared") as store:
        pair = all_reduce(store)
        assert isinstance(pair, GradientTransformation)
        state = pair.init({"w": jnp.zeros(2)})
        updates, state = pair.update({"w": jnp.full(2, 1.0 + store.rank)}, state)
        return [updates["w"].tolist(), list(state)]
