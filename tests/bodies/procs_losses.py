"""The processes of jobs that lose a worker, with any store."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
from jobs import hear, tell

import kvstore as kv

F = np.float32


def leaves_after_a_loss(name: str, optimizer: bool) -> list[float]:
    """Worker 2 dies in a round without worker 1; the round fails, also when worker 1 leaves."""
    store = kv.create(name)
    store.init("w", np.zeros(50, F))
    if optimizer:
        store.set_optimizer(kv.optimizer.SGD(learning_rate=1))
    store.pushpull("w", np.ones(50, F), out=(out := np.empty(50, F)))
    first = float(out[0])
    if store.rank != 1:
        store.push("w", np.ones(50, F))
    tell("pushed")
    if store.rank == 2:
        time.sleep(100)
    hear()
    with pytest.raises(kv.PeerLostError):
        store.barrier()
    store.pull("w", out=out)
    seen = [float(out[0]) - first]
    if store.rank == 0:
        tell("told")
        hear()
        store.pull("w", out=out)
        seen.append(float(out[0]) - first)
    store.close()
    return seen


def rests_when_another_is_lost() -> list[float]:
    """Worker 0 joins after two rounds; worker 1 is lost after seven, and worker 0 reads these."""
    store, keys = kv.create("dist_sync", slice_bytes=1 << 12), ["a", "b"]
    outs = [np.empty(3_000, F) for _ in keys]
    store.init(keys, [np.zeros(3_000, F) for _ in keys])
    for t in range(2 if store.rank == 0 else 7):
        store.pushpull(keys, [np.full(3_000, t, F) for _ in keys], out=outs)
    if store.rank == 0:
        store.join()
    tell("joined")
    hear()
    while not store._backend.client.member.is_broken:
        time.sleep(0.01)
        with contextlib.suppress(kv.PeerLostError):
            store.pull(keys, out=outs)
    store.pull(keys, out=outs)
    store.pull("a", out=outs[0])
    store.close()
    return sorted({float(x) for out in outs for x in out})
