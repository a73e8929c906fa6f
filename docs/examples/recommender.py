"""A recommender with a table of ten million rows on servers, which resumes from its checkpoints.

    kvstore run -n 4 -s 2 recommender.py --checkpoints /data/run-1
    kvstore run -n 4 -s 2 recommender.py --checkpoints /data/run-1     # the same again, after a crash

A sample is a basket of items and whether it was bought. Few items are in most baskets: ids follow a power
law. A batch touches a few thousand rows: these are pulled, and only their gradients are pushed. Servers
keep the rows that a worker has touched, and so do checkpoints: both are much smaller than the table.

A checkpoint is a folder, which gets its name when all of it is written; the newest one counts. Batches
follow from step and rank, so that a run that was killed ends with the very weights of one that was not.
Worker 0 prints where it begins, each checkpoint, and the loss; at the end all print a checksum of the rows
of popular items:

    [0] begins at step 0 with 4 workers and a table of 10,000,000 x 64
    [0] step 100: loss 0.21, checkpoint step-00000100
    [0] worker 0: step 1000, popular rows 2df50d7e
"""

import argparse
import shutil
import zlib
from pathlib import Path

import numpy as np

import kvstore as kv


def batch(step, rank, options):
    """Make one batch: item ids, 8 for each sample, and whether a sample was bought."""
    rng = np.random.default_rng([step, rank])
    popularity = (rng.pareto(0.6, (options.batch, 8)) * 50).astype(np.int64)
    ids = popularity * 2654435761 % options.rows  # popular items stand all over the table
    liked = (ids * 2654435761 >> 7) % 2 * 2.0 - 1.0  # what people think of an item: 1 or -1
    return ids, (liked.sum(axis=1) > 0).astype(np.float32)


def gradients(table, head, ids, bought):
    """Compute the loss of a batch, and its gradients for the rows that were pulled and for the head."""
    places = np.searchsorted(table.indices, ids)
    baskets = table.data[places].sum(axis=1)
    p = 1 / (1 + np.exp(-(baskets @ head)[:, 0]))
    loss = -np.mean(bought * np.log(p + 1e-7) + (1 - bought) * np.log(1 - p + 1e-7))
    error = (p - bought)[:, None]
    each = np.repeat(error @ head.T, ids.shape[1], axis=0)  # all items of a basket have its gradient
    rows = kv.RowSparseArray(each.astype(np.float32), ids.reshape(-1), table.shape)  # repeated ids are summed
    return loss, rows, (baskets.T @ error / len(ids)).astype(np.float32)


def newest(folder):
    """Find the last checkpoint that is complete: its step and its folder, or 0 and None."""
    found = sorted(folder.glob("step-*"))
    return (int(found[-1].name.removeprefix("step-")), found[-1]) if found else (0, None)


def save(store, folder, step):
    """Write a checkpoint. It gets its name at the end: a write that was killed leaves no checkpoint."""
    store.barrier()  # all workers have made this step, and none begins the next
    if store.rank == 0:
        part = folder / "part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        store.save(part / "values.safetensors")
        # SGD without momentum has no states. Those of another rule need save_optimizer_states here, and
        # load_optimizer_states in `train`: that file has the states of all rows of a table.
        part.rename(folder / f"step-{step:08}")
        for old in sorted(folder.glob("step-*"))[:-2]:
            shutil.rmtree(old)
    store.barrier()


def train(store, options):
    """Train from the newest checkpoint on."""
    shape, say = (options.rows, options.width), print if store.rank == 0 else lambda *_: None
    first, checkpoint = newest(options.checkpoints)
    head = np.random.default_rng(0).normal(0, options.width**-0.5, (options.width, 1)).astype(np.float32)
    store.init("items", kv.RowSparseArray.zeros(shape))  # no row takes memory yet
    store.init("head", head)
    store.set_optimizer(
        kv.optimizer.SGD(learning_rate=0.02, rescale_grad=1 / store.num_workers, clip_gradient=1)
    )
    if checkpoint and store.rank == 0:
        store.load(checkpoint / "values.safetensors")
    store.barrier()
    say(f"begins at step {first} with {store.num_workers} workers and a table of {shape[0]:,} x {shape[1]}")
    table = kv.RowSparseArray.zeros(shape)
    store.pull("head", out=head)
    for step in range(first + 1, options.steps + 1):
        ids, bought = batch(step, store.rank, options)
        store.row_sparse_pull("items", out=table, row_ids=ids)
        loss, rows, head_gradient = gradients(table, head, ids, bought)
        store.push("items", rows)
        store.pushpull("head", head_gradient, out=head)
        if step % options.every == 0 or step == options.steps:
            save(store, options.checkpoints, step)
            say(f"step {step}: loss {loss:.2f}, checkpoint step-{step:08}")
    store.row_sparse_pull("items", out=table, row_ids=np.arange(1000) * 2654435761 % options.rows)
    last = max(first, options.steps)  # the checkpoint may be of a longer run
    print(f"worker {store.rank}: step {last}, popular rows {zlib.crc32(table.data.tobytes()):08x}")


def main():
    """Read the options, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder; all workers see it")
    parser.add_argument("--every", type=int, default=100, help="steps from checkpoint to checkpoint")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=10_000_000, help="of the table")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4096, help="samples for each worker")
    options = parser.parse_args()
    options.checkpoints.mkdir(parents=True, exist_ok=True)
    with kv.create("dist_sync") as store:
        train(store, options)


if __name__ == "__main__":
    main()
