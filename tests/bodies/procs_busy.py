"""The processes of jobs whose scheduler or server is busy for long, or whose keys are many."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import jobs
import numpy as np
import servers

import kvstore as kv
from kvstore import waiting


def holds(machine: Any) -> None:
    """Have a machine's step take HOLD seconds, once, in a call that lets no other thread of Python run."""
    step, left = machine.step, [float(os.environ["HOLD"])]

    def slow(self: Any, event: Any, now: float) -> Any:
        actions = step(self, event, now)
        message = getattr(event, "message", None)
        if left and os.environ["HOLD_AT"] in (_name(message), _name(getattr(message, "body", None))):
            ctypes.PyDLL(None).usleep(int(1e6 * left.pop()))
        return actions

    machine.step = slow


def _name(message: Any) -> str:
    return type(message).__name__


def scheduler() -> None:
    from kvstore.stores.parameter_server.scheduler.machine import SchedulerMachine

    holds(SchedulerMachine)
    servers.scheduler()


def server() -> None:
    from kvstore.stores.parameter_server.server.machine import ServerMachine

    holds(ServerMachine)
    servers.server()


def waits_for_the_busy() -> list[float]:
    """Use a store, and a second one, while a role is busy."""
    with kv.create("dist_sync") as store, kv.create("dist_sync", group="second") as second:
        for one in (store, second):
            one.init("w", np.zeros(4, np.float32))
        out = np.empty(4, np.float32)
        for one in (store, second):
            one.pushpull("w", np.full(4, store.rank + 1, np.float32), out=out)
        return [float(value) for value in out]


def many_keys(count: int, rounds: int) -> bool:
    """Whether sums of so many keys in one call are right."""
    keys = list(range(count))
    with kv.create("dist_sync") as store:
        values = [np.full(16, key % 100, np.float32) for key in keys]
        store.init(keys, values)
        for _ in range(rounds):
            store.pushpull(keys, values)
        factor = store.num_workers**rounds
        return all((value == key % 100 * factor).all() for key, value in zip(keys, values, strict=True))


def through_stalls(name: str, seed: int, rounds: int) -> list[float]:
    """Wait for workers whose steps, like the reads of the clock here, occur at the worst moments."""
    rank = int(os.environ["KVSTORE_RANK"])
    draw = random.Random(f"{seed} {rank}")
    waiting.NOTICE_AFTER = 0.05  # so that a notice is due all the time
    waiting.stall = lambda: time.sleep(draw.random() * 0.1) if draw.random() < 0.3 else None
    if name != "shared":
        _nobody_is_late_who_is_ready()
    time.sleep(draw.random() * 0.3)
    with kv.create(name) as store:
        jobs.tell("in")
        store.init("w", np.zeros(4, np.float32))
        out = np.empty(4, np.float32)
        for _ in range(rounds):
            time.sleep(draw.random() * 0.1)
            store.pushpull("w", np.full(4, rank + 1, np.float32), out=out)
        store.barrier()
        late = _ends_at_the_deadline(store, draw)
        store.barrier()
        return [float(out[0]), late]


def _ends_at_the_deadline(store: Any, draw: random.Random) -> float:
    """Rank 0 waits about as long as its deadline allows; with an error or without, the round is right."""
    out, seconds = np.empty(4, np.float32), 0.3
    if store.rank:
        time.sleep(seconds + (draw.random() - 0.5) * 0.2)
        store.pushpull("w", np.ones(4, np.float32), out=out)
        return float(out[0])
    with _deadline(store._backend, seconds), contextlib.suppress(kv.TimeoutError):
        store.pushpull("w", np.ones(4, np.float32), out=out)
    store.pull("w", out=out)
    return float(out[0])


@contextlib.contextmanager
def _deadline(backend: Any, seconds: float) -> Iterator[None]:
    client = getattr(backend, "_client", None)
    if client is None:
        usual, backend._waiter._timeout = backend._waiter._timeout, seconds
        yield
        backend._waiter._timeout = usual
    else:
        usual, client.driver.timeout = client.driver.timeout, seconds
        yield
        client.driver.timeout = usual


def _nobody_is_late_who_is_ready() -> None:
    from kvstore.stores.parameter_server.worker.driver import MachineDriver

    wait = MachineDriver.wait

    def checked(self: Any, ready: Any, *arguments: Any) -> None:
        try:
            wait(self, ready, *arguments)
        except kv.TimeoutError:
            assert not ready(), "it was ready, and was called late"
            raise

    MachineDriver.wait = checked  # type: ignore[method-assign]
