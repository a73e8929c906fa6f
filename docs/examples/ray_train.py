"""Training on Ray: workers, servers and scheduler are actors, and gradients go past Ray's object store.

    python ray_train.py --workers 4 --servers 2

On a cluster: `ray job submit --working-dir . -- python ray_train.py --address auto`. Each worker fits a
line to points of its own; `run` returns the results of the function by rank. The program prints

    worker 0 of 4: loss 6.04 -> 0.01, weights 71cf0987
"""

import argparse
import zlib

import numpy as np
import ray

import kvstore as kv
from kvstore.ray import Job


def train(steps, points, rate):
    """Run in each worker: the store finds its servers by itself."""
    with kv.create("dist_sync") as store:
        rng = np.random.default_rng(store.rank)
        x = rng.normal(size=(points, 16)).astype(np.float32)
        y = x @ np.linspace(-1, 1, 16, dtype=np.float32) + rng.normal(0, 0.1, points).astype(np.float32)
        weights = np.zeros(16, np.float32)
        store.init("w", weights)
        # Gradients of all workers are summed: rescale_grad makes their mean of the sum.
        store.set_optimizer(kv.optimizer.SGD(learning_rate=rate, rescale_grad=1 / store.num_workers))
        losses = []
        for _ in range(steps):
            error = x @ weights - y
            losses.append(float(np.mean(error**2)))
            store.pushpull("w", 2 * x.T @ error / points, out=weights)
        return store.rank, store.num_workers, losses[0], losses[-1], zlib.crc32(weights)


def main():
    """Read the options, run the job, and print what the workers returned."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", help="of a cluster that runs; without it one is started here")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--points", type=int, default=100_000, help="for each worker")
    parser.add_argument("--rate", type=float, default=0.1)
    options = parser.parse_args()
    if options.address:
        ray.init(address=options.address)
    else:
        ray.init(num_cpus=options.workers + options.servers, include_dashboard=False)
    # A worker that dies is not started again here: docs/how-to/ray.md says how it could be.
    job = Job(num_workers=options.workers, num_servers=options.servers)
    try:
        results = job.run(train, options.steps, options.points, options.rate, timeout=3600)
    finally:
        ray.shutdown()
    for rank, size, before, after, checksum in results:
        print(f"worker {rank} of {size}: loss {before:.2f} -> {after:.2f}, weights {checksum:08x}")


if __name__ == "__main__":
    main()
