"""Gluon's Trainer of MXNet 1.9.1 on a store of kvstore, in several processes.

    kvstore run -n 4 gluon_trainer.py
    kvstore run -n 4 -s 2 gluon_trainer.py --store dist_sync

But for the store it is a training loop as MXNet's users have it. Each worker has points of its own, and
prints its loss before and after and a checksum of the weights, which is the same on all:

    [0] worker 0 of 4: loss 0.74 -> 0.02, weights f286ce72
"""

import argparse
import zlib

import kvstore.mxnet as kv_mxnet  # before mxnet: it puts names of NumPy back that MXNet 1.9.1 needs

# isort: split
import mxnet as mx
from mxnet import autograd, gluon


def train(store, options):
    """Train on this worker's points, and print the result."""
    mx.random.seed(0)  # the same weights for all: the Trainer distributes those of worker 0 in its first step
    net = gluon.nn.Sequential()
    net.add(
        gluon.nn.Dense(options.width, activation="relu", in_units=8),
        gluon.nn.Dense(1, in_units=options.width),
    )
    net.initialize(mx.init.Xavier())
    mx.random.seed(1 + store.rank)
    x = mx.nd.random.normal(shape=(options.points, 8))
    y = x.sum(axis=1, keepdims=True) > 0
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": options.rate}, kvstore=store)
    cross_entropy = gluon.loss.SigmoidBinaryCrossEntropyLoss()
    losses = []
    for _ in range(options.steps):
        with autograd.record():
            loss = cross_entropy(net(x), y).mean()
        loss.backward()
        trainer.step(store.num_workers)  # the gradients of all workers are summed, and divided by this
        losses.append(loss.asscalar())
    arrays = [parameter.data().asnumpy() for parameter in net.collect_params().values()]
    checksum = zlib.crc32(b"".join(array.tobytes() for array in arrays))
    name = f"worker {store.rank} of {store.num_workers}"
    print(f"{name}: loss {losses[0]:.2f} -> {losses[-1]:.2f}, weights {checksum:08x}")


def main():
    """Read the options, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", default="shared", help="with servers (-s): dist_sync")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--points", type=int, default=10_000, help="for each worker")
    parser.add_argument("--width", type=int, default=64, help="of the hidden layer")
    parser.add_argument("--rate", type=float, default=0.01)
    options = parser.parse_args()
    with kv_mxnet.create(options.store) as store:
        train(store, options)


if __name__ == "__main__":
    main()
