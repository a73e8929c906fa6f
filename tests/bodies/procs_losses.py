"""What the processes of a job do when one is lost, whatever store they have."""

from __future__ import annotations

import time

import numpy as np
import pytest
from jobs import hear, tell

import kvstore as kv

F = np.float32


def leaves_after_a_loss(name: str, optimizer: bool) -> list[float]:
    """Worker 2 dies in a round that worker 1 is not in; it comes to nothing, also when worker 1 leaves."""
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
