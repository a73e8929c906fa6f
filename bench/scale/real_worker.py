"""A worker of a real job that `real` starts: it measures calls in a loop.

Rank 0 also reads the processor time of the other processes of the job, which have the same parent.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import kvstore as kv


def role_of(pid: int) -> str:
    """Return the role of a process of the job, and its rank."""
    told = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = dict(one.partition(b"=")[::2] for one in told if one)
    return found.get(b"KVSTORE_ROLE", b"worker").decode()


def family() -> dict[str, list[int]]:
    """Return the processes of the job by role."""
    parent, found = os.getppid(), dict[str, list[int]]()
    for task in Path(f"/proc/{parent}/task").iterdir():
        for child in (task / "children").read_text().split():
            found.setdefault(role_of(int(child)), []).append(int(child))
    return found


def ran(pid: int) -> float:
    """Return the processor seconds of all threads of a process."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total * 1e-9


def _open(mode: str) -> kv.KVStore:
    return kv.create("shared") if mode == "shared" else kv.create(f"dist_{mode}", same_host_shm=False)


class Loop:
    """The repeated call of this worker."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.store = _open(config["mode"])
        if config["codec"]:
            self.store.set_gradient_compression({"type": config["codec"], "threshold": 0.5})
        rng = np.random.default_rng(self.store.rank)
        self.values = [(0.01 * rng.standard_normal(n)).astype(np.float32) for n in config["sizes"]]
        self.keys = list(range(len(self.values)))
        self.outs = [np.empty_like(one) for one in self.values]
        self.swept = np.ones(config["sweep"] // 8) if config["sweep"] else None
        self.aside = self.waited = 0.0  # seconds of a core, and of the clock, outside the calls

    def init(self) -> float:
        """Return the seconds of the init."""
        began = time.perf_counter()
        if self.keys:
            self.store.init(self.keys, self.values)
        if self.config["mode"] == "shared":
            self.values = self.outs = [self.store.empty(key) for key in self.keys]
        return time.perf_counter() - began

    def call(self) -> Callable[[], Any]:
        """Return the call to repeat."""
        store, keys = self.store, self.keys
        ways: dict[str, Callable[[], Any]] = {
            "pushpull": partial(store.pushpull, keys, self.values, out=self.outs),
            "push": partial(store.push, keys, self.values),
            "pull": partial(store.pull, keys, out=self.outs),
            "barrier": store.barrier,
            "idle": partial(time.sleep, 0.25),
        }
        return ways[self.config["way"]]

    def between(self) -> None:
        """Sweep memory, so that no data of the store is in a cache, and sleep."""
        began, ran = time.perf_counter(), time.thread_time()
        if self.swept is not None:
            self.swept += 1.0
        if self.config["sleep"]:
            time.sleep(self.config["sleep"])
        self.aside += time.thread_time() - ran
        self.waited += time.perf_counter() - began

    def run(self, calls: int) -> None:
        """Make the given number of calls."""
        call = self.call()
        for _ in range(calls):
            self.between()
            call()


def measure(loop: Loop) -> dict[str, Any]:
    """Warm up, then measure all calls; workers begin and end together."""
    store, config = loop.store, loop.config
    took = loop.init()
    store.barrier()
    loop.run(config["warm"])
    store.barrier()
    others = family() if store.rank == 0 else {}
    before = {role: [ran(pid) for pid in pids] for role, pids in others.items()}
    counted, loop.aside, loop.waited = store.statistics(), 0.0, 0.0
    store.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    loop.run(config["calls"])
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    store.barrier()
    after = {role: [ran(pid) for pid in pids] for role, pids in others.items()}
    now = store.statistics()
    seconds = {
        role: [b - a for a, b in zip(before[role], after[role], strict=True)]
        for role in others
        if role != "worker"
    }
    return {
        "init": took, "wall": wall, "between": loop.waited, "cpu": cpu - loop.aside, "others": seconds,
        "sent": sum(now.sent) - sum(counted.sent), "received": sum(now.received) - sum(counted.received),
        "rounds": now.rounds - counted.rounds,
    }  # fmt: skip


def main(config: dict[str, Any], folder: str) -> None:
    """Measure, and write the figures."""
    loop = Loop(config)
    found = measure(loop)
    loop.store.barrier()
    Path(folder, f"{loop.store.rank}.json").write_text(json.dumps(found))
    loop.store.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
