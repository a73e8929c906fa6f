"""The workers of a long job: they repeat the same two rounds, and write the times to a file."""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from .cells import Plan

_SIZES = {"small": 1_000, "large": 250_000}  # float32: 4 KB and 1 MB
_REST = 0.01  # seconds between rounds, so that two busy cores have time for other processes
WINDOWS = 12  # in which a median is taken


def soaks(plan: Plan, store: Any, slot: int) -> str:
    """Run as a worker until the time is over on all workers."""
    store.init([*_SIZES, "over"], [*(np.zeros(size, np.float32) for size in _SIZES.values()), np.zeros(1)])
    _loop(plan, store, slot, _any if plan.store != "dist_async" else _own)
    store.close()
    return "done"


def soaks_in_threads(plan: Plan, store: Any) -> None:
    """Run the workers as threads of one process."""
    store.init(list(_SIZES), [np.zeros(size, np.float32) for size in _SIZES.values()])
    running = [threading.Thread(target=_loop, args=(plan, store, slot, _own)) for slot in range(plan.workers)]
    for one in running:
        one.start()
    for one in running:
        one.join()


def _any(store: Any, over: bool) -> bool:
    """Return whether the time is over on any worker: all end after the same round."""
    value = np.array([float(over)])
    store.pushpull("over", value)
    return bool(value[0] > 0)


def _own(store: Any, over: bool) -> bool:
    return over


def _loop(plan: Plan, store: Any, slot: int, ends: Any) -> None:
    values = [np.ones(size, np.float32) for size in _SIZES.values()]
    start = time.monotonic()
    window, times = 0, list[float]()
    with (Path(plan.folder) / f"{slot}.latencies").open("w", buffering=1) as file:
        while not ends(store, time.monotonic() - start >= plan.seconds):
            begun = time.monotonic()
            store.pushpull(list(_SIZES), values)
            times.append(time.monotonic() - begun)
            values[0][:] = values[1][:] = 1
            if begun - start >= (window + 1) * plan.seconds / WINDOWS:
                file.write(f"{begun - start} {statistics.median(times)}\n")
                window, times = window + 1, []
            time.sleep(_REST)
