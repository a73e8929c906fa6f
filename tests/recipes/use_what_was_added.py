"""Uses the classes that the recipes add, in two processes; test_recipes.py runs it with that package."""

import sys

import numpy as np

import kvstore as kv


def work(package: str) -> None:
    assert kv.__file__.startswith(package), kv.__file__
    out, sums = np.empty(1000, np.float32), np.empty(5, np.uint32)
    with kv.create("shared") as store:
        store.init(["n", "w"], [np.zeros(5, np.uint32), np.zeros(1000, np.float32)])
        store.pushpull("n", np.full(5, 2**31 + 1, np.uint32), out=sums)
        assert sums.tolist() == [2] * 5, "sums wrap"
        store.set_gradient_compression({"type": "8bit", "step": 0.5})
        store.pushpull("w", np.full(1000, 0.6, np.float32), out=out)
        assert (out == 1.0).all(), "one step of each worker"
        store.set_optimizer(kv.optimizer.create("lion", learning_rate=0.5))
        store.pushpull("w", np.full(1000, 0.6, np.float32), out=out)
        assert (out == 0.5).all(), "a rate against the sign"


if __name__ == "__main__":
    kv.spawn(work, 2, args=(sys.argv[1],))
