"""What workers that sum by hosts do in the tests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import own_rules
import pace
import pytest
from jobs import hear, tell
from references import Array, dtype_of
from tested_store import create, hosts

import kvstore as kv
from kvstore.stores.hierarchy import pusher
from kvstore.stores.shared.rows import SparseKeys

F = np.float32


def pushed_and_pulled(store: kv.KVStore, rounds: int, call: Callable[[int, Any], None]) -> tuple[Any, Any]:
    """Do so often what pushes and pulls a key of four slices; return the statistics before and after."""
    n = 4 * 32768
    store.init("w", np.zeros(n, F))
    store.barrier()
    before = store.statistics()
    for t in range(rounds):
        out = np.full(n, t, F)
        call(t, out)
        assert (out == t * store.num_workers).all()
    after = store.statistics()
    store.barrier()
    return before, after


def counted(rounds: int) -> dict[str, Any]:
    """Push and pull; return the counts of this worker."""
    with create() as store:

        def call(t: int, out: Any) -> None:
            push_and_pull(store, "pushpull" if t % 3 else "push", out)

        before, after = pushed_and_pulled(store, rounds, call)
        return {
            "rounds": after.rounds - before.rounds,
            "sent": sum(after.sent) - sum(before.sent),
            "received": sum(after.received) - sum(before.received),
        }


def empty_tables() -> None:
    with create() as store:
        for at, shape in enumerate([(0, 3), (0,), (5, 0)]):
            rows, key = kv.RowSparseArray.zeros(shape), f"t{at}"
            store.init(key, rows)
            for _ in range(3):
                store.push(key, rows)
            store.pull(key, out=np.zeros(shape, F))
            store.pull(key, out=rows)  # is ignored, and waits for no worker
        store.barrier()


def rows_to_servers(rounds: int) -> int:
    """Bytes that this worker has sent to servers, where all push the same rows."""
    with create() as store:
        shape, ids = (900, 50), np.arange(0, 900, 3)
        store.init("t", kv.RowSparseArray.zeros(shape))
        rows = kv.RowSparseArray(np.ones((300, 50), F), ids, shape)
        store.barrier()
        before = sum(store.statistics().sent)
        for _ in range(rounds):
            store.push("t", rows)
        store.row_sparse_pull("t", out=rows, row_ids=ids)
        assert (rows.data == store.num_workers).all()
        store.barrier()  # the pushes of all workers have been sent
        sent = sum(store.statistics().sent) - before
        store.barrier()
        return int(sent)


def by_way(rounds: int) -> dict[str, Any]:
    """Push and pull; return the messages by way, and the memory that sums keep."""
    with create() as store:
        before, after = pushed_and_pulled(store, rounds, lambda t, out: store.pushpull("w", out))
        pool = store._backend._client.host_pool
        found = {
            name: [now - then for now, then in zip(getattr(after, name), getattr(before, name), strict=True)]
            for name in ("sent", "received")
        }
        return {**found, "kept": 0 if pool is None else pool.nbytes}


def close_ahead(pushes: list[int], codec: dict[str, Any], joins: bool = False, kind: str = "float32") -> None:
    """Push so often, and close; the last worker begins when the others have closed, and reads each round.

    If one `joins`, it is the second worker, which begins when the first has closed. A row-sparse key has one
    row of each worker's, and one that all push.
    """
    keys, dtype, shape = {"small": 5, "large": 40_000}, dtype_of(kind), (9, 4)
    with create() as store:
        store.init(list(keys), [np.zeros(n, dtype) for n in keys.values()])
        if not codec:
            store.init("rows", kv.RowSparseArray.zeros(shape, dtype))
        if codec:
            store.set_gradient_compression(codec)
        store.barrier()
        last = store.rank == store.num_workers - 1
        if last or (joins and store.rank == 1):
            tell("waits")
            hear()
        for t in range(1, pushes[store.rank] + 1):
            store.push(list(keys), [np.full(n, t * 10**store.rank, dtype) for n in keys.values()])
            if not codec:
                part = np.full((2, 4), t * 10**store.rank, dtype)
                store.push("rows", kv.RowSparseArray(part, [0, 1 + store.rank], shape))
            if not last:
                continue
            outs = [np.empty(n, dtype) for n in keys.values()]
            store.pull(list(keys), out=outs)
            if not codec:
                rows = kv.RowSparseArray.zeros(shape, dtype)
                store.row_sparse_pull("rows", out=rows, row_ids=np.array([0]))
                outs.append(rows.data)
            want = sum(t * 10**rank for rank, often in enumerate(pushes) if often >= t)
            assert all((out == want).all() for out in outs), (t, want, list(map(np.unique, outs)))
        if joins and store.rank:
            store.join()


def waits_alone() -> list[str]:
    """Meet the other workers, which are late; return the threads that served the sockets in each turn."""
    with create() as store:
        store.init("w", np.zeros(5, F))
        store.barrier()
        driver, turns = store._backend._client.driver, []
        handle = driver._handle

        def noted(timeout: float) -> None:
            turns.append(threading.current_thread().name)
            handle(timeout)

        driver._handle = noted
        tell("waits")
        if store.rank:
            hear()
        store.barrier()
        driver._handle = handle
    return turns


def without_memory() -> None:
    """The worker that carries the sum has no memory to pack it: no worker of the host waits for it."""
    with create() as store:
        store.init("w", np.zeros(5, F))
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5})

        def refused(*_: Any) -> Any:
            raise MemoryError("on demand")

        store._backend._carrier.packing.pack = refused
        with pytest.raises(kv.KVStoreError, match="on demand"):
            store.pushpull("w", np.ones(5, F))
        tell("told")
        hear()  # once a worker has left, another one carries its sums on


def set_again(times: int) -> None:
    """Set codecs while a slow worker learns of them late: that is no disagreement."""
    with create() as store:
        store.init("w", np.zeros(5, F))
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        if store.rank:
            hear()
        for t in range(times):
            store.set_gradient_compression({"type": "2bit", "threshold": 0.25 * (1 + t % 3)})
        if store.rank == 0:
            tell("set")
        threshold = 0.25 * (1 + (times - 1) % 3)
        store.pushpull("w", out := np.full(5, threshold, F))
        assert (out == threshold * len(set(hosts()))).all(), out
        store.barrier()


def several_stores(rounds: int) -> None:
    """Hold three stores at once, in two groups, one of them without rounds, and use them in turn."""
    stores = [create(), kv.create("dist_async"), create(group="other")]
    for store in stores:
        store.init("w", np.zeros(40_000, F))
    for t in range(1, rounds + 1):
        works = []
        for at, store in enumerate(stores):
            value = np.full(40_000, t * (at + 1), F)
            if at == 1:
                store.push("w", value)
            else:
                works.append((at, value, store.pushpull("w", value, async_op=True)))
        for at, value, work in reversed(works):
            work.wait(60)
            assert (value == t * (at + 1) * store.num_workers).all()
    for store in stores:
        store.barrier()
    out = np.empty(40_000, F)
    stores[1].pull("w", out=out)
    assert (out == 2 * rounds).all()
    for store in stores:
        store.close()


def raising_pushes(verb: str, arrives: bool) -> None:
    """Rank 0 pushes, and the host's memory refuses it: it counts there if the worker had arrived before."""
    keys, outs = ["a", "b"], [np.empty(40_000, F), np.empty(3, F)]
    values = [np.ones_like(out) for out in outs]
    with create() as store:
        store.init(keys, [np.zeros_like(out) for out in outs])
        ours = store._backend
        pushes, begin = ours._flat.pushes, ours._region.begin

        def refused(*arguments: Any) -> Any:
            if arrives:
                begin(*arguments)
            raise MemoryError("on demand")

        def push() -> None:
            if verb == "pushpull":
                store.pushpull(keys, values, out=outs)
            elif (work := store.push(keys, values, async_op=verb == "async push")) is not None:
                work.wait()

        if store.rank == 0:
            ours._region.begin = refused
            with contextlib.suppress(MemoryError):
                push()
            ours._region.begin = begin
            counted = [ours._flat.directory.get(key).pushes for key in keys]
            assert (counted, pushes.made, pushes.optimizer.clock.time) == ([arrives] * 2, arrives, arrives)
            assert ours._fresh == (set(keys) if arrives else set())
        elif arrives:
            push()
        for _ in range(3):
            push()
        store.pull(keys, out=outs)
        assert all((out == store.num_workers).all() for out in outs)
        assert pushes.made == pushes.optimizer.clock.time == 3 + arrives


def wait_between_portions() -> list[int]:
    """Continue calls when the first slice of each portion is summed; return the numbers of these."""
    opens, waited = pusher.HostPusher._open_rounds, []

    def summed_first(self: Any, handles: list[Any]) -> None:
        opens(self, handles)
        end = pace.deadline(20)
        while handles[0].complete < handles[0].arrived:
            assert time.monotonic() < end, "nobody has opened the round"
            time.sleep(0.001)
        opens(self, handles)  # a look as late as that of a slow worker
        waited.append(handles[0].number)

    pusher._PORTION = 1
    pusher.HostPusher._open_rounds = summed_first  # type: ignore[method-assign]
    return waited


def pushes_in_portions(verb: str) -> int:
    """Push a key of four slices in as many portions; the last worker continues when the first is summed.

    Returns for how many slices it has waited so.
    """
    pusher._PORTION, waited = 1, []
    with create() as store:
        if store.rank == store.num_workers - 1:
            waited = wait_between_portions()
        pushed_and_pulled(store, 3, lambda _, out: push_and_pull(store, verb, out))
    return len(waited)


def push_and_pull(store: kv.KVStore, verb: str, out: Array) -> None:
    if verb == "pushpull":
        store.pushpull("w", out)
    else:
        store.push("w", out)
        store.pull("w", out=out)


def fails_between_portions(verb: str) -> None:
    """The update of the first key fails while a worker is at the next ones: these arrive, and are delivered.

    Of one slice each: no worker waits between portions for a slice that needs all of a key at once.
    """
    shapes: dict[str, tuple[int, ...]] = {"bad": (5,), "good": (20_000,), "rows": (50, 3)}
    with create() as store:
        store.init(list(shapes), [np.zeros(shape, F) for shape in shapes.values()])
        store.set_optimizer(own_rules.FiniteOnly())
        store.barrier()
        if store.rank == 0:
            wait_between_portions()
        rows = kv.RowSparseArray(np.ones((2, 3), F), [0, 1], shapes["rows"])
        values, good = [np.full(5, np.nan, F), np.ones(20_000, F)], np.zeros(20_000, F)
        if verb == "pushpull":
            with pytest.raises(kv.UpdaterError, match="'bad'"):
                store.pushpull(["bad", "good"], values, out=[np.empty(5, F), good])
        else:
            with contextlib.suppress(kv.UpdaterError):  # or a pull of that key would tell
                store.push(list(shapes), [*values, rows])
            store.pull("rows", out=(out := np.empty(shapes["rows"], F)))
            assert (out[:2] == store.num_workers).all()
            store.pull("good", out=good)
        assert (good == store.num_workers).all()
        store.barrier()


def interrupted_by_half(at: str) -> list[str]:
    """Rank 0 is interrupted when half of a push has arrived, and is idle then: the others get an error."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    pusher._PORTION = 1
    with create() as store:
        out, rows = np.ones(4 * 32768, F), kv.RowSparseArray(np.ones((2, 3), F), [0, 1], (5, 3))
        store.init(["w", "t"], [out, np.ones((5, 3), F)])
        tell("ready")
        hear()
        if store.rank == 0:
            what = (pusher.HostPusher, "_open_rounds") if at == "portions" else (SparseKeys, "arrive")
            setattr(*what, interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.push(["w", "t"], [out, rows])
            hear()
        try:
            store.pushpull(["w", "t"], [out, np.ones((5, 3), F)])
        except kv.KVStoreError as error:
            return [type(error).__name__, str(error)]
        return []


def leaves_while_it_carries() -> list[float]:
    """Rank 0 sends its host's sum, and is interrupted in the middle of a step before it has the answer."""
    with create(on_peer_loss="continue") as store:
        store.init("w", np.zeros(5, F))
        client, out = store._backend._client, np.zeros(5, F)
        if store.rank == 1:
            store.push("w", np.ones(5, F))
            tell("pushed")
            hear()
            store.pull("w", out=out)
            return out.tolist()
        hear()
        if store.rank == 2:
            store.pushpull("w", np.full(5, 10, F), out=out)
            return out.tolist()
        store.push("w", np.ones(5, F))
        while not store._backend._carrier._open:
            time.sleep(0.001)
        step = client._machine.step

        def interrupted(*_: Any) -> Any:
            client._machine.step = step
            raise KeyboardInterrupt

        client._machine.step = interrupted
        with contextlib.suppress(KeyboardInterrupt):
            client.num_lost(60)
        while not client.has_failed:  # else the carrier's thread was there first
            time.sleep(0.001)
        with pytest.raises(kv.KVStoreError, match="was interrupted while it counted its requests"):
            store.push("w", np.ones(5, F))
        tell("interrupted")
        return []


def cannot_sum() -> list[Any]:
    """Rank 0 is last, and has no memory to sum: another worker of its host sums, where the job continues."""
    with create(on_peer_loss="continue") as store:
        store.init("w", np.zeros(5, F))
        if store.rank == 0:

            def refused(*_: Any) -> Any:
                raise MemoryError("on demand")

            hear()
            store._backend._carrier._sum_exchange = refused
            with pytest.raises(MemoryError):
                store.pushpull("w", np.ones(5, F))
            with pytest.raises(kv.KVStoreError, match="worker 0 could not carry round 1 of key 'w, slice 0'"):
                store.push("w", np.ones(5, F))
            tell("refused")
            return []
        store.push("w", np.ones(5, F))
        tell("pushed")
        hear()
        store.pull("w", out=(out := np.empty(5, F)))
        store.pushpull("w", again := np.ones(5, F))
        return [out.tolist(), again.tolist()]
