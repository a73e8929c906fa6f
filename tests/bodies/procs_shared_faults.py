"""The processes of a job while one of them is killed, stopped, starved or interrupted."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import logging
import mmap
import os
import random
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pace
import pytest
from jobs import hear, tell
from references import Array

import kvstore as kv
from kvstore.store import start_pushpull
from kvstore.stores.shared.native import _shared as shm
from kvstore.stores.shared.native.registration import OtherProcesses

F = np.float32
SHAPES = {
    "small": (101,),
    "large": (60_001,),
    "home": (70_003,),
    "slot": (40_009,),
    "one": (7, 3),
    "two": (33_000,),
}
TABLE = (50, 3)
RATE, MOMENTUM = 0.5, 0.5


class Traffic:
    """Rounds over keys of every kind in some stores, whose values contain the number of their rounds.

    In round t every worker pushes ``t * (rank + 1)``, so that a sum is ``t`` times a constant; the second
    store has an optimizer, whose weights are compared with those of a local one. A third, where `packed`,
    compresses to 16 bits, which hold these numbers up to round 500.
    """

    def __init__(self, seed: int, packed: bool = False, **options: Any) -> None:
        self.random = random.Random(seed)  # the same on all workers
        self.sums = kv.create("shared", **options)
        self.weights = kv.create("shared", **options)
        self.rank, self.n = self.sums.rank, self.sums.num_workers
        self.t = 0
        self.stores = [self.sums, self.weights]
        if packed:
            self.stores.append(kv.create("shared", **options))
            self.stores[-1].set_gradient_compression({"type": "fp16"})
        for store in self.stores:
            store.init(list(SHAPES), [np.zeros(shape, F) for shape in SHAPES.values()])
            store.init("rows", kv.RowSparseArray.zeros(TABLE))
        self.weights.set_optimizer(kv.optimizer.SGD(learning_rate=RATE, momentum=MOMENTUM))
        self.homes = [store.empty("home") for store in self.stores]
        self.outs = {key: np.empty(shape, F) for key, shape in SHAPES.items()}

    def part(self, key: str) -> Array:
        return np.full(SHAPES[key], self.t * (self.rank + 1), F)

    def rows(self, rank: int, t: int) -> kv.RowSparseArray:
        ids = sorted({t % TABLE[0], (3 * t + rank) % TABLE[0], rank})
        return kv.RowSparseArray(np.full((len(ids), TABLE[1]), t * (rank + 1), F), ids, TABLE)

    def round(self) -> None:
        """One round of every key in both stores, in an order that is the same everywhere."""
        self.t += 1
        names = ("small", "large", "home", "slot", "pair", "rows")
        moves = [(i, move) for i in range(len(self.stores)) for move in names]
        self.random.shuffle(moves)
        for i, move in moves:
            getattr(self, f"_{move}")(self.stores[i], self.homes[i])

    def _small(self, store: Any, home: Array) -> None:
        store.pushpull("small", self.part("small"), out=self.outs["small"])
        self.check(store, "small")

    def _large(self, store: Any, home: Array) -> None:
        value = self.part("large")
        store.pushpull("large", value)
        self.outs["large"][...] = value
        self.check(store, "large")

    def _home(self, store: Any, home: Array) -> None:
        home[...] = self.part("home")
        store.pushpull("home", home)
        self.outs["home"][...] = home
        self.check(store, "home")

    def _slot(self, store: Any, home: Array) -> None:
        store.push("slot", self.part("slot"))
        store.pull("slot", out=self.outs["slot"])
        self.check(store, "slot")

    def _pair(self, store: Any, home: Array) -> None:
        keys = ["one", "two"]
        store.pushpull(keys, [self.part(key) for key in keys], out=[self.outs[key] for key in keys])
        for key in keys:
            self.check(store, key)

    def _rows(self, store: Any, home: Array) -> None:
        if store._backend.feedback is not None:
            return
        store.push("rows", self.rows(self.rank, self.t))
        out = kv.RowSparseArray.zeros(TABLE)
        store.row_sparse_pull("rows", out=out, row_ids=np.arange(10))

    def check(self, store: Any, key: str) -> None:
        if store is not self.weights:
            want = self.t * self.n * (self.n + 1) // 2
            got = self.outs[key]
            assert (got == want).all(), f"key {key!r}, round {self.t}: {np.unique(got)} instead of {want}"

    # --------------------------------------------------------------------------------------- after the end

    def value(self, store: Any, key: str) -> Array:
        store.pull(key, out=self.outs[key])
        return self.outs[key]

    def report(self, folder: str) -> dict[str, Any]:
        """Rounds that the values have seen, after checking that each is that of one complete round."""
        seen: dict[str, int] = {}
        digest = hashlib.blake2b(digest_size=8)
        expected = list(self.trajectory(self.t + 1))
        for i, store in enumerate(self.stores):
            for key in SHAPES:
                value = self.value(store, key)
                digest.update(value.tobytes())
                assert (value == value.flat[0]).all(), f"store {i}, key {key!r}: {np.unique(value)}, {self.t}"
                first = float(value.flat[0])
                known = [t * self.n * (self.n + 1) / 2 for t in range(self.t + 2)] if i != 1 else expected
                assert first in known, f"store {i}, key {key!r}: {first} is of no round, {self.t}"
                seen[f"{i} {key}"] = known.index(first)
                assert self.t - 2 <= seen[f"{i} {key}"] <= self.t, (seen, self.t)
            table = np.empty(TABLE, F)
            store.pull("rows", out=table)
            digest.update(table.tobytes())
            if i == 0:
                seen["0 rows"] = self.round_of_rows(table)
            path = Path(folder) / f"values-{self.rank}-{i}.safetensors"
            store.save(path)
            with kv.create("local", processes=1) as local:
                local.load(path)
                for key in SHAPES:
                    saved, now = local.view(key).flat[0], self.value(store, key).flat[0]
                    assert saved == now, f"store {i}, key {key!r}: saved {saved}, {now} now; {seen}, {self.t}"
                    assert np.array_equal(local.view(key), self.value(store, key))
        self.weights.save_optimizer_states(Path(folder) / f"states-{self.rank}.safetensors")
        return {"seen": seen, "digest": digest.hexdigest(), "t": self.t}

    def trajectory(self, rounds: int) -> Any:
        """The weight after each round."""
        with kv.create("local", processes=1) as local:
            local.init("w", np.zeros(1, F))
            local.set_optimizer(kv.optimizer.SGD(learning_rate=RATE, momentum=MOMENTUM))
            yield 0.0
            for t in range(1, rounds + 1):
                local.push("w", [np.full(1, t * (w + 1), F) for w in range(self.n)])
                yield float(local.view("w")[0])

    def round_of_rows(self, table: Array) -> int:
        for t in range(max(0, self.t - 2), self.t + 1):
            want = np.zeros(TABLE, F)
            for w in range(self.n if t else 0):
                part = self.rows(w, t)
                want[part.indices] += part.data
            if np.array_equal(table, want):
                return t
        raise AssertionError(f"the rows are of no round near {self.t}: {table[:, 0]}")


def until_lost(seed: int, folder: str) -> dict[str, Any]:
    """Work until a peer dies; then read, save and close."""
    traffic = Traffic(seed, packed=seed % 2 == 1)
    tell("ready")
    end = pace.deadline(20)
    try:
        while time.monotonic() < end:
            traffic.round()
        raise AssertionError("nobody died")
    except kv.PeerLostError as error:
        noticed, first = time.monotonic(), error
    for store in traffic.stores:
        provoke(store)
        with pytest.raises(kv.PeerLostError):
            store.push("small", np.ones(SHAPES["small"], F))
        with pytest.raises(kv.PeerLostError):
            store.barrier()
    report = traffic.report(folder)
    for store in traffic.stores:
        store.close()
    return {**report, "noticed": noticed, "rank": first.rank, "text": str(first)}


def rows_until_lost(seed: int) -> dict[str, Any]:
    """Large row-sparse updates, in every row alike, until a peer dies."""
    shape = (4000, 60)
    store = kv.create("shared")
    store.init("w", kv.RowSparseArray(np.zeros(shape, F), np.arange(shape[0]), shape))
    store.set_optimizer(kv.optimizer.SGD(learning_rate=RATE, momentum=MOMENTUM, lazy_update=True))
    n, t = store.num_workers, 0
    ids, view, states = np.arange(shape[0]), store.view("w").data, []
    tell("ready")
    with pytest.raises(kv.PeerLostError):
        while True:
            t += 1
            store.push("w", kv.RowSparseArray(np.full(shape, t * (store.rank + 1), F), ids, shape))
            view = store.view("w").data
    out = np.empty(shape, F)
    for _ in range(2):
        store.pull("w", out=out)
        states.append(out.copy())
    assert np.array_equal(*states)
    traffic = Traffic.__new__(Traffic)
    traffic.n = n
    seen = np.unique(out).tolist()
    assert len(seen) == 1, (t, seen)
    assert seen[0] in list(traffic.trajectory(t)), (t, seen)
    store.close()
    return {"seen": seen, "t": t, "last": float(view[0, 0])}


def growing_rows_until_lost(seed: int) -> dict[str, Any]:
    """Row-sparse updates of some rows again and again, and of new ones each time, until a peer dies."""
    shape, old, more = (10**12, 20), 50, 400
    store = kv.create("shared")
    store.init("w", kv.RowSparseArray.zeros(shape))
    store.set_optimizer(kv.optimizer.SGD(learning_rate=RATE, momentum=MOMENTUM, lazy_update=True))
    n, t = store.num_workers, 0
    tell("ready")
    with pytest.raises(kv.PeerLostError):
        while True:
            t += 1
            ids = np.concatenate([np.arange(old), np.arange(more) * 10**9 + 1000 * t])
            rows = np.full((len(ids), shape[1]), t * (store.rank + 1), F)
            store.push("w", kv.RowSparseArray(rows, ids, shape))
            store.view("w")
    view = store.view("w")
    again = kv.RowSparseArray.zeros(shape)
    store.pull("w", out=again, ignore_sparse=False)
    assert np.array_equal(again.data, view.data)
    assert np.array_equal(again.indices, view.indices)
    traffic = Traffic.__new__(Traffic)
    traffic.n = n
    last, rest = divmod(max(0, len(view.indices) - old), more)
    assert last in (t - 1, t), (last, t)
    assert rest == 0
    assert np.unique(view.data[:old]).tolist() == ([list(traffic.trajectory(t))[last]] if last else [])
    for step in range(1, last + 1):
        ids = np.arange(more) * 10**9 + 1000 * step
        rows = view.data[np.searchsorted(view.indices, ids)]
        gradient = F(step * n * (n + 1) // 2)
        assert np.unique(rows).tolist() == [float(F(-RATE) * gradient)], step
    store.close()
    return {"seen": last, "t": t}


def growing_rows_going_on() -> str:
    """As `going_on`, with a table to which each worker adds rows of its own in each round."""
    shape, some = (10**13, 12), 50
    store = kv.create("shared", on_peer_loss="continue")
    n, rank, t = store.num_workers, store.rank, 0
    store.init("stop", np.zeros(1, F))
    store.init("w", kv.RowSparseArray.zeros(shape))
    store.set_optimizer(kv.optimizer.SGD(learning_rate=-1, momentum=MOMENTUM, lazy_update=True))
    tell("ready")
    while True:
        t += 1
        ids = np.concatenate([np.arange(10), 10**9 * t + 10**6 * rank + np.arange(some)])
        store.push("w", kv.RowSparseArray(np.full((len(ids), shape[1]), 10**rank, F), ids, shape))
        stop = np.array([rank == 0 and heard()], F)
        store.pushpull("stop", stop)
        check_added(store.view("w"), n, some)
        if t == 1:
            tell("working")
        if stop[0] > 0:
            break
    view = store.view("w")
    store.barrier()
    store.close()
    return hashlib.sha256(view.data.tobytes() + view.indices.tobytes()).hexdigest()


def check_added(rows: kv.RowSparseArray, n: int, some: int) -> None:
    """Check that each part of a round is there as a whole: once, or twice if the worker was started again."""
    assert rows.indices[:10].tolist() == list(range(10))
    assert (rows.data[:10] == rows.data[0, 0]).all()
    ids, values = rows.indices[10:].reshape(-1, some), rows.data[10:].reshape(len(rows.data[10:]) // some, -1)
    assert (ids - ids[:, :1] == np.arange(some)).all()
    assert (values == values[:, :1]).all()
    whose = ids[:, 0] // 10**6 % 1000
    assert set(whose.tolist()) <= set(range(n))
    assert np.isin(values[:, 0] / 10.0**whose, [1, 2 + MOMENTUM]).all()


def provoke(store: Any) -> None:
    """Have the store say that a peer is lost."""
    with pytest.raises(kv.PeerLostError):
        store.barrier()


# -------------------------------------------------------------------------------- going on without the dead


def going_on() -> dict[str, Any]:
    """Continue with the remaining workers; worker 0 says when to stop, in the last element of a key."""
    store = kv.create("shared", on_peer_loss="continue")
    n, rank = store.num_workers, store.rank
    for key, shape in SHAPES.items():
        store.init(key, np.zeros(shape, F))
    store.init("stop", np.zeros(n + 1, F))
    home, t, history = store.empty("home"), 0, []
    tell("ready")
    while True:
        t += 1
        mine = np.zeros(n + 1, F)
        mine[rank], mine[n] = t, rank == 0 and heard()
        store.pushpull("stop", mine)
        assert mine[rank] == t
        history.append(mine.tolist())
        for key, shape in SHAPES.items():
            value = home if key == "home" else np.empty(shape, F)
            value[...] = 10**rank
            if key == "slot":
                store.push(key, value)
                store.pull(key, out=value)
            else:
                store.pushpull(key, value)
            total = int(value.flat[0])
            assert (value == total).all(), (key, np.unique(value))
            assert str(total).strip("01") == "", total  # a sum over some of the workers
            assert total // 10**rank % 10 == 1
        if t == 1:
            tell("working")
        if mine[n]:
            break
    last = {key: int(store.view(key).flat[0]) for key in SHAPES}
    store.barrier()
    store.close()
    return {"last": last, "history": history[-3:]}


def heard() -> bool:
    """Whether the test has said something."""
    return bool(select.select([0], [], [], 0)[0])


# ------------------------------------------------------------------------------------ ends of every kind


def ends(how: str, rank: int) -> float:
    """The worker of `rank` ends in some way; the others get PeerLostError."""
    store = kv.create("shared")
    store.init("w", np.zeros(40_000, F))
    store.pushpull("w", np.ones(40_000, F))
    if store.rank == rank:
        tell("ends")
        if how == "_exit":
            os._exit(0)
        elif how == "exception":
            raise ZeroDivisionError("on purpose")
        elif how == "sys.exit":
            sys.exit(3)
        elif how == "exit in silence":
            sys.exit(0)
        elif how == "with":
            with store:
                raise ZeroDivisionError("on purpose")
        elif how == "exit from with":
            with store:
                sys.exit(3)
        elif how == "thread":
            threading.Thread(target=os._exit, args=(1,)).start()
            time.sleep(10)
        elif how == "abort":
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.abort()
    with pytest.raises(kv.PeerLostError) as caught:
        for _ in range(3):
            store.pushpull("w", np.ones(40_000, F))
    assert caught.value.rank == rank
    assert (store.view("w") == store.num_workers).all()
    store.close()
    return time.monotonic()


def leaves_as_a_thread_waits(folder: str) -> float:
    """Worker 0 leaves by an exception; at each closing, what another thread of it might do is done."""
    store = kv.create("shared", on_peer_loss="continue")
    store.init("w", np.zeros(3, F))
    if store.rank == 0:
        job, close, path = store._backend._job, os.close, Path(folder) / "stranger"
        with path.open("wb") as stranger:

            def closing(descriptor: int) -> None:
                close(descriptor)
                os.dup2(stranger.fileno(), descriptor)  # the number is used again at once
                job.detect_losses()
                with contextlib.suppress(MemoryError, InterruptedError):
                    job.empty((1 << 26,), np.dtype(F))
                close(descriptor)

            os.close = closing
            with pytest.raises(ZeroDivisionError), store:
                raise ZeroDivisionError("on purpose")
            os.close = close
            job.detect_losses()
        assert path.stat().st_size == 0
        assert "pidfd" not in " ".join(os.readlink(link) for link in links_of_descriptors())
        return 0.0
    value = np.ones(3, F)
    hear()
    store.pushpull("w", value)
    store.close()
    return float(value[0])


def links_of_descriptors() -> list[Path]:
    """The open descriptors of this process."""
    return [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]


def holds_the_lock(lost: bool) -> list[str]:
    """Worker 1 stays within the region's lock, as if the system lets it wait for memory."""
    from kvstore import waiting
    from kvstore.stores.shared.native import _shared as shm

    store = kv.create("shared")
    job, kind = store._backend._job, np.dtype(F)
    if store.rank == 2:
        tell("in")
        hear()  # until it is killed
    provoke(store) if lost else store.barrier()
    if store.rank == 1:
        with shm.RegionLock(job):
            tell("holds")
            hear()
        return []
    hear()
    waiting.NOTICE_AFTER, job.timeout, warnings = 0.0, 0.5, Warnings()
    with pytest.raises(kv.TimeoutError) as caught:
        job.empty((10,), kind)
    tell("gave up")
    hear()
    job.timeout = 20.0
    job.empty((10,), kind)
    return [str(caught.value), *warnings.texts]


def waits_for_a_key(how: str) -> list[float]:
    """Worker 0 makes no more keys: another one does, although it waits for that already."""
    from kvstore.stores.shared import values

    store = kv.create("shared", on_peer_loss="continue")
    store.init("w", np.zeros(3, F))
    if store.rank == 0:
        hear()
        store.close()
        return []
    wait = values.StoredValues._await_key

    def told(*arguments: Any) -> None:
        tell("waits")
        wait(*arguments)

    values.StoredValues._await_key = told  # type: ignore[method-assign]
    out = np.zeros(3, F)
    store.init("late", np.full(3, store.rank, F))
    store.pull("late", out=out)
    store.close()
    return out.tolist()


def leaves_well(rank: int) -> None:
    """A worker that closes its store, or just ends, is not lost: rounds continue without it."""
    store = kv.create("shared")
    store.init("w", np.zeros(3, F))
    if store.rank == rank:
        store.barrier()
        if rank % 2:
            store.close()
        return
    store.barrier()
    for _ in range(5):
        value = np.ones(3, F)
        store.pushpull("w", value)
        if value[0] == store.num_workers - 1:
            break
    assert value[0] == store.num_workers - 1
    store.close()


def forks() -> None:
    """The child has no part in the job, and no worker notices its end."""
    store = kv.create("shared")
    store.init("w", np.zeros(40_000, F))
    home = store.empty("w")
    for t in range(3):
        store.push("w", np.full(40_000, t, F))
        child = os.fork()
        if child == 0:
            try:
                for call in (
                    lambda: store.push("w", np.ones(40_000, F)),
                    lambda: store.pull("w", out=np.ones(40_000, F)),
                    lambda: store.pushpull("w", home),
                    store.barrier,
                    lambda: store.init("v", np.ones(3, F)),
                    store.join,
                    lambda: store.empty("w"),
                ):
                    with pytest.raises(kv.KVStoreError, match="fork"):
                        call()
                store.close()
                if t == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            if t == 0:
                os._exit(0)
            sys.exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == (-9 if t == 1 else 0)
        assert (store.view("w") == t * store.num_workers).all()
    value = np.ones(40_000, F)
    store.pushpull("w", value)
    assert (value == store.num_workers).all()
    store.barrier()
    store.close()


# ------------------------------------------------------------------------------------------------- hunger


def starved(limit: str) -> str:
    """A key that does not fit is an error of worker 0, and the store can be used afterwards."""
    if limit == "RLIMIT_AS":
        limit_memory(512 << 20)
    store = kv.create("shared")
    store.init("w", np.zeros(20_000, F))
    sizes = {"machine": 1 << 44, "RLIMIT_AS": 1 << 28, "RLIMIT_FSIZE": 1 << 23}
    huge = np.broadcast_to(np.zeros((), F), sizes[limit])
    caught = ""
    if store.rank == 0:
        if limit == "RLIMIT_FSIZE":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, 16 << 20))
        with pytest.raises((MemoryError, kv.ConfigError)) as error:
            store.init("huge", huge)
        caught = type(error.value).__name__
        assert list(store.keys()) == ["w"]
    for _ in range(3):
        value = np.ones(20_000, F)
        store.pushpull("w", value)
        assert (value == store.num_workers).all()
    store.init("small", np.ones(3, F))
    store.barrier()
    store.close()
    return caught


def starved_rows() -> list[int]:
    """A table grows until nothing is left for it: that round fails, and other rounds do not."""
    shape, more = (10**13, 4), 4000
    store = kv.create("shared")
    store.init("w", kv.RowSparseArray.zeros(shape))
    store.set_optimizer(kv.optimizer.SGD(learning_rate=-1, momentum=MOMENTUM, lazy_update=True))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store.barrier()
    most = store._backend._job.reserved() + (16 << 20)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    store.barrier()
    t = 0
    with pytest.raises(kv.UpdaterError, match="no memory for"):
        for t in range(1000):
            push_more_rows(store, shape, more, t)
            store.view("w")
    view = store.view("w")
    assert len(view.indices) == t * more
    assert np.unique(view.data).tolist() == [store.num_workers]
    push_more_rows(store, shape, more, 0)
    after = store.view("w").data
    assert np.unique(after[:more]).tolist() == [store.num_workers * (2 + MOMENTUM)]
    assert np.array_equal(after[more:], view.data[more:])
    store.barrier()
    store.close()
    return [t]


def push_more_rows(store: Any, shape: tuple[int, ...], more: int, t: int) -> None:
    ids = np.arange(t * more, (t + 1) * more) * 10**6
    store.push("w", kv.RowSparseArray(np.ones((more, shape[1]), F), ids, shape))


def one_can_address_less(rank: int) -> None:
    """The region grows no further than every worker can map it."""
    if int(os.environ["KVSTORE_RANK"]) == rank:
        limit_memory(512 << 20)
    store = kv.create("shared")
    store.init("w", np.zeros(20_000, F))
    if store.rank == 0:
        with pytest.raises(MemoryError):
            store._backend._job.empty((1 << 30,), np.dtype(np.uint8))
        store._backend._job.empty((100 << 20,), np.dtype(np.uint8))[:] = 1
    store.barrier()
    store.init("small", np.ones(3, F))
    value = np.ones(20_000, F)
    store.pushpull("w", value)
    assert (value == store.num_workers).all()
    assert (store.view("small") == 1).all()
    store.close()


def limit_memory(more: int) -> None:
    """Allow this process so much more address space than it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))


def few_files(rank: int) -> None:
    """A worker has no file descriptors left after it has joined; it still notices the others' deaths."""
    store = kv.create("shared")
    store.init("w", np.zeros(20_000, F))
    if store.rank == rank:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    value = np.ones(20_000, F)
    store.pushpull("w", value)
    tell("ready")
    with pytest.raises(kv.PeerLostError):
        while True:
            store.pushpull("w", value)
    store.close()


def bring_in_shared() -> None:
    """Import what `create("shared")` imports: a limit set for the store must not stop its modules."""
    importlib.import_module("kvstore.stores.shared.backend")


def few_files_at_first() -> str:
    """There are too few descriptors to create a store."""
    bring_in_shared()
    resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))
    with pytest.raises((kv.KVStoreError, OSError, MemoryError)) as caught:
        kv.create("shared", timeout=3)
    return str(caught.value)


def no_room_to_map() -> str:
    """The address space is too small for any region."""
    bring_in_shared()
    limit_memory(1 << 20)
    with pytest.raises((MemoryError, kv.KVStoreError)) as caught:
        kv.create("shared", timeout=3)
    return type(caught.value).__name__


# ------------------------------------------------------------------------------------------- other processes


def sums_once(value: float) -> float:
    """A job of its own."""
    store = kv.create("shared")
    store.init("w", np.zeros(30_000, F))
    tell("in")
    hear()
    array = np.full(30_000, value, F)
    for _ in range(20):
        array[...] = value
        store.pushpull("w", array)
    store.barrier()
    store.close()
    return float(array[7])


def refused(error: str, uid: int = 0, on_peer_loss: str = "raise", timeout: float = 2.0) -> str:
    """Creating the store must end in an error, and leave nothing."""
    if uid:
        os.setuid(uid)
    bring_in_shared()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(getattr(kv, error)) as caught:
        kv.create("shared", timeout=timeout, on_peer_loss=on_peer_loss)
    assert os.listdir("/proc/self/fd") == before
    return str(caught.value)


def computes_meanwhile(told: bool) -> str:
    """A worker dies, and may be restarted, before this worker's next call, or after its error."""
    store = kv.create("shared")
    store.init("w", np.zeros(3, F))
    store.pushpull("w", np.ones(3, F))
    tell("computes")
    hear()
    if told:
        provoke(store)
        tell("told")
        hear()
    with pytest.raises(kv.PeerLostError) as caught:
        store.pushpull("w", np.ones(3, F))
    assert (store.view("w") == store.num_workers).all()
    store.close()
    return str(caught.value)


def sits(seconds: float = 20, on_peer_loss: str = "raise") -> None:
    """Create a store, say so, and wait for the test."""
    store = kv.create("shared", timeout=seconds, on_peer_loss=on_peer_loss)
    tell("in")
    hear()
    store.close()


def forks_and_stays() -> None:
    """A child of this process outlives it, for a while."""
    store = kv.create("shared", on_peer_loss="continue")
    if os.fork() == 0:
        os.close(1)
        time.sleep(2)
        os._exit(0)
    tell("in")
    hear()
    store.close()


def squats(name: str, uid: int) -> None:
    """Another user's process takes the name that worker 0's socket would have."""
    os.setuid(uid)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as taken:
        taken.bind(name.encode())
        taken.listen(5)
        tell("squats")
        hear()


def interrupted(where: str) -> float:
    """Ctrl-C during a wait for a worker that is absent; the store continues as without it."""
    store, size = kv.create("shared"), 100 if where == "rest of small sums" else 40_000
    store.init("w", np.zeros(size, F))
    if store.rank == 1:
        hear()
        store.push("w", np.ones(size, F))
        if where == "barrier":
            store.barrier()
        store.pushpull("w", np.ones(size, F))
        store.close()
        return 0.0
    work, sums = None, np.ones(size, F)
    if where.startswith("rest of"):
        work = start_pushpull(store, ["w"], [sums], waits=True)
    else:
        store.push("w", sums)
    with pytest.raises(KeyboardInterrupt):
        tell("waits")
        if where == "barrier":
            store.barrier()
        elif where == "pull":
            store.pull("w", out=np.zeros(size, F))
        elif work is not None:
            work.wait()
        else:
            store.join()
    at = time.monotonic()
    tell("interrupted")
    if work is not None:
        assert not work.done()
        work.wait()
        assert (sums == 2).all()
    value = np.ones(size, F)
    store.pull("w", out=value)
    assert (value == 2).all()
    value[...] = 1
    store.pushpull("w", value)
    assert (value == 2).all()
    store.close()
    return at


def _once(owner: Any, name: str, before: bool) -> None:
    """Have Ctrl-C arrive once as a method is called, or returns: as a signal does, between two steps."""
    real = getattr(owner, name)

    def interrupted(*arguments: Any) -> Any:
        delattr(owner, name)
        if not before:
            real(*arguments)
        raise KeyboardInterrupt

    setattr(owner, name, interrupted)


def _interrupted_push(store: Any, value: Array, owner: Any, name: str) -> None:
    """Push on both workers, with Ctrl-C as worker 0, which has arrived last, calls that method of `owner`."""
    if store.rank == 1:
        store.push("w", value)
        tell("has pushed")
        hear()
        return
    hear()
    _once(owner, name, before=True)
    with pytest.raises(KeyboardInterrupt):
        store.push("w", value)
    tell("is interrupted")


def interrupted_as_it_opens(size: int, then: str) -> list[float]:
    """Ctrl-C between the opening of a round and its update, on the worker that has arrived last."""
    store = kv.create("shared")
    store.init("w", np.zeros(size, F))
    store.set_optimizer(kv.optimizer.SGD(learning_rate=-1.0))
    value, seen = np.ones(size, F), []
    _interrupted_push(store, value, store._backend._waiter, "_prepare_work")
    if store.rank == 0 and then == "view":
        seen.append(float(store.view("w")[-1]))
    for _ in range(2):
        store.pushpull("w", value, out=(out := np.zeros(size, F)))
        seen.append(float(out[-1]))
    store.close()
    return seen[-2:]


def interrupted_as_it_fails(size: int) -> list[float]:
    """Ctrl-C while the error of an updater is handled, on the worker that has arrived last."""
    store = kv.create("shared")
    store.init("w", np.zeros(size, F))
    calls = []
    is_interrupted = store.rank == 0  # the update is made anew by either worker, perhaps by its first call

    def raises_once(key: str, merged: Array, weight: Array) -> None:
        calls.append(key)
        if is_interrupted and len(calls) == 1:
            raise RuntimeError
        weight += merged

    store.set_updater(raises_once)
    _interrupted_push(store, np.ones(size, F), store._backend._updater, "_rule_name")
    store.pull("w", out=(out := np.zeros(size, F)))
    store.close()
    return [float(out[-1]), len(calls)]


def interrupted_and_idle(kind: str, owner: str, name: str) -> bool:
    """Ctrl-C while worker 0 carries out the round that it has opened; the other has the result at once."""
    shape = (300, 4)
    value: Any = np.arange(1200, dtype=F).reshape(shape) / 1000
    if kind in ("rows", "table", "rows without an optimizer"):
        ids = np.arange(0, 300, 7)
        value = kv.RowSparseArray(value[ids], ids, shape)
    start: Any = kv.RowSparseArray(np.zeros((0, 4), F), np.zeros(0, np.int64), shape)
    made = {"shared": kv.create("shared", timeout=20), "local": kv.create("local", processes=1)}
    for one in made.values():
        one.init("w", start if kind == "table" else np.zeros(shape, F))
        if "without" not in kind:
            one.set_optimizer(kv.optimizer.create("lamb" if kind == "lamb" else "adam", learning_rate=0.1))
    store, out, wanted = made["shared"], np.zeros(shape, F), np.zeros(shape, F)
    if store.rank == 1:
        store.push("w", value)
        tell("has pushed")
        hear()
    else:
        _interrupted_push(store, value, getattr(store._backend, owner), name)
        hear()
    store.pull("w", out=out, ignore_sparse=False)
    made["local"].push("w", [value, value])
    made["local"].pull("w", out=wanted, ignore_sparse=False)
    return bool((out == wanted).all())


def closes_in_its_updater() -> float:
    """The updater of worker 0, which has arrived last, closes its store; the other makes the update."""
    store = kv.create("shared", timeout=20)
    store.init("w", np.zeros(10, F))
    calls = []

    def updater(key: str, merged: Array, weight: Array) -> None:
        calls.append(key)
        if store.rank == 0:
            store.close()
        weight += merged

    store.set_updater(updater)
    store.barrier()
    if store.rank == 0:
        hear()
    with contextlib.suppress(kv.ClosedError):
        store.push("w", np.ones(10, F))
    if store.rank == 0:
        with pytest.raises(kv.ClosedError):
            store.pull("w", out=np.zeros(10, F))
        return float(len(calls))
    tell("has pushed")
    hear()
    store.pull("w", out=(out := np.zeros(10, F)))
    store.close()
    return float(out[-1])


def interrupted_as_it_assigns(before: bool, folder: str) -> list[float]:
    """Ctrl-C as a value is put in the place of another."""
    store = kv.create("shared")
    store.init("w", np.zeros(100, F))
    store.barrier()
    if store.rank == 0:
        store.save(f"{folder}/values")
        _once(store._backend._waiter, "wait", before)
        with pytest.raises(KeyboardInterrupt):
            store.load(f"{folder}/values")
    store.pull("w", out=(out := np.full(100, -1, F)))
    seen = [float(out[-1])]
    for _ in range(2):
        store.pushpull("w", np.ones(100, F), out=out)
        seen.append(float(out[-1]))
    store.close()
    return seen


def stopped_within_a_call(rows: bool) -> str:
    """Worker 1 is stopped while it waits for the sum of a round; worker 0 continues without it."""
    store = kv.create("shared", on_peer_loss="continue")
    store.init("w", np.zeros((3, 2), F))
    value = np.ones((3, 2), F)
    pushed: Any = kv.RowSparseArray(value, np.arange(3), (3, 2)) if rows else value
    if store.rank == 1:
        tell("pushes")
        try:
            store.pushpull("w", pushed, out=value)
        except kv.FencedError as error:
            return type(error).__name__
        return f"{value}"
    hear()
    for _ in range(3):
        store.push("w", pushed)
        store.pull("w", out=value)
    tell("went on")
    store.close()
    return ""


def stops() -> None:
    """Stop this process, as SIGSTOP from outside would; it continues where it was."""
    tell("stops")
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped_at_work(where: str, loss: str) -> list[float]:
    """Worker 2 opens a round, or takes the lock, and is stopped; the value that the others read stays."""
    OtherProcesses.dead_after = float(os.environ["KVSTORE_TIMEOUT"]) / 10  # of one reading of the load
    store = kv.create("shared", on_peer_loss=loss, group="stopped")
    one: Any = np.ones(8, F)
    if where == "rows":
        one = kv.RowSparseArray(np.ones((4, 2), F), np.arange(4), (4, 2))
    store.init("w", kv.RowSparseArray.zeros((4, 2)) if where == "rows" else np.zeros(8, F))

    def update(key: str, gradient: Any, weight: Array) -> None:
        weight += 1
        if store.rank == 2:
            stops()
        weight += 1

    if where != "lock":
        store.set_updater(update)
    if store.rank == 2:
        hear()
        if where == "lock":
            with shm.RegionLock(store._backend._job):
                stops()
    store.push("w", one)
    tell("pushed")
    hear()
    try:
        store.barrier()  # which does not wait for worker 2 any more, or raises
    except kv.PeerLostError:
        assert loss == "raise"
    reads = [largest(store, where)]
    tell("read")
    hear()
    reads.append(largest(store, where))
    store.close()
    return reads


def largest(store: Any, where: str) -> float:
    """Return the largest element of the key, by a read."""
    if where == "rows":
        out = kv.RowSparseArray.zeros((4, 2))
        store.row_sparse_pull("w", out=out, row_ids=np.arange(4))
        return float(out.data.max())
    dense = np.empty(8, F)
    store.pull("w", out=dense)
    return float(dense.max())


def stopped() -> str:
    """Work until a peer is lost, or until this process was fenced itself."""
    store = kv.create("shared")
    store.init("w", np.zeros(40_000, F))
    store.pushpull("w", np.ones(40_000, F))
    tell("ready")
    with pytest.raises((kv.PeerLostError, kv.FencedError)) as caught:
        while True:
            store.pushpull("w", np.ones(40_000, F))
    if isinstance(caught.value, kv.FencedError):
        for read in (lambda: store.view("w"), lambda: store.pull("w", np.empty(40_000, F))):
            with pytest.raises(kv.FencedError):
                read()
    else:
        assert (store.view("w") == store.num_workers).all()
    with pytest.raises(type(caught.value)):
        store.push("w", np.ones(40_000, F))
    store.close()
    return type(caught.value).__name__


def stands_still(rounds: int) -> float:
    """Make so many rounds, in which all processes may be stopped for some time."""
    with kv.create("shared") as store:
        store.init("w", np.zeros(40_000, F))
        tell("ready")
        value = np.ones(40_000, F)
        for _ in range(rounds):
            out = np.empty_like(value)
            store.pushpull("w", value, out=out)
            assert (out == store.num_workers).all()
            time.sleep(0.001)
        return float(out[0])


# --------------------------------------------------------------------------------------------------- soak


def soak(seconds: float) -> dict[str, list[int]]:
    """Mixed traffic; return the resources of the process and the job after a warm-up and at the end."""
    traffic = Traffic(1)
    flags = kv.create("shared", group="flags")
    flags.init("go on", np.zeros(1, F))
    end = time.monotonic() + seconds
    marks, first = [], time.monotonic() + seconds / 4
    while True:
        go_on = np.array([time.monotonic() < end], F)
        flags.pushpull("go on", go_on)  # all stop together
        for _ in range(5):
            traffic.round()
        if not marks and time.monotonic() > first:
            marks.append(held(traffic))
        if go_on[0] < flags.num_workers:
            break
    marks.append(held(traffic))
    flags.barrier()
    return {"marks": marks, "rounds": [traffic.t]}


def held(traffic: Traffic) -> list[int]:
    """KiB of memory of its own and of the jobs, descriptors, threads."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    own = int(status.split("RssAnon:")[1].split()[0])
    reserved = sum(store._backend._job.reserved() for store in traffic.stores) // 1024
    return [own, reserved, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]


def gives_up(size: int) -> None:
    """Worker 0 waits in vain with memory that it then releases to the system; worker 1 is too late."""
    late = kv.create("shared", group="rank").rank == 1
    store = kv.create("shared", timeout=20 if late else 2)
    store.init("w", np.full(size, 5, F))
    out = np.zeros(size, F)
    if late:
        hear()
        with pytest.raises(kv.KVStoreError, match="worker 0 gave up waiting"):
            store.push("w", np.ones(size, F))
            store.pull("w", out=out)
    else:
        memory = mmap.mmap(-1, 4 * size)
        value = np.frombuffer(memory, F)
        with pytest.raises(kv.TimeoutError):
            store.pushpull("w", value)
        del value
        memory.close()
        tell("gone")
        hear()
        with pytest.raises(kv.KVStoreError, match="worker 0 gave up waiting"):
            store.pull("w", out=out)
    assert not out.any()
    store.pull("w", out=out)
    assert (out == 5).all()
    store.push("w", np.ones(size, F))
    store.pull("w", out=out)
    assert (out == 2).all()
    tell("done")
    hear()


# ------------------------------------------------------------------------------------ keys of one call


def die_after(arrivals: int) -> None:
    """Be killed at the arrival after so many."""
    from kvstore.stores.shared.native import _shared as shm

    left = [arrivals]

    def counted(arrive: Any) -> Any:
        def run(*arguments: Any) -> None:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            arrive(*arguments)

        return run

    for name in ("arrive_with_slot", "arrive_with_copy", "arrive_privately", "arrive_with_rows"):
        setattr(shm, name, counted(getattr(shm, name)))


CALL = {"a": 1000, "b": 40_000, "c": 10, "d": 70_000}


def dies_within_a_call(arrivals: int, folder: str) -> list[float]:
    """Worker 1 dies between two keys of a push; the others read one round of all keys."""
    store = kv.create("shared")
    store.init(list(CALL), [np.zeros(n, F) for n in CALL.values()])
    store.init("rows", kv.RowSparseArray.zeros(TABLE))
    store.set_optimizer(kv.optimizer.SGD(learning_rate=RATE))
    keys, values = [*CALL, "rows"], [np.ones(n, F) for n in CALL.values()]
    values.append(kv.RowSparseArray(np.ones((TABLE[0], TABLE[1]), F), np.arange(TABLE[0]), TABLE))
    outs = [np.empty(n, F) for n in CALL.values()] + [np.empty(TABLE, F)]
    for _ in range(3):
        store.push(keys, values)
        store.pull(keys, out=outs)
    if store.rank == 1:
        die_after(arrivals)
    with pytest.raises(kv.PeerLostError):
        for _ in range(3):
            store.push(keys, values)
            store.pull(keys, out=outs)
    store.pull(keys, out=outs)
    path = Path(folder) / f"{store.rank}.safetensors"
    store.save(path)
    with kv.create("local", processes=1) as local:
        local.load(path)
        for key, out in zip(keys, outs, strict=True):
            assert np.array_equal(local.view(key).data if key == "rows" else local.view(key), out)
    store.close()
    return sorted({float(x) for out in outs for x in np.unique(out)})


def keys_of_two_rounds(folder: str, optimizer: bool) -> None:
    """Worker 1 dies when it has pushed a copy of one key and the place of another, which dies with it.

    A sum is rolled back by a round, so that all keys are of one round; the update of an optimizer is not.
    """
    from kvstore.stores.shared.waiting import RoundWaiter

    store = kv.create("shared")
    keys, path = ["c", "d"], Path(folder) / "values"
    outs = [np.empty(CALL[key], F) for key in keys]
    store.init(keys, [np.zeros(CALL[key], F) for key in keys])
    store.pushpull(keys, [np.ones(CALL[key], F) for key in keys], out=outs)
    if store.rank == 1:
        RoundWaiter.complete = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    else:
        assert hear() == "dead"
        if optimizer:
            store.set_optimizer(kv.optimizer.SGD(learning_rate=1))
    with pytest.raises(kv.KVStoreError):
        store.pushpull(keys, [np.full(CALL[key], 5, F) for key in keys], out=outs)
    provoke(store)
    if optimizer:
        for read in (lambda: store.pull(keys, out=outs), lambda: store.save(path)):
            with pytest.raises(kv.PeerLostError, match=r"'c' of round 2, 'd' of round 1") as caught:
                read()
            assert caught.value.rank == 1
        assert not path.exists()
    else:
        store.pull(keys, out=outs)
        assert {float(x) for out in outs for x in np.unique(out)} == {2}
        store.save(path)
    for key, out, want in zip(keys, outs, (2 - 10 if optimizer else 2, 2), strict=True):
        store.pull(key, out=out)
        assert (out == want).all()
        assert (store.view(key) == want).all()
    store.close()


def reads_wait_for_who_works() -> float:
    """Worker 2 dies while worker 1 does the update; worker 0 gets an error, and reads the update."""
    store = kv.create("shared")
    store.init("w", np.zeros(50, F))
    store.barrier()

    def add(key: Any, merged: Any, weight: Any) -> None:
        assert store.rank == 1
        tell("works")
        hear()
        weight += merged

    store.set_updater(add)
    if store.rank == 1:
        hear()
    store.push("w", np.ones(50, F))
    tell("pushed")
    out = np.empty(50, F)
    if store.rank == 0:
        with pytest.raises(kv.PeerLostError):
            store.barrier()
        tell("told")
    elif store.rank == 2:
        time.sleep(100)
    store.pull("w", out=out)
    assert (out == out[0]).all()
    return float(out[0])


def calls_until_lost(seed: int, folder: str) -> dict[str, Any]:
    """Calls with several keys until a peer dies: then all keys are of one round."""
    draw = random.Random(seed)
    stores = [kv.create("shared"), kv.create("shared")]
    keys, t = list(CALL), 0
    outs = [np.empty(n, F) for n in CALL.values()]
    for store in stores:
        store.init(keys, [np.zeros(n, F) for n in CALL.values()])
    stores[1].set_optimizer(kv.optimizer.create("test", learning_rate=-1))
    tell("ready")
    with pytest.raises(kv.PeerLostError):
        while True:
            t += 1
            for store in stores:
                values = [np.full(n, 1 if store is stores[1] else t, F) for n in CALL.values()]
                if draw.random() < 0.5:
                    store.push(keys, values)
                    store.pull(keys, out=outs)
                else:
                    store.pushpull(keys, values, out=outs)
    seen = []
    for i, store in enumerate(stores):
        provoke(store)
        store.pull(keys, out=outs)
        store.save(Path(folder) / f"{store.rank}-{i}.safetensors")
        assert len({float(x) for out in outs for x in np.unique(out)}) == 1, (i, t, outs)
        for key, out in zip(keys, outs, strict=True):
            store.pull(key, out=out)
            assert len(np.unique(out)) == 1, (i, key, t, np.unique(out))
            seen.append(float(out[0]) / store.num_workers)
        store.close()
    assert set(seen) <= {t - 1, t}, (seen, t)
    return {"seen": seen}


# ------------------------------------------------------------------------------- leaving without a word


class Warnings(logging.Handler):
    """The warnings of the store."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("kvstore.shared").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def leaves_early(how: str, size: int) -> list[str]:
    """Worker 1 ends after five rounds; the others do ten."""
    warnings, store = Warnings(), kv.create("shared")
    store.init(["v", "w"], [np.zeros(size, F)] * 2)
    out = np.empty(size, F)
    for t in range(10):
        if t == 5 and store.rank == 1:
            if how == "join":
                store.join()
            if how == "close":
                store.close()
            elif how == "with":
                with store:
                    pass
            elif how == "exit":
                sys.exit(0)
            return warnings.texts
        for key in ("w", "v"):
            store.pushpull(key, np.ones(size, F), out=out)
            assert (out == (store.num_workers if t < 5 else store.num_workers - 1)).all()
        if t == 4:
            tell("half")
            if store.rank != 1:
                hear()
    store.close()
    return warnings.texts


def ends_in_its_own_time(seed: int) -> list[str]:
    """An ordinary end: the last round, and then every worker ends at any time."""
    draw = random.Random(seed * 100 + int(os.environ["KVSTORE_RANK"]))
    warnings, store = Warnings(), kv.create("shared")
    keys, rounds = ["v", "w"], random.Random(seed).randint(1, 20)
    sizes = [random.Random(seed + 1).choice([3, 1000, 40_000]) for _ in keys]
    store.init(keys, [np.zeros(n, F) for n in sizes])
    outs = [np.empty(n, F) for n in sizes]
    for _ in range(rounds):
        if draw.random() < 0.2:
            time.sleep(draw.random() * 0.01)
        for key, n, out in zip(keys, sizes, outs, strict=True):
            store.pushpull(key, np.ones(n, F), out=out)
            assert (out == store.num_workers).all()
    time.sleep(draw.random() * 0.02)
    if draw.random() < 0.5:
        store.pull(keys, out=outs)
    if draw.random() < 0.5:
        store.close()
    return warnings.texts
