"""What workers do in the tests of counters and events."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
from jobs import hear, tell
from tested_store import create

import kvstore as kv
from kvstore.observe import events
from kvstore.observe.native import _observe as native

F = np.float32
SIZES = {"small": 50, "edge": 16384, "large": 300_001, "odd": 7}


def _full(key: str, value: float) -> Any:
    return np.full(SIZES[key], value, F)


def opened(**options: Any) -> Any:
    store = create(**options)
    store._counters.take_times()
    store.init(list(SIZES), [_full(key, 0) for key in SIZES])
    return store


def told(store: Any) -> dict[str, Any]:
    """Counters and events of a worker, and how its keys are called."""
    return {
        "numbers": store._counters.read(),
        "events": events.recorded(),
        "names": store._backend.names(),
        "thread": threading.get_native_id(),
    }


def waits(key: str) -> dict[str, Any]:
    """Worker 0 waits for worker 1, which pushes when the test says so."""
    native.record_events(1 << 12)
    store = opened()
    store.pushpull(key, _full(key, 1))
    store.barrier()
    before = store._counters.read()
    tell(f"pid {os.getpid()}")
    if store.rank == 1:
        hear()
    store.pushpull(key, _full(key, 1))
    store.barrier()
    found = told(store) | {"before": before}
    store.close()
    return found


def traffic() -> dict[str, Any]:
    """Calls of every kind, while times are taken and events recorded."""
    native.record_events(1 << 14)
    store = opened()
    sums(store)
    store.set_optimizer(kv.optimizer.SGD(learning_rate=0.1, momentum=0.9))
    sums(store)
    store.set_updater(lambda key, merged, stored: stored.__iadd__(merged))
    sums(store)
    store.barrier()
    found = told(store)
    store.close()
    return found


def sums(store: Any) -> None:
    """One of each."""
    outs = {key: _full(key, 0) for key in SIZES}
    for key in SIZES:
        store.pushpull(key, _full(key, 1), out=outs[key])
        store.push(key, [_full(key, 1), _full(key, 2)])
        store.pull(key, out=outs[key])
    store.pushpull(list(SIZES), [_full(key, 1) for key in SIZES])
    home = store.attach("large", _full("large", 1))
    store.pushpull("large", home)
    works = [store.pushpull(key, _full(key, 1), out=outs[key], async_op=True) for key in SIZES]
    for work in works:
        work.wait()
    store.barrier()


def nested() -> dict[str, Any]:
    """An updater that pulls another key."""
    native.record_events(1 << 12)
    store = opened()
    out = _full("edge", 0)

    def update(key: Any, merged: Any, stored: Any) -> None:
        store.pull("edge", out=out)
        stored += merged

    store.set_updater(update)
    for _ in range(3):
        store.pushpull("large", _full("large", 1))
    store.barrier()
    found = told(store)
    store.close()
    return found


def packed() -> dict[str, Any]:
    """Pushes that are packed."""
    native.record_events(1 << 12)
    store = opened()
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    store.pushpull("large", _full("large", 1))
    store.barrier()
    found = told(store)
    store.close()
    return found


def exact(timed: bool) -> dict[str, Any]:
    """Known traffic, and nothing else."""
    store = create()
    if timed:
        store._counters.take_times()
    store.init(["a", "b"], [np.zeros(1000, F), np.zeros(100_000, F)])
    store.init("t", kv.RowSparseArray(np.ones((2, 4), F), [0, 1], (100, 4)))
    a, b = np.ones(1000, F), np.ones(100_000, F)
    for _ in range(10):
        store.pushpull("a", a, out=np.empty_like(a))
    for _ in range(3):
        store.push("b", [b, b])
        store.pull("b", out=np.empty_like(b))
    store.pushpull(["a", "b"], [a.copy(), b.copy()])
    store.pull("a", out=np.empty(1000, np.float64))
    store.push("t", kv.RowSparseArray(np.ones((3, 4), F), [3, 4, 5 + store.rank], (100, 4)))
    rows = kv.RowSparseArray(np.zeros((0, 4), F), np.zeros(0, np.int64), (100, 4))
    store.row_sparse_pull("t", out=rows, row_ids=np.array([0, 3, 4]))
    store.barrier()
    numbers, statistics = store._counters.read(), store.statistics()._asdict()
    store.close()
    return {"numbers": numbers, "statistics": statistics}


def loses(on_peer_loss: str) -> dict[str, Any]:
    """Worker 1 ends; worker 0 continues, or gets an error."""
    native.record_events(1 << 12)
    store = opened(on_peer_loss=on_peer_loss)
    store.pushpull("small", _full("small", 1))
    store.barrier()
    if store.rank == 1:
        os._exit(0)
    tell("alone")
    try:
        for _ in range(3):
            store.pushpull("small", _full("small", 1))
    except kv.PeerLostError:
        tell("told")
    found = told(store)
    store.close()
    return found


def comes_back() -> dict[str, Any]:
    """Worker 1 ends, and another process takes its rank."""
    native.record_events(1 << 12)
    store = opened(on_peer_loss="continue")
    value = _full("small", 1)
    while value[0] != 2:  # both are in
        value[...] = 1
        store.pushpull("small", value)
    if store.rank == 1 and "KVSTORE_TEST_AGAIN" not in os.environ:
        os._exit(0)
    alone = False
    while store.rank == 0 and not (alone and value[0] == 2):
        alone = alone or value[0] == 1
        value[...] = 1
        store.pushpull("small", value)
        if alone:
            tell("alone")
            time.sleep(0.002)  # else the ring has the last calls only
    found = told(store)
    store.close()
    return found
