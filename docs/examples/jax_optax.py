"""Data-parallel training with JAX and optax: a transformation of gradients averages them over the workers.

    kvstore run -n 4 jax_optax.py

Gradient and step are compiled by jax.jit; the store is called between them, on the host. (Where all of a
step runs on the host, `optax.chain(all_reduce(store), optax.adam(0.01))` is shorter.) Each worker has
points of its own, and prints its loss before and after and a checksum of the weights, which is the same on
all:

    [0] worker 0 of 4: loss 0.86 -> 0.02, weights 1f07c0f3
"""

import argparse
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kvstore as kv
from kvstore.jax import all_reduce, broadcast


def first_weights(seed, width):
    """Draw the weights to begin with; the store takes those of worker 0."""
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "hidden": {"w": jax.random.normal(first, (8, width)) / 8**0.5, "b": jnp.zeros(width)},
        "out": {"w": jax.random.normal(second, (width,)) / width**0.5, "b": jnp.zeros(())},
    }


def loss(weights, x, y):
    """Compute the cross entropy of all points."""
    hidden = jax.nn.relu(x @ weights["hidden"]["w"] + weights["hidden"]["b"])
    return optax.sigmoid_binary_cross_entropy(hidden @ weights["out"]["w"] + weights["out"]["b"], y).mean()


def train(store, options):
    """Train on this worker's points, and print the result."""
    x = jax.random.normal(jax.random.key(1 + store.rank), (options.points, 8))
    y = (x.sum(axis=1) > 0).astype(jnp.float32)
    weights = broadcast(store, first_weights(store.rank, options.width))
    average, adam = all_reduce(store), optax.adam(options.rate)
    averaging = average.init(weights)
    state = adam.init(weights)
    gradient_of = jax.jit(jax.value_and_grad(loss))

    @jax.jit
    def step(gradient, state, weights):
        updates, state = adam.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state

    before = loss(weights, x, y)
    for _ in range(options.steps):
        _, gradient = gradient_of(weights, x, y)
        gradient, averaging = average.update(gradient, averaging)  # the mean over all workers
        weights, state = step(gradient, state, weights)
    after = loss(weights, x, y)
    checksum = zlib.crc32(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(weights)))
    name = f"worker {store.rank} of {store.num_workers}"
    print(f"{name}: loss {before:.2f} -> {after:.2f}, weights {checksum:08x}")


def main():
    """Read the options, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", default="shared", help="with servers (-s): dist_sync")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--points", type=int, default=10_000, help="for each worker")
    parser.add_argument("--width", type=int, default=64, help="of the hidden layer")
    parser.add_argument("--rate", type=float, default=0.01)
    options = parser.parse_args()
    with kv.create(options.store) as store:
        train(store, options)


if __name__ == "__main__":
    main()
