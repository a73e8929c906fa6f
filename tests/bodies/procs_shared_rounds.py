"""The processes of jobs in the tests of the meaning of a round."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import own_rules
import pytest
from jobs import hear, tell, waits_in
from procs_shared import assert_same_bits, start_of
from references import Array
from tested_store import create, held

import kvstore as kv

F = np.float32
SIZES = {"small": 50, "edge": 16384, "large": 100_001}


def full(key: str, value: float) -> Array:
    return np.full(SIZES[key], value, F)


def opened(**options: Any) -> Any:
    store = create(**options)
    store.init(list(SIZES), [full(key, -1) for key in SIZES])
    return store


def pulled(store: Any, key: str) -> float:
    out = full(key, -9)
    store.pull(key, out=out)
    assert (out == out[0]).all(), np.unique(out)
    return float(out[0])


def everywhere(store: Any) -> int:
    return int(store.num_workers * (store.num_workers + 1) // 2)


def end(store: Any) -> None:
    store.barrier()
    store.close()


# ---------------------------------------------------------------------------------- push and pull


def third_push_waits(key: str, home: bool) -> None:
    """Worker 0 runs ahead; worker 1 does nothing until the test sends a line."""
    store = opened()
    if store.rank == 1:
        hear()
        for t in (1, 2, 3):
            store.push(key, full(key, 10 * t))
        assert pulled(store, key) == 33
        end(store)
        return
    arrays = [store.empty(key) if home else full(key, 0) for _ in range(3)]
    for t, array in enumerate(arrays, 1):
        array[...] = t
    store.push(key, arrays[0])
    store.push(key, arrays[1])
    waits_in(store.push, key, arrays[2])  # the third
    assert pulled(store, key) == 33
    end(store)


def pull_gives_the_round(key: str) -> None:
    """Worker 1 is a round ahead when worker 0 pulls."""
    store = opened()
    store.push(key, full(key, 1))
    if store.rank == 1:
        store.push(key, full(key, 5))
        tell("ahead")
        assert pulled(store, key) == 6
    else:
        hear()
        assert pulled(store, key) == held(store, key)[-1] == 2
        assert pulled(store, key) == 2
        store.push(key, full(key, 1))
        assert pulled(store, key) == 6
    end(store)


def reads_without_a_push() -> None:
    """A worker that has pushed nothing reads the current value, and waits for no worker."""
    store = opened()
    if store.rank == 0:
        for key in SIZES:
            assert pulled(store, key) == -1
            store.push(key, full(key, 1))
        tell("pushed")
        hear()
    else:
        hear()
        for key in SIZES:
            assert pulled(store, key) == held(store, key)[0] == -1
            store.push(key, full(key, 2))
            assert pulled(store, key) == 3
        tell("done")
    end(store)


def deadline() -> None:
    """A round that stays incomplete ends in an error that names the worker; the store stays usable."""
    store = opened(timeout=0.3)
    if store.rank == 0:
        store.push("large", full("large", 1))
        with pytest.raises(kv.errors.TimeoutError, match=r"'large'.*worker 1"):
            pulled(store, "large")
        with pytest.raises(kv.errors.TimeoutError, match="worker 1"):
            store.pushpull("small", full("small", 1))
        with pytest.raises(kv.errors.TimeoutError, match=r"barrier.*worker 1"):
            store.barrier()
        tell("late")
        hear()
        assert pulled(store, "large") == 3
        assert pulled(store, "small") == 3
        tell("read")
    else:
        hear()
        store.push("large", full("large", 2))
        store.push("small", full("small", 2))
        assert pulled(store, "small") == 3
        tell("pushed")
        hear()
    store.close()


# ---------------------------------------------------------------------------------- join, barrier


def uneven() -> None:
    """Worker r has r + 2 batches."""
    store = opened()
    homes = {key: store.empty(key) for key in SIZES}
    mine = store.rank + 2
    for t in range(1, mine + 1):
        want = sum(t * (w + 1) for w in range(store.num_workers) if w + 2 >= t)
        value = t * (store.rank + 1)
        for key in SIZES:
            if t % 3 == 0:
                store.push(key, full(key, value))
                assert pulled(store, key) == want, (key, t)
                continue
            array = homes[key] if t % 3 == 1 else full(key, 0)
            array[...] = value
            store.pushpull(key, array)
            assert (array == want).all(), (key, t, np.unique(array), want)
    store.join()
    for key in SIZES:
        with pytest.raises(kv.ConfigError, match="joined"):
            store.push(key, full(key, 1))
        if store.type == "shared":
            pulled(store, key)
        else:  # the others continue: slices on servers may be a round apart
            pulled_any(store, key)
    tell("joined")
    hear()
    last = store.num_workers
    for key in SIZES:
        assert pulled(store, key) == (last + 1) * last
    store.close()


def barriers(rounds: int) -> list[list[float]]:
    """When this worker arrived at each barrier, and when it left it."""
    store = opened()
    times = []
    for i in range(rounds):
        if i % store.num_workers == store.rank:
            time.sleep(0.002)
        before = time.monotonic()
        store.barrier()
        times.append([before, time.monotonic()])
    store.close()
    return times


# ------------------------------------------------------------------------------------- optimizers


def beside_local(store: Any, local: Any, key: str, seed: int) -> None:
    """A round, whose weights must be those of `local`."""
    parts = [start_of((SIZES[key],), "float32", seed + w) for w in range(store.num_workers)]
    local.push(key, parts)
    out = parts[store.rank].copy()
    store.pushpull(key, out)
    assert_same_bits(out, local.view(key))


def train_beside_local(store: Any, local: Any, steps: range) -> None:
    """Rounds of every key, and a barrier."""
    for step in steps:
        for key in SIZES:
            beside_local(store, local, key, 100 * step)
    store.barrier()


def plain_again(path: str) -> None:
    """Worker 0 returns to plain sums; a worker that has yet to call this can still save its states."""
    with opened() as store:
        store.init("w", np.ones(3, F))
        store.set_optimizer(kv.optimizer.Adam())
        store.barrier()
        if store.rank == 0:
            store.set_updater(None)
        store.barrier()
        if store.rank == 1:
            store.save_optimizer_states(path)
            assert Path(path).exists()
        store.barrier()


def settings_change() -> None:
    """Every worker changes the settings, then one of them does."""
    with opened() as store, kv.create("local", processes=1) as local:
        local.init(list(SIZES), [full(key, -1) for key in SIZES])
        for made in (store, local):
            made.set_optimizer(kv.optimizer.Adam(learning_rate=0.1))
        for step in range(6):
            for key in SIZES:
                beside_local(store, local, key, 100 * step)
            if step == 1:
                for made in (store, local):
                    made.set_learning_rate(0.01)
            elif step == 2:
                for made in (store, local):
                    made.update_optimizer(wd=0.1, rescale_grad=0.5)
            elif step == 3:
                local.set_learning_rate(0.5)
                store.barrier()
                if store.rank == store.num_workers - 1:
                    store.set_learning_rate(0.5)
                store.barrier()
            elif step == 4:
                for made in (store, local):
                    made.set_optimizer(kv.optimizer.SGD(learning_rate=0.1, momentum=0.9))
        store.barrier()


def set_by_one() -> None:
    """Worker 0 alone sets the optimizer; the others find it."""
    with opened() as store, kv.create("local", processes=1) as local:
        local.init(list(SIZES), [full(key, -1) for key in SIZES])
        local.set_optimizer(kv.optimizer.Adam())
        if store.rank == 0:
            store.set_optimizer(kv.optimizer.Adam())
        store.barrier()
        train_beside_local(store, local, range(3))


def set_late() -> None:
    """Worker 0 has changed the optimizer that it set before the others set the same one."""
    with opened() as store, kv.create("local", processes=1) as local:
        local.init(list(SIZES), [full(key, -1) for key in SIZES])
        local.set_optimizer(kv.optimizer.Adam())
        local.set_learning_rate(0.5)
        if store.rank == 0:
            store.set_optimizer(kv.optimizer.Adam())
            store.set_learning_rate(0.5)
        store.barrier()
        if store.rank > 0:
            store.set_optimizer(kv.optimizer.Adam())
        store.barrier()
        train_beside_local(store, local, range(2))


def set_differently() -> None:
    """The second optimizer is refused, on the worker that sets it; the first one stays."""
    with opened() as store, kv.create("local", processes=1) as local:
        local.init(list(SIZES), [full(key, -1) for key in SIZES])
        local.set_optimizer(kv.optimizer.Adam())
        if store.rank == 0:
            store.set_optimizer(kv.optimizer.Adam())
        store.barrier()
        if store.rank > 0:
            with pytest.raises(kv.ConfigError, match=r"adam|another optimizer"):
                store.set_optimizer(kv.optimizer.Adam(learning_rate=0.7))
            store.set_optimizer(kv.optimizer.Adam())
        train_beside_local(store, local, range(2))


def failing_updater() -> list[str]:
    """An error of the updater in round 2 of a key reaches every worker; the next round works."""
    errors = []
    with opened() as store:
        calls: dict[Any, int] = {}

        def updater(key: Any, merged: Array, stored: Array) -> None:
            stored += merged
            if merged[0] == 2 * everywhere(store):
                calls[key] = calls.get(key, 0) + 1
                raise RuntimeError("no more")

        store.set_updater(updater)
        for key in SIZES:
            for t in (1, 2, 3):
                array = full(key, t * (store.rank + 1))
                if t == 2:
                    with pytest.raises(
                        kv.UpdaterError, match=f"{key}.*RuntimeError|RuntimeError.*{key}"
                    ) as caught:
                        store.pushpull(key, array)
                    errors.append(str(caught.value))
                    assert pulled(store, key) == -1 + everywhere(store)
                else:
                    store.pushpull(key, array)
            assert pulled(store, key) == -1 + 4 * everywhere(store)
        store.barrier()
    return errors


# ---------------------------------------------------------------------------------- init and keys


def failed_long_ago(words: int) -> None:
    """Of two failed rounds each worker gets one error each, though it reads only after the others."""
    with opened() as store:
        store.set_optimizer(own_rules.FiniteOnly(words))
        for key in ("small", "edge"):
            told = []
            for value in (1, np.nan, np.nan, 1, 1):
                if store.rank == 1:  # it is last, and begins the update
                    store.barrier()
                with telling(told):
                    store.push(key, full(key, value))
                if store.rank == 0:
                    store.barrier()
            for _ in range(3):
                with telling(told):
                    value = pulled(store, key)
            assert len(told) == 2, told
            assert all("FloatingPointError on key" in text and "\ufffd" not in text for text in told)
            assert value == -1 + 3 * store.num_workers
        store.barrier()


@contextlib.contextmanager
def telling(told: list[str]) -> Iterator[None]:
    """Note what an updater raises."""
    try:
        yield
    except kv.UpdaterError as error:
        told.append(str(error))


def several_stores() -> None:
    """Stores are paired by group and order."""
    made = [create(group=group) for group in ("a", "b", "a", "default", "b")]
    for i, store in enumerate(made):
        store.init("w", np.full(3, i, F))
    for i, store in enumerate(reversed(made)):
        store.push("w", np.full(3, 10 * i + store.rank, F))
    for i, store in enumerate(reversed(made)):
        n = store.num_workers
        assert (held(store, "w") == 10 * i * n + n * (n - 1) // 2).all()
    made[2].barrier()
    for store in made:
        store.close()
    with create() as again:
        again.init("w", np.zeros(3, F))
        again.barrier()


def first_values() -> None:
    """The value of worker 0 counts, and is there when init returns; other shapes and types are refused."""
    store = create()
    for n in (3, 20_000, 300_000):
        store.init(n, np.full(n, store.rank + 5, F))
        assert (held(store, n) == 5).all()
        out = np.zeros(n, F)
        store.broadcast(n + 1, np.full(n, store.rank + 7, F), out=out)
        assert (out == 7).all()
    if store.rank == 0:
        store.init(0, np.zeros((2, 3), F))
    else:
        for wrong, error in (
            (np.zeros((3, 2), F), kv.ShapeError),
            (np.zeros((2, 3)), kv.DTypeError),
            (kv.RowSparseArray.zeros((2, 3)), kv.ArrayError),
        ):
            with pytest.raises(error, match="worker 0" if store.type == "shared" else "in this job"):
                store.init(0, wrong)
        store.init(0, np.ones((2, 3), F))
    assert not held(store, 0).any()
    for _ in range(2):
        with pytest.raises(kv.DuplicateKeyError):
            store.init(0, np.zeros((2, 3), F))
    with pytest.raises(kv.KeyKindError):
        store.init("0", np.zeros(3, F))
    end(store)


def kinds_differ() -> None:
    """Worker 1 waits for a str key; worker 0 makes int keys."""
    store = create()
    if store.rank == 0:
        hear()
        store.init(1, np.zeros(3, F))
    else:
        tell("waiting")
        with pytest.raises(kv.KeyKindError, match="str"):
            store.init("a", np.zeros(3, F))
        store.init(1, np.zeros(3, F))
    end(store)


def many_keys(n: int) -> None:
    store = create()
    keys = [f"layer.{i}" for i in range(n)]
    store.init(keys, [np.full(2, i % 100, F) for i in range(n)])
    assert store.keys() == keys
    for i in range(0, n, n // 100 - 1):
        assert (held(store, keys[i]) == i % 100).all()
    values = [np.full(2, i % 50 + store.rank, F) for i in range(n)]
    store.pushpull(keys, values)
    rest = store.num_workers * (store.num_workers - 1) // 2
    assert all(value[1] == i % 50 * store.num_workers + rest for i, value in enumerate(values))
    end(store)


def growing_table(n: int) -> None:
    """Worker 0 makes keys as fast as it can; the others find them while the table grows, and all push."""
    store = create()
    store.init("work", np.zeros(10, F))
    for i in range(n):
        store.init(f"k{i}", np.full(3, i, F))
        assert held(store, f"k{i}")[0] == i
        if i % 8 == store.rank:
            assert held(store, f"k{i // 2}")[2] == i // 2
        if i % 64 == 0:
            value = np.full(10, store.rank, F)
            store.pushpull("work", value)
            assert value[0] == everywhere(store) - store.num_workers
    end(store)


# -------------------------------------------------------------------------------- files and async


def saved_and_loaded(folder: str) -> None:
    """One worker saves, another one loads; then all continue from the file."""
    values, states = Path(folder) / "values", Path(folder) / "states"
    with opened() as store, kv.create("local", processes=1) as local:
        local.init(list(SIZES), [full(key, -1) for key in SIZES])
        for made in (store, local):
            made.set_optimizer(kv.optimizer.Adam())
        for key in SIZES:
            beside_local(store, local, key, 0)
        if store.rank == store.num_workers - 1:
            store.save(values)
            store.save_optimizer_states(states, dump_optimizer=True)
        store.barrier()
        for key in SIZES:  # on from here, and then back
            store.push(key, full(key, 1))
        store.set_learning_rate(0.9)
        store.barrier()
        for key in SIZES:
            pulled_any(store, key)
        store.barrier()
        if store.rank == 0:
            store.load(values)
            store.load_optimizer_states(states)
        store.barrier()
        train_beside_local(store, local, range(1, 3))


def pulled_any(store: Any, key: str) -> Array:
    out = full(key, 0)
    store.pull(key, out=out)
    return out


def in_the_background(rounds: int) -> None:
    """Every worker has priorities of its own, and calls in an order of its own."""
    store = opened()
    homes = {key: store.empty(key) for key in SIZES}
    for t in range(1, rounds + 1):
        keys = list(SIZES)
        order = keys[store.rank % 3 :] + keys[: store.rank % 3]
        outs, works = {key: full(key, 0) for key in keys}, []
        for i, key in enumerate(order):
            value = homes[key] if t % 2 else full(key, 0)
            value[...] = t * (store.rank + 1)
            if t % 3 == 0:
                store.push(key, value, priority=i * store.rank, async_op=True)
                works.append(store.pull(key, out=outs[key], priority=-i, async_op=True))
            else:
                work = store.pushpull(
                    key, value, out=outs[key], priority=(7 * i + store.rank) % 3, async_op=True
                )
                works.append(work)
        for work in works:
            work.wait(20)
        for key in keys:
            assert (outs[key] == t * everywhere(store)).all(), (key, t)
    end(store)


def late_reads(how: str) -> None:
    """A read in the background gives the value before the push that was called next, however late it runs."""
    with opened() as store:
        store.init("one", full("small", 0))
        if how == "rows":
            store.init("rows", all_rows(-1))
        store.barrier()
        first, second = ("small", "edge") if store.rank == 0 else ("edge", "small")
        values = {key: full(key, 1) for key in SIZES}
        store.pushpull(first, values[first], async_op=True)  # the other worker pushes it after all the rest
        out = all_rows(-9) if how == "rows" else full("large", -9)
        if how == "rows":
            store.row_sparse_pull("rows", out=out, row_ids=[1, 3], async_op=True)
            store.push("rows", all_rows(1), async_op=True)
        elif how == "pull":
            store.pull("large", out=out, async_op=True)
            store.push("large", values["large"], async_op=True)
        else:
            one = full("small", 1)
            store.pushpull(["one", "large"], [[one], []], out=[[one], [out]], async_op=True)
            store.push("large", values["large"], async_op=True)
        store.pushpull(second, values[second], async_op=True)
        store.wait()
        assert ((out.data if how == "rows" else out) == -1).all()
        store.barrier()


def all_rows(value: float) -> kv.RowSparseArray:
    return kv.RowSparseArray(np.full((5, 3), value, F), np.arange(5), (5, 3))


def pushed_and_never_pulled() -> None:
    """A push that finds the round before the last one complete carries it out."""
    for rule in ("sgd", ""):
        with create() as store:
            store.init([3, 4], [np.zeros(3, F), np.zeros((5, 3), F)])
            if rule:
                store.set_optimizer(kv.optimizer.create(rule, learning_rate=1.0))
            for t in range(300):
                store.push(3, np.ones(3, F))
                if t % 3 == store.rank:
                    store.push(4, kv.RowSparseArray(np.ones((2, 3), F), [1, 3], (5, 3)))
                else:
                    store.pushpull(4, np.ones((5, 3), F))
            n = store.num_workers
            assert (held(store, 3) == (-300 * n if rule else n)).all()
            assert held(store, 4)[1, 1] == (-300 * n if rule else n)
            store.barrier()


def dropped() -> None:
    """The caller keeps no reference to the arrays that it has pushed."""
    store = opened()
    key = "large"
    for t in range(1, 9):
        value = t * (store.rank + 1)
        array = store.empty(key) if t % 2 else full(key, 0)
        array[...] = value
        out = full(key, 0)
        if t % 4 < 2:
            work = store.pushpull(key, array, out=out, async_op=True)
        else:
            store.push(key, array)
            work = None
        del array
        others = [store.empty(key) for _ in range(3)] + [full(key, -1) for _ in range(3)]
        for other in others:
            other[...] = -5
        if store.rank == 0:
            time.sleep(0.01)  # so that another worker works first
        if work is None:
            store.pull(key, out=out)
        else:
            work.wait(20)
        assert (out == t * everywhere(store)).all(), (t, np.unique(out))
    end(store)


# ------------------------------------------------------------------------------------------------- threads


def threads_with_keys(seed: int, rounds: int) -> None:
    """Some threads with a key each, in an order and with pauses of their own on every worker."""
    same, own = random.Random(seed), random.Random(seed * 100 + int(os.environ["KVSTORE_RANK"]))
    optimizer, sizes = (
        same.random() < 0.3,
        [same.choice([3, 1024, 40_000]) for _ in range(same.randint(2, 4))],
    )
    groups = [create(group=name) for name in ("one", "two")[: same.randint(1, 2)]]
    keys = [(store, f"k{i}", n) for i, n in enumerate(sizes) for store in groups]
    ways = [same.choice(["pushpull", "push", "ahead", "view", "async"]) for _ in keys]
    if optimizer:
        for store in groups:
            store.set_optimizer(kv.optimizer.create("test", learning_rate=-1))  # adds the pushed value
    errors: list[BaseException] = []

    def train(store: Any, key: str, n: int, way: str, draw: random.Random) -> None:
        try:
            store.init(key, np.zeros(n, F))
            for t in range(1, rounds + 1):
                if draw.random() < 0.3:
                    time.sleep(draw.random() * 0.003)
                if way == "ahead" and t % 3:  # the third push of a key waits for the first of all others
                    store.push(key, np.full(n, t * (store.rank + 1), F))
                    continue
                got, total = once(store, key, n, t, way), everywhere(store)
                want = total * (t * (t + 1) // 2 if optimizer else t)
                assert (got == want).all(), (key, t, np.unique(got), want)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=train, args=(*key, way, random.Random(own.random())), daemon=True)
        for key, way in zip(keys, ways, strict=True)
    ]
    own.shuffle(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for store in groups:
        store.barrier()
        store.close()


def once(store: Any, key: str, n: int, t: int, way: str) -> Array:
    """One round of a key; return its value."""
    value, out = np.full(n, t * (store.rank + 1), F), np.empty(n, F)
    if way == "pushpull":
        store.pushpull(key, value, out=out)
    elif way == "async":
        store.push(key, value, async_op=True)
        store.pull(key, out=out, async_op=True).wait()
    else:
        store.push(key, value)
        if way == "view":
            return np.array(held(store, key))
        store.pull(key, out=out)
    return out


def threads_with_one_key(rounds: int) -> None:
    """Two threads of a worker push to one key; each receives what its own round left."""
    store = opened()
    got: list[float] = []

    def train() -> None:
        for _ in range(rounds):
            out = full("small", store.rank + 1)
            store.pushpull("small", out)
            got.append(float(out[0]))

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [everywhere(store)] * 2 * rounds
    end(store)


def reads_in_a_loop(steps: int) -> None:
    """Threads that read a key repeatedly leave its turn to the thread that pushes."""
    store = opened()
    ended = threading.Event()

    def read() -> None:
        out = full("small", 0)
        while not ended.is_set():
            store.pull("small", out)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(steps):
            out = full("small", store.rank + 1)
            store.pushpull("small", out, async_op=True).wait()
            assert out[0] == everywhere(store)
    finally:
        ended.set()
    for reader in readers:
        reader.join()
    end(store)


def waits_out_of_order() -> None:
    """Worker 0 waits for its second operation; its first needs worker 1, which first needs the second."""
    store = opened(timeout=30)
    sums, twice = [full(key, store.rank + 1) for key in ("large", "small")], full("small", store.rank + 1)
    if store.rank == 0:
        first = store.pushpull("large", sums[0], async_op=True)
        while store._engine._ready:  # until the background thread has begun to wait
            time.sleep(0.001)
        second = store.pushpull("small", sums[1], async_op=True, priority=9)
        second.wait()
        assert not first.done()
        queued = store.pushpull("small", twice, async_op=True)
        store.pull("small", out=sums[1])  # waits for the operations queued on the key
        assert queued.done()
        store.barrier()
        first.wait()
    else:
        store.pushpull("small", sums[1])
        store.pushpull("small", twice)
        store.barrier()
        store.pushpull("large", sums[0])
    assert all((got == everywhere(store)).all() for got in (*sums, twice))
    end(store)


def close_waits_for_threads() -> None:
    """Worker 0 closes while one of its threads waits for worker 1; this does not delay worker 1."""
    store = opened()
    if store.rank == 1:
        hear()
        store.pushpull("small", full("small", 2))
        store.close()
        return
    out = full("small", 1)
    thread = threading.Thread(target=store.pushpull, args=("small", out))
    thread.start()
    while not store._engine.key_locks.holders:
        time.sleep(0.001)
    closing = threading.Thread(target=store.close)
    closing.start()
    tell("closes")
    for one in (thread, closing):
        one.join()
    assert (out == 3).all()


def an_updater_calls_the_store() -> None:
    """While another thread waits for a late worker, an updater reads another key of its store."""
    store = opened()
    seen: list[float] = []

    def add(key: str, merged: Array, weight: Array) -> None:
        seen.append(pulled(store, "edge"))
        weight += merged

    store.set_updater(add)
    waits = threading.Thread(target=store.pushpull, args=("large", full("large", 1)))
    if store.rank == 0:
        waits.start()
    store.pushpull("small", full("small", 1))
    store.barrier()
    if store.rank == 1:
        waits.start()
    waits.join()
    assert set(seen) <= {-1.0}
    assert (pulled(store, "small"), pulled(store, "large")) == (1, 1)
    end(store)


def optimizer_under_a_pushed_array() -> None:
    """Worker 0 has pushed a private array for a sum when worker 1 sets an optimizer."""
    store = opened()
    sgd = kv.optimizer.create("sgd", learning_rate=0.5, momentum=0.5)
    if store.rank == 0:
        out = full("large", 1)
        thread = threading.Thread(target=store.pushpull, args=("large", out))
        thread.start()
        while not store._engine.key_locks.holders or not store._backend._keys.find("large").arrived:
            time.sleep(0.001)
        tell("pushed")
        thread.join()
        store.set_optimizer(sgd)
    else:
        hear()
        store.set_optimizer(sgd)
        out = full("large", 2)
        store.pushpull("large", out)
    assert (out == -2.5).all()
    store.pushpull("large", out := full("large", 1))
    assert (out == -2.5 - 0.75 - 1).all()
    end(store)
