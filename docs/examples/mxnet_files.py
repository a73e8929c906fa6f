"""Continue the training of an MXNet program on kvstore, from its files of parameters and of trainer states.

    python mxnet_files.py

MXNet's `.states` file is a pickle, which MXNet must read; kvstore reads none. The program trains with
MXNet's store, writes both files of MXNet, converts the states, and continues with a store of kvstore. The
weights are those of a run that was not interrupted, within the rounding of float32:

    the weights of both runs differ by 2.98e-08
"""

import argparse
import tempfile

import kvstore as kv
import kvstore.mxnet as kv_mxnet  # before mxnet: it puts names of NumPy back that MXNet 1.9.1 needs

# isort: split
import mxnet as mx
from mxnet import autograd, gluon


def arrays_of(state):
    """Return a state of MXNet as NumPy arrays, nested as it is."""
    if isinstance(state, (tuple, list)):
        return tuple(arrays_of(part) for part in state)
    return None if state is None else state.asnumpy()


def convert(states, target, optimizer):
    """Write the content of MXNet's file of states to a file that `load_optimizer_states` reads.

    `optimizer` is kvstore's optimizer with the settings of MXNet's. The order of the arrays is the same for
    float32 weights and sgd, nag, adam, adamax, ftml, ftrl, signum and lamb.
    """
    theirs = mx.optimizer.get_updater(mx.optimizer.SGD())
    with open(states, "rb") as file:
        theirs.set_states(file.read())  # a pickle: it can execute code, so read only files of your own
    ours = kv.optimizer.get_updater(optimizer)
    ours.states = {key: arrays_of(state) for key, state in theirs.states.items()}
    counts = theirs.optimizer._index_update_count
    ours.restore_counts((dict(counts), theirs.optimizer.num_update))
    ours.save(target, dump_optimizer=True)


def network():
    """Return a network with random weights."""
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(16, activation="relu", in_units=8), gluon.nn.Dense(1, in_units=16))
    net.initialize(mx.init.Xavier())
    return net


def train(net, trainer, steps):
    """Train on the points of these steps."""
    for step in steps:
        mx.random.seed(step)
        x = mx.nd.random.normal(shape=(64, 8))
        with autograd.record():
            loss = ((net(x) - x.sum(axis=1, keepdims=True)) ** 2).mean()
        loss.backward()
        trainer.step(1)


def main():
    """Train by halves and as a whole, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="of each half")
    steps = parser.parse_args().steps
    settings = {"learning_rate": 0.01}
    with tempfile.TemporaryDirectory() as folder, kv_mxnet.create("local") as store:
        net = network()
        trainer = gluon.Trainer(net.collect_params(), "adam", settings)
        train(net, trainer, range(steps))
        net.save_parameters(f"{folder}/net.params")
        trainer.save_states(f"{folder}/trainer.states")
        train(net, trainer, range(steps, 2 * steps))

        again = network()
        again.load_parameters(f"{folder}/net.params")  # Gluon reads its parameters itself
        adam = kv.optimizer.Adam(**settings, lazy_update=True)
        convert(f"{folder}/trainer.states", f"{folder}/kvstore.states", adam)
        trainer = gluon.Trainer(
            again.collect_params(), "adam", settings, kvstore=store, update_on_kvstore=True
        )
        trainer.load_states(f"{folder}/kvstore.states")
        train(again, trainer, range(steps, 2 * steps))
    pairs = zip(net.collect_params().values(), again.collect_params().values(), strict=True)
    difference = max(float(abs(one.data() - other.data()).max().asscalar()) for one, other in pairs)
    print(f"the weights of both runs differ by {difference:.2e}")


if __name__ == "__main__":
    main()
