"""Data-parallel training in plain NumPy: each worker has a part of the data, the store has the weights.

    kvstore run -n 4 numpy_workers.py
    kvstore run -n 4 -s 2 numpy_workers.py --store dist_sync

A network of two layers learns whether a point lies inside a circle. In each step all workers push the
gradients of their own points; the store sums them, makes one step of SGD, and gives the new weights back.
At the end each worker prints its loss before and after, and a checksum of the weights, which is the same on
all:

    [0] worker 0 of 4: loss 0.73 -> 0.04, weights d78b9e72
"""

import argparse
import zlib

import numpy as np

import kvstore as kv


def points(worker, count):
    """Make the points of one worker, and whether they lie inside the circle."""
    rng = np.random.default_rng(worker)
    x = rng.uniform(-1, 1, (count, 2)).astype(np.float32)
    inside = (x**2).sum(axis=1, keepdims=True) < 0.6
    return x, inside.astype(np.float32)


def first_weights(width):
    """Draw the weights to begin with; the store takes those of worker 0."""
    rng = np.random.default_rng(0)
    return {
        "hidden/w": rng.normal(0, 1, (2, width)).astype(np.float32),
        "hidden/b": rng.normal(0, 1, width).astype(np.float32),
        "out/w": rng.normal(0, width**-0.5, (width, 1)).astype(np.float32),
        "out/b": np.zeros(1, np.float32),
    }


def loss_and_gradients(weights, x, y):
    """Compute the cross entropy of all points, and its gradients, by hand."""
    hidden = np.maximum(x @ weights["hidden/w"] + weights["hidden/b"], 0)
    p = 1 / (1 + np.exp(-(hidden @ weights["out/w"] + weights["out/b"])))
    loss = -np.mean(y * np.log(p + 1e-7) + (1 - y) * np.log(1 - p + 1e-7))
    error = (p - y) / len(x)
    back = (error @ weights["out/w"].T) * (hidden > 0)
    return loss, {
        "hidden/w": x.T @ back,
        "hidden/b": back.sum(axis=0),
        "out/w": hidden.T @ error,
        "out/b": error.sum(axis=0),
    }


def train(store, options):
    """Train on this worker's points, and print the result."""
    x, y = points(store.rank, options.points)
    weights = first_weights(options.width)
    names = list(weights)
    store.broadcast(names, list(weights.values()), out=list(weights.values()))
    # Gradients of all workers are summed: rescale_grad makes their mean of the sum.
    rule = kv.optimizer.SGD(learning_rate=options.rate, momentum=0.9, rescale_grad=1 / store.num_workers)
    store.set_optimizer(rule)
    before, _ = loss_and_gradients(weights, x, y)
    for _ in range(options.steps):
        _, gradients = loss_and_gradients(weights, x, y)
        # All keys in one call: the sums, the step, and the new weights back into our arrays.
        store.pushpull(names, [gradients[name] for name in names], out=[weights[name] for name in names])
    after, _ = loss_and_gradients(weights, x, y)
    checksum = zlib.crc32(b"".join(weights[name].tobytes() for name in names))
    name = f"worker {store.rank} of {store.num_workers}"
    print(f"{name}: loss {before:.2f} -> {after:.2f}, weights {checksum:08x}")


def main():
    """Read the options, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", default="shared", help="with servers (-s): dist_sync")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--points", type=int, default=20_000, help="for each worker")
    parser.add_argument("--width", type=int, default=32, help="of the hidden layer")
    parser.add_argument("--rate", type=float, default=0.3)
    options = parser.parse_args()
    with kv.create(options.store) as store:
        train(store, options)


if __name__ == "__main__":
    main()
