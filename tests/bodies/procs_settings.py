"""Bodies of workers whose optimizers change, or differ."""

from __future__ import annotations

from typing import Any

import numpy as np
from tested_store import create

import kvstore as kv

KEYS = ["a", "b"]
STEPS = 6


def reference(size: int, rates: list[float]) -> Any:
    """Return the weight of an updater without a store, whose object has one of the rates in each step."""
    optimizer = kv.optimizer.SGD(momentum=0.5)
    update, weight = kv.optimizer.get_updater(optimizer), np.zeros(3)
    for rate in rates:
        optimizer.learning_rate = rate
        update("a", np.full(3, size * (size + 1) / 2), weight)
    return weight


def changed(who: str) -> list[float]:
    """Return the weights where all workers, or the last one alone, change their object before each step."""
    with create() as store:
        store.init(KEYS, [np.zeros(3), np.zeros(3)])
        optimizer = kv.optimizer.SGD(learning_rate=1, momentum=0.5)
        store.set_optimizer(optimizer)
        store.barrier()  # before it, the last worker's change could be there in the round of another
        rates = [2.0**-step for step in range(STEPS)]
        weights = {key: np.empty(3) for key in KEYS}
        for rate in rates:
            if who == "all" or store.rank == store.num_workers - 1:
                optimizer.learning_rate = rate
            for key in KEYS:
                store.push(key, np.full(3, store.rank + 1.0))
            store.pull(KEYS, out=list(weights.values()))
            store.barrier()
        for weight in weights.values():
            np.testing.assert_allclose(weight, reference(store.num_workers, rates))
        return [float(weight[0]) for weight in weights.values()]


def differ(second: dict[str, Any], rule: str = "sgd") -> str:
    """Return the error of the second worker, whose optimizer is another one."""
    with create() as store:
        first = {"learning_rate": 0.1, "lr_mult": {"w": 2}, "lr_scheduler": kv.lr_scheduler.PolyScheduler(9)}
        text = ""
        if store.rank == 0:
            store.set_optimizer(kv.optimizer.SGD(**first))
        store.barrier()
        if store.rank == 1:
            text = _error(store, kv.optimizer.create(rule, **({**first, **second})))
            store.set_optimizer(kv.optimizer.SGD(**first))  # the store is as it was
        if store.rank == 0:
            store.update_optimizer(wd=0.5)
        store.barrier()
        return text


def _error(store: Any, optimizer: Any) -> str:
    try:
        store.set_optimizer(optimizer)
    except kv.ConfigError as error:
        return str(error)
    raise AssertionError("two optimizers that differ were taken")
