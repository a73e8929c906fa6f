"""Bodies of processes that tests start; `body(name, *arguments)` of conftest.py runs one."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from tested_store import create

import kvstore as kv
from kvstore.arrays import pages
from kvstore.kernels import cpu

BIG = 1_000_000


def check_large_sum(store: kv.KVStore, key: str) -> None:
    values = [np.full(BIG, value, np.float32) for value in (1, 2, 4)]
    out = np.zeros(BIG, np.float32)
    store.pushpull(key, values, out=out)
    assert (out == 7).all()


def in_child(what) -> None:  # type: ignore[no-untyped-def]
    """Fork, run `what` in the child, and fail if it failed."""
    pid = os.fork()
    if pid == 0:
        try:
            what()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def exit_with_work_pending(path: str) -> None:
    def slow(key: object, merged: object, stored: object) -> None:
        time.sleep(0.05)
        with Path(path).open("a") as file:
            file.write(f"{key}\n")

    store = kv.create()
    store.init([1, 2, 3], [np.zeros(3)] * 3)
    store.set_updater(slow)
    works = [store.push(key, np.ones(3), async_op=True) for key in (1, 2, 3)]
    assert not works[-1].done()


def exit_with_failed_work() -> None:
    store = kv.create()
    store.push("nobody", np.ones(3), async_op=True)


def fork_with_helpers() -> None:
    """Helper threads, an engine thread and a store are there when the process forks."""
    cpu.set_threads(4)
    store = kv.create()
    store.init(["a", "b"], [np.zeros(BIG, np.float32), np.full(3, 5.0)])
    check_large_sum(store, "a")
    work = store.push("b", np.full(3, 6.0), async_op=True)
    work.wait()

    def child() -> None:
        out = np.zeros(3)
        store.pull("b", out=out)
        assert (out == 6).all()
        for _ in range(5):
            check_large_sum(store, "a")
        work = store.push("b", np.full(3, 7.0), async_op=True)
        work.wait(30)
        in_child(lambda: check_large_sum(store, "a"))
        with kv.create() as another:
            another.init("a", np.zeros(BIG, np.float32))
            check_large_sum(another, "a")
        store.close()

    for _ in range(3):
        in_child(child)
        check_large_sum(store, "a")
    assert (store.view("b") == 6).all()  # what the children did is theirs
    store.close()


def fork_while_another_thread_sums() -> None:
    cpu.set_threads(3)
    store = kv.create()
    store.init(["a", "b"], [np.zeros(BIG, np.float32)] * 2)
    stop = threading.Event()

    def sum_on() -> None:
        while not stop.is_set():
            check_large_sum(store, "a")

    thread = threading.Thread(target=sum_on)
    thread.start()
    try:
        for _ in range(15):
            in_child(lambda: check_large_sum(store, "b"))
    finally:
        stop.set()
        thread.join()
    check_large_sum(store, "a")


def fork_while_memory_is_cut() -> None:
    """The lock on the slab that small arrays are cut from is held when the process forks."""
    with pages._lock:
        in_child(lambda: pages.empty((20_000,), np.uint8))


def fork_with_work_under_way() -> None:
    """The engine's thread sits in an updater, holding the store, and more is queued."""
    store = kv.create(timeout=20)
    store.init(["a", "b"], [np.zeros(3), np.zeros(3)])
    entered, go = threading.Event(), threading.Event()

    def block(key: object, merged: np.ndarray, stored: np.ndarray) -> None:
        entered.set()
        go.wait()
        stored += merged

    store.set_updater(block)
    works = [store.push(key, np.ones(3), async_op=True) for key in ("a", "b", "b")]
    entered.wait()

    def child() -> None:
        go.set()
        store.push("b", np.ones(3))
        out = np.zeros(3)
        store.pull("b", out=out)
        assert (out == 1).all(), out  # the parent's queue is the parent's
        store.push("b", np.ones(3), async_op=True).wait()
        store.close()

    in_child(child)
    go.set()
    for work in works:
        work.wait()
    assert (store.view("b") == 2).all()
    store.close()


def close_leaves_nothing() -> None:
    def descriptors() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    def native_threads() -> int:
        for _ in range(1000):  # a joined thread may take a moment to leave
            count = len(os.listdir("/proc/self/task"))
            if count <= wanted:
                break
            time.sleep(0.01)
        return count

    def use() -> None:
        with kv.create() as store:
            store.init(["a", "b"], [np.zeros(BIG, np.float32), np.zeros(3)])
            check_large_sum(store, "a")
            work = store.push("b", np.ones(3), async_op=True)
            work.wait()

    # Those of NumPy's libraries, the main thread, and the helpers, which are started once and stay.
    wanted = len(os.listdir("/proc/self/task")) + cpu.threads() - 1
    use()
    files = descriptors()
    for _ in range(5):
        use()
        assert threading.enumerate() == [threading.main_thread()]
    assert native_threads() <= wanted
    assert descriptors() == files


# ------------------------------------------------------------- workers whose optimizers change, or differ


def reference(size: int, rates: list[float]) -> Any:
    """Return the weight of an updater without a store; its object has one of the rates in each step."""
    optimizer = kv.optimizer.SGD(momentum=0.5)
    update, weight = kv.optimizer.get_updater(optimizer), np.zeros(3)
    for rate in rates:
        optimizer.learning_rate = rate
        update("a", np.full(3, size * (size + 1) / 2), weight)
    return weight


def changed(who: str) -> list[float]:
    """Return the weights where all workers, or the last one alone, change their object before each step."""
    with create() as store:
        store.init(["a", "b"], [np.zeros(3), np.zeros(3)])
        optimizer = kv.optimizer.SGD(learning_rate=1, momentum=0.5)
        store.set_optimizer(optimizer)
        store.barrier()  # before it, the last worker's change could be there in the round of another
        rates = [2.0**-step for step in range(6)]
        weights = {key: np.empty(3) for key in ["a", "b"]}
        for rate in rates:
            if who == "all" or store.rank == store.num_workers - 1:
                optimizer.learning_rate = rate
            for key in ["a", "b"]:
                store.push(key, np.full(3, store.rank + 1.0))
            store.pull(["a", "b"], out=list(weights.values()))
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
