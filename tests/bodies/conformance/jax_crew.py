"""Programs of JAX, and the body of a worker that plays them: what differs between the ways is `Play`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jobs
import numpy as np

import kvstore as kv
from kvstore.settings.launchers import detect_placement

os.environ["JAX_PLATFORMS"] = "cpu"
LAST = 1


class Play:
    """One run of one program: alone, or with a store, and the exchange inside of jit or outside."""

    def __init__(self, way: dict[str, Any], size: int, store: kv.KVStore | None) -> None:
        self.way, self.size, self.store = way, size, store
        self.rank = 0 if store is None else detect_placement().rank
        self.ranks = range(size) if store is None else range(self.rank, self.rank + 1)

    @property
    def is_alone(self) -> bool:
        """Whether this process plays all workers."""
        return self.store is None

    def share(self, tree: Any, prefix: str = "") -> Any:
        """Return rank 0's values."""
        from kvstore.jax import broadcast

        return tree if self.store is None else broadcast(self.store, tree, prefix)

    def reduce(self, **options: Any) -> Any:
        """Return the exchange, as the first transformation of a chain."""
        import optax

        from kvstore.jax import all_reduce

        return optax.identity() if self.store is None else all_reduce(self.store, **options)

    def gradient(self, loss: Callable[..., Any], params: Any, step: Any, *more: Any) -> Any:
        """Return the gradient of this worker's batch; alone, the mean over those of all."""
        import jax

        found = [_compiled_gradient(loss)(params, rank, step, *more) for rank in self.ranks]
        return jax.tree.map(lambda *parts: sum(parts[1:], parts[0]) / len(parts), *found)

    def compiled(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a step with the exchange in it, where this is the way."""
        import jax

        return jax.jit(step) if self.way.get("jit") else step


@cache
def _compiled_gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    return jax.jit(jax.grad(loss), static_argnums=1)  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------------- the model


def first(play: Play, dtype: Any = None) -> dict[str, Any]:
    """Return weights that differ from worker to worker, until they are shared."""
    import jax.numpy as jnp

    random = np.random.default_rng(play.rank)
    shapes = {"a": {"w": (6, 5), "b": (5,)}, "z": {"w": (5, 2)}}
    return {
        name: {k: jnp.asarray(random.normal(0, 0.5, s), dtype or jnp.float32) for k, s in layer.items()}
        for name, layer in shapes.items()
    }


def batch(rank: int, step: Any) -> Any:
    """Return the numbers of a rank in a step, which may be traced."""
    import jax

    return jax.random.normal(jax.random.fold_in(jax.random.key(rank), step), (4, 6))


def square(params: Any, rank: int, step: Any) -> Any:
    import jax.numpy as jnp

    data = batch(rank, step).astype(params["a"]["w"].dtype)
    hidden = jnp.tanh(data @ params["a"]["w"] + params["a"]["b"])
    return jnp.mean((hidden @ params["z"]["w"] - 1).astype(jnp.float32) ** 2)


def numbers(*trees: Any) -> list[list[float]]:
    """Return the values to compare."""
    import jax

    return [
        [float(x) for leaf in jax.tree.leaves(t) for x in np.asarray(leaf, np.float64).ravel()] for t in trees
    ]


def train(
    play: Play,
    chain: Any,
    loss: Callable[..., Any] = square,
    steps: int = 4,
    params: Any = None,
    skips: Callable[[int], bool] = lambda step: False,
) -> Any:
    """Train in the usual loop of optax."""
    import jax
    import optax

    params = play.share(first(play) if params is None else params)
    state = chain.init(params)

    def one(params: Any, state: Any, step: Any) -> Any:
        updates, state = chain.update(play.gradient(loss, params, step), state, params)
        return optax.apply_updates(params, updates), state

    call = play.compiled(one)
    for step in range(steps):
        if not skips(step):
            params, state = jax.block_until_ready(call(params, state, step))
    return params


# ---------------------------------------------------------------------------------------------- programs


def sgd(play: Play) -> Any:
    import optax

    return numbers(train(play, optax.chain(play.reduce(), optax.sgd(0.2, 0.9))))


def adamw_and_schedule(play: Play) -> Any:
    import optax

    rate = optax.cosine_decay_schedule(0.05, 10)
    return numbers(train(play, optax.chain(play.reduce(), optax.adamw(rate))))


def clip_after(play: Play) -> Any:
    import optax

    chain = optax.chain(play.reduce(), optax.clip_by_global_norm(0.1), optax.adam(0.05))
    return numbers(train(play, chain))


def clip_before(play: Play) -> Any:
    """Each worker clips its own gradient, and then these are averaged, as the chain says."""
    import jax
    import jax.numpy as jnp
    import optax

    if not play.is_alone:
        return numbers(
            train(play, optax.chain(optax.clip_by_global_norm(0.1), play.reduce(), optax.sgd(0.2)))
        )
    params, chain = first(play), optax.sgd(0.2)
    state, clip = chain.init(params), optax.clip_by_global_norm(0.1)
    for step in range(4):
        parts = [
            clip.update(jax.grad(square)(params, rank, step), clip.init(params))[0] for rank in play.ranks
        ]
        mean = jax.tree.map(lambda *p: jnp.stack(p).mean(0), *parts)
        updates, state = chain.update(mean, state, params)
        params = optax.apply_updates(params, updates)
    return numbers(params)


def multi_steps(play: Play) -> Any:
    """The exchange is before MultiSteps: each pass is averaged."""
    import optax

    chain = optax.chain(play.reduce(), optax.MultiSteps(optax.adam(0.05), 2).gradient_transformation())
    return numbers(train(play, chain))


def multi_steps_around(play: Play) -> Any:
    """The exchange is inside of MultiSteps: every second pass is averaged, with the accumulated gradients."""
    import optax

    inner = optax.chain(play.reduce(), optax.adam(0.05))
    return numbers(train(play, optax.MultiSteps(inner, 2).gradient_transformation()))


def _overflowing(play: Play, chain: Any) -> Any:
    """In step 1 the last rank's gradient is infinite."""
    import jax.numpy as jnp

    def loss(params: Any, rank: int, step: Any) -> Any:
        return square(params, rank, step) * jnp.where((step == 1) & (rank == LAST), jnp.inf, 1.0)

    return numbers(train(play, chain, loss))


def not_finite_on_one(play: Play) -> Any:
    """apply_if_finite after the exchange: all workers skip the step."""
    import optax

    return _overflowing(play, optax.chain(play.reduce(), optax.apply_if_finite(optax.adam(0.05), 5)))


def not_finite_on_one_around(play: Play) -> Any:
    """apply_if_finite around the exchange: the worker skips the exchange too."""
    import optax

    return _overflowing(play, optax.apply_if_finite(optax.chain(play.reduce(), optax.adam(0.05)), 5))


def not_finite_on_all_around(play: Play) -> Any:
    import jax.numpy as jnp
    import optax

    def loss(params: Any, rank: int, step: Any) -> Any:
        return square(params, rank, step) * jnp.where(step == 1, jnp.inf, 1.0)

    chain = optax.apply_if_finite(optax.chain(play.reduce(), optax.adam(0.05)), 5)
    return numbers(train(play, chain, loss))


def masked(play: Play) -> Any:
    """A part of the parameters does not learn: its updates are set to zero after the exchange."""
    import optax

    labels = {"a": "frozen", "z": "learns"}
    chain = optax.chain(
        play.reduce(),
        optax.multi_transform({"frozen": optax.set_to_zero(), "learns": optax.adam(0.05)}, labels),
    )
    return numbers(train(play, chain))


def masked_exchange(play: Play) -> Any:
    """Only a part of the gradients is exchanged: optax.masked around the exchange."""
    import optax

    mask = {"a": False, "z": True}
    chain = optax.chain(
        optax.masked(play.reduce(), mask),
        optax.multi_transform({"no": optax.set_to_zero(), "yes": optax.adam(0.05)}, {"a": "no", "z": "yes"}),
    )
    return numbers(train(play, chain))


def bfloat16(play: Play) -> Any:
    import jax.numpy as jnp
    import optax

    return numbers(train(play, optax.chain(play.reduce(), optax.sgd(0.2)), params=first(play, jnp.bfloat16)))


def float16_means(play: Play) -> Any:
    """The gradients have a sum that float16 cannot represent, and a mean that it can."""
    import jax.numpy as jnp

    return _reduced(play, {"f": jnp.full(3, 40000, jnp.float16)})


def integer_means(play: Play) -> Any:
    import jax.numpy as jnp

    return _reduced(play, {"i": jnp.full(3, 100, jnp.int8)})


def _reduced(play: Play, tree: Any) -> Any:
    import jax

    transformation = play.reduce()
    call = play.compiled(lambda tree: transformation.update(tree, transformation.init(tree))[0])
    return numbers(jax.block_until_ready(call(tree)))


def by_hand(play: Play) -> Any:
    """kvstore.jax.pushpull between a compiled gradient and a compiled update."""
    import jax
    import optax

    from kvstore.jax import pushpull

    chain = optax.adam(0.05)
    params = play.share(first(play), "weights/")
    state = chain.init(params)
    gradient = jax.jit(lambda params, step: play.gradient(square, params, step))

    @jax.jit
    def update(params: Any, state: Any, gradient: Any) -> Any:
        updates, state = chain.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    for step in range(4):
        found = gradient(params, step)
        if play.store is not None:
            found = pushpull(play.store, found, average=True)
        params, state = update(params, state, found)
    return numbers(params)


def scanned(play: Play) -> Any:
    """All steps in one lax.scan, with the exchange in it."""
    import jax
    import optax

    chain = optax.chain(play.reduce(), optax.sgd(0.2, 0.9))
    params = play.share(first(play))

    def one(carry: Any, step: Any) -> Any:
        params, state = carry
        updates, state = chain.update(play.gradient(square, params, step), state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(one, (params, chain.init(params)), jax.numpy.arange(4))
    return numbers(params)


def donated(play: Play) -> Any:
    """The step is compiled, and its buffers are donated."""
    import jax
    import optax

    chain = optax.chain(play.reduce(), optax.clip_by_global_norm(0.1), optax.sgd(0.2, 0.9))
    params = play.share(first(play))
    state = chain.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def one(params: Any, state: Any, step: Any) -> Any:
        updates, state = chain.update(play.gradient(square, params, step), state, params)
        return optax.apply_updates(params, updates), state

    for step in range(4):
        params, state = one(params, state, step)
    return numbers(params)


def two_models(play: Play) -> Any:
    import optax

    rate = optax.sgd(0.2)
    chains = [optax.chain(play.reduce(prefix=f"{name}/"), rate) for name in "ab"]
    found = []
    for number, chain in enumerate(chains):
        found.append(_trained_by(play, chain, f"{number}/"))
    return numbers(*found)


def _trained_by(play: Play, chain: Any, prefix: str) -> Any:
    import optax

    params = play.share(first(play), prefix)
    state = chain.init(params)

    def one(params: Any, state: Any, step: Any) -> Any:
        updates, state = chain.update(play.gradient(square, params, step), state, params)
        return optax.apply_updates(params, updates), state

    call = play.compiled(one)
    for step in range(3):
        params, state = call(params, state, step)
    return params


def in_the_store(play: Play) -> Any:
    """The store has the optimizer: pushpull returns weights."""
    import jax
    import optax

    from kvstore.jax import pushpull

    params = play.share(first(play))
    if play.store is None:
        return numbers(train(play, optax.sgd(0.2), params=params))
    play.store.set_optimizer(kv.optimizer.SGD(learning_rate=0.2, rescale_grad=1 / play.size))
    call = play.compiled(lambda params, step: pushpull(play.store, play.gradient(square, params, step)))
    for step in range(4):
        params = jax.block_until_ready(call(params, step))
    return numbers(params)


def complex_numbers(play: Play) -> Any:
    import jax
    import jax.numpy as jnp

    transformation = play.reduce()
    tree = {"c": jnp.ones(3, jnp.complex64)}
    call = play.compiled(lambda tree: transformation.update(tree, transformation.init(tree))[0])
    return numbers(jnp.abs(jax.block_until_ready(call(tree))["c"]))


def trees_differ(play: Play) -> Any:
    """A gradient has another shape on one worker."""
    import jax.numpy as jnp

    return _reduced(play, {"w": jnp.ones(3 + play.rank)})


def skipped_by_all(play: Play) -> Any:
    import optax

    chain = optax.chain(play.reduce(), optax.sgd(0.2))
    return numbers(train(play, chain, skips=lambda step: step == 1))


def skipped_by_one(play: Play) -> Any:
    """One worker leaves out a step."""
    import optax

    chain = optax.chain(play.reduce(), optax.sgd(0.2))
    return numbers(train(play, chain, skips=lambda step: step == 1 and play.rank == LAST))


PROGRAMS = {
    program.__name__: program
    for program in (
        sgd, adamw_and_schedule, clip_after, clip_before, multi_steps, multi_steps_around, not_finite_on_one,
        not_finite_on_one_around, not_finite_on_all_around, masked, masked_exchange, bfloat16, float16_means,
        integer_means, by_hand, scanned, donated, two_models, in_the_store, complex_numbers, trees_differ,
        skipped_by_all, skipped_by_one,
    )
}  # fmt: skip


def play_all(way: dict[str, Any], size: int, folder: str) -> str:
    """Play the programs that the test names, until it says that there are no more.

    What JAX compiles is kept for the workers of other ways, for that is most of what a program takes.
    """
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(folder).parent / "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    while (name := jobs.hear(3600)) != "end":
        jobs.tell(f"{name} " + json.dumps(_attempt(name, way, size)))
    return "ended"


def _attempt(name: str, way: dict[str, Any], size: int) -> Any:
    found: dict[str, Any] = {}
    try:
        if way["kind"] == "alone":
            return {"found": PROGRAMS[name](Play(way, size, None))}
        with kv.create(way["store"], group=name) as store:
            try:
                return {"found": PROGRAMS[name](Play(way, size, store))}
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
    except Exception as error:
        found = found or {"error": f"{type(error).__name__}: {error}"}
    return found
