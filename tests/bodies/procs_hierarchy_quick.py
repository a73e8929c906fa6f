"""Worker bodies of tests of hosts' small calls: what takes few steps, and what does not."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tested_store import create

import kvstore as kv
from kvstore.stores.hierarchy.backend import HierarchyBackend
from kvstore.stores.hierarchy.carrier import HostCarrier
from kvstore.stores.parameter_server.worker.client import WorkerClient
from kvstore.stores.parameter_server.worker.driver import MachineDriver
from kvstore.stores.shared.native import _shared as shm

F = np.float32
SHAPE = (3, 50)


def one_by_one(store: kv.KVStore, rounds: int) -> None:
    """Push, pull, and both, in turn, and check the values."""
    for t in range(rounds):
        value, out = np.full(SHAPE, t, F), np.empty(SHAPE, F)
        if t % 3 == 0:
            store.push("w", value)
            store.pull("w", out=out)
        elif t % 3 == 1:
            store.pushpull("w", value, out=out)
        else:
            store.pushpull("w", value)
            out = value
        assert (out == t * store.num_workers).all(), (t, out)


def begun(store: kv.KVStore) -> kv.KVStore:
    """Make a key, and use it until the host has memory for it."""
    store.init("w", np.zeros(SHAPE, F))
    one_by_one(store, 6)
    store.barrier()
    return store


def counting(counted: Counter[str], cls: type, name: str) -> Any:
    """Count the calls of a method."""
    method = getattr(cls, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        counted[name] += 1
        return method(self, *args, **kwargs)

    return mock.patch.object(cls, name, call)


def quickly(rounds: int) -> dict[str, int]:
    """Return how often small calls have gone the usual way."""
    usual: Counter[str] = Counter()
    with create() as store:
        begun(store)
        with (
            counting(usual, HierarchyBackend, "_start_push"),
            counting(usual, HierarchyBackend, "_start_pull"),
            counting(usual, HierarchyBackend, "_start_pushpull"),
            counting(usual, WorkerClient, "submit"),
        ):
            one_by_one(store, rounds)
        store.barrier()
    return dict(usual)


def handed_over(rounds: int) -> int:
    """Disturb each exchange after it was sent; return how many the state machine continued."""
    over: Counter[bool] = Counter()
    end = MachineDriver.end

    def disturbed(self: Any, call: Any) -> Any:
        self._sockets.wake()
        operation = end(self, call)
        over[operation is not None] += 1
        return operation

    with create() as store:
        begun(store)
        with mock.patch.object(MachineDriver, "end", disturbed):
            one_by_one(store, rounds)
            store.barrier()
    return over[True]


def both_at_once(store: kv.KVStore, key: str, t: int) -> None:
    """Push and pull a small key, also if Ctrl-C arrives during the call, and check the value."""
    value, out = np.full(SHAPE, t, F), np.zeros(SHAPE, F)
    try:
        store.pushpull(key, value, out=out)
    except KeyboardInterrupt:
        store.pull(key, out=out)
    assert (out == t * store.num_workers).all(), (key, t, out[0, 0])


def who_carries(rounds: int) -> dict[str, int]:
    """Return how many sums were sent by each thread of this worker."""
    by: Counter[str] = Counter()
    begin = MachineDriver.begin

    def noted(self: Any, call: Any) -> bool:
        begun = begin(self, call)
        by[threading.current_thread().name] += begun
        return begun

    with create() as store:
        begun(store)
        with mock.patch.object(MachineDriver, "begin", noted):
            for t in range(rounds):
                both_at_once(store, "w", t)
        store.barrier()
    return dict(by)


def interrupted(rounds: int) -> int:
    """Have Ctrl-C come wherever a caller carries a sum, in turn; return how often it did."""
    points = ("begin", "end", "close_if_opener", "sum_opened")
    hits: Counter[str] = Counter()
    store = begun(create())
    for t in range(rounds):
        name, after = points[t % 4], t % 8 >= 4
        owner: Any = MachineDriver if name in ("begin", "end") else shm
        method = getattr(owner, name)

        def once(*args: Any, name: str = name, after: bool = after, method: Any = method, t: int = t) -> Any:
            here = threading.current_thread() is threading.main_thread() and not hits[f"{name} {t}"]
            here = (
                here and sys._getframe(1).f_code.co_name != "_sum_exchange"
            )  # the usual way: that worker leaves
            if here:
                hits[f"{name} {t}"] += 1
            if here and not after:
                raise KeyboardInterrupt
            result = method(*args)
            if here:
                raise KeyboardInterrupt
            return result

        with mock.patch.object(owner, name, once):
            both_at_once(store, "w", t)
    store.barrier()
    store.close()
    return sum(hits.values())


def others_are_late(rounds: int) -> None:
    """Wait longer for other hosts than a caller waits for its own messages."""
    with create() as store:
        begun(store)
        for t in range(rounds):
            if store.rank == store.num_workers - 1:
                time.sleep((0.0, 0.05, 0.4, 1.2)[t % 4])
            both_at_once(store, "w", t)
        store.barrier()


def two_threads(rounds: int) -> None:
    """Call from two threads, each with a key of its own; one of them also asynchronously."""
    with create() as store:
        begun(store)
        store.init("v", np.zeros(SHAPE, F))
        found: list[BaseException] = []

        def other() -> None:
            try:
                for t in range(rounds):
                    if t % 3:
                        both_at_once(store, "v", t)
                        continue
                    value = np.full(SHAPE, t, F)
                    work = store.pushpull("v", value, async_op=True)
                    assert work is not None
                    work.wait()
                    assert (value == t * store.num_workers).all()
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        for t in range(rounds):
            both_at_once(store, "w", t)
        thread.join()
        assert not found, found
        store.barrier()


def counted(rounds: int) -> dict[str, int]:
    """Return the counts of a worker for small calls."""
    with create() as store:
        before = begun(store).statistics()
        one_by_one(store, rounds)
        after = store.statistics()
        store.barrier()
    return {
        "pushes": after.pushes - before.pushes,
        "pulls": after.pulls - before.pulls,
        "rounds": after.rounds - before.rounds,
        "sent": sum(after.sent) - sum(before.sent),
        "received": sum(after.received) - sum(before.received),
    }


def what_is_unusual() -> None:
    """Give small calls what only the usual way takes, or refuses."""
    with create() as store:
        begun(store)
        workers, one = store.num_workers, np.ones(SHAPE, F)
        for wrong in (np.ones(SHAPE[::-1], F), np.ones(3, F), "text", None):
            with pytest.raises(kv.KVStoreError):
                store.push("w", wrong)
            with pytest.raises(kv.KVStoreError):
                store.pushpull("w", wrong, out=one)
            with pytest.raises(kv.KVStoreError):
                store.pull("w", out=wrong)
        store.pushpull("w", one, out=(out := np.empty(SHAPE, np.float64)))
        assert (out == workers).all()
        wide = np.zeros((3, 100), F)
        store.pushpull("w", 2 * one, out=wide[:, ::2])
        assert (wide[:, ::2] == 2 * workers).all() and not wide[:, 1::2].any()
        store.pushpull(["w"], [3 * one], out=[out := np.empty(SHAPE, F)])
        assert (out == 3 * workers).all()
        store.pushpull("w", [one, one], out=[out, other := np.empty(SHAPE, F)])
        assert (out == 2 * workers).all() and (other == out).all()
        out.flags.writeable = False
        with pytest.raises(kv.KVStoreError):
            store.pull("w", out=out)
        store.init("i", np.zeros(5, np.int32))
        for t in range(4):
            store.pushpull("i", whole := np.full(5, t, np.int32))
            assert (whole == t * workers).all()
        store.set_optimizer(kv.optimizer.create("sgd", learning_rate=0.5))
        with pytest.raises(kv.DTypeError):
            store.push("i", whole)
        store.pushpull("w", one, out=(out := np.empty(SHAPE, F)))
        assert (out == 2 * workers - 0.5 * workers).all(), out
        store.barrier()


def ahead(bursts: int) -> None:
    """Push some times in a row: the schedule's time of each update is that of its push."""
    step, send = 2.0**-10, HostCarrier._send_all

    def late(self: Any) -> None:
        time.sleep(0.003)
        send(self)

    with mock.patch.object(HostCarrier, "_send_all", late), create() as store:
        store.init("s", np.zeros(SHAPE, F))
        rates = kv.lr_scheduler.FactorScheduler(1 << 30, 1.0, base_lr=1 << 14, warmup_steps=1 << 14)
        store.set_optimizer(kv.optimizer.SGD(lr_scheduler=rates))
        value, out = np.full(SHAPE, step / store.num_workers, F), np.zeros(SHAPE, F)
        updates, before = 0, 0.0
        for burst in range(bursts):
            pushes = 2 + burst % 2
            for _ in range(pushes):
                store.push("s", value)
            with pytest.raises(kv.KVStoreError):
                store.push("s", np.ones(3, F))
            store.pull("s", out=out)
            expected = sum(range(updates + 1, updates + 1 + pushes)) * step
            assert abs(before - float(out[0, 0]) - expected) < step / 2, (updates, out[0, 0], before)
            updates, before = updates + pushes, float(out[0, 0])
        store.barrier()


def other_types_with_a_codec() -> None:
    """Push a value that a codec does not accept, once small calls are usual."""
    with create() as store:
        store.init("d", np.zeros(5))
        for _ in range(4):
            store.pushpull("d", np.ones(5))
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        for push in (store.push, store.pushpull):
            with pytest.raises(kv.DTypeError):
                push("d", np.ones(5))
        store.barrier()
