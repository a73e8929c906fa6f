"""The workers of jobs with servers in the tests; `servers.ServedJob` runs these."""

from __future__ import annotations

import contextlib
import ctypes
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import own_rules
import pace
import pytest
from jobs import hear, tell, waits_in
from procs_shared import Digest, assert_same_bits, random_rows, start_of
from quick_counter import Quick
from references import Array, draw, lcg, total
from tested_store import create, held

import kvstore as kv
from kvstore.observe import events as recorded_events
from kvstore.observe.native import _observe as native
from kvstore.settings.parameter_server import ps_config
from kvstore.settings.roles import find as find_roles
from kvstore.store import can_divide_values, start_pushpull
from kvstore.stores.hierarchy.backend import HierarchyBackend
from kvstore.stores.parameter_server.server.loop import ServerLoop
from kvstore.stores.parameter_server.transport import stream_client
from kvstore.stores.parameter_server.transport.channel import DealerChannel
from kvstore.stores.parameter_server.worker.quick_calls import QuickCall

F = np.float32
ALTERED = 300  # the byte of each direction that `Altering` changes: behind the handshake
SIZES = {"small": 50, "edge": 32768, "large": 200_003}


def opened(**options: Any) -> Any:
    store = create(**options)
    store.init(list(SIZES), [lcg(n, 5) for n in SIZES.values()])
    return store


def alone() -> Any:
    local = kv.create("local", processes=1)
    local.init(list(SIZES), [lcg(n, 5) for n in SIZES.values()])
    return local


def gradients(store: Any, key: str, step: int) -> list[Array]:
    return [lcg(SIZES[key], 100 * step + 7 * w, -1, 1) for w in range(store.num_workers)]


def trained(store: Any, local: Any, steps: range) -> None:
    """Rounds of every key, whose weights must be those of `local`."""
    for step in steps:
        for key in SIZES:
            parts = gradients(store, key, step)
            local.push(key, parts)
            out = parts[store.rank].copy()
            store.pushpull(key, out)
            assert_same_bits(out, local.view(key))


def third_push_waits_without_rounds() -> None:
    """Worker 0 pushes to a server that is stopped at the time; worker 1 has pushed before, and more often."""
    store, one = opened(), np.ones(SIZES["small"], F)
    for _ in range(9 * store.rank):
        store.push("small", one)
    store.barrier()
    if store.rank == 0:
        store.push("small", one)
        store.pull("small", out=one.copy())  # the worker now knows the number of the others' pushes, too
        tell("stop")
        hear()
        store.push("small", one)
        store.push("small", one)
        waits_in(store.push, "small", one)  # the third
    store.barrier()
    store.close()


# ------------------------------------------------------------------------------------------------------ bits


def digest_of_everything(codec: str) -> str:
    """Values after some rounds: dense keys, tables, rules that see whole tensors, compression."""
    digest, shape = Digest(), (3000, 100)
    for rule in ("", "sgd", "adam", "lamb", "lars", "sgld"):
        with opened() as store:
            store.init("table", kv.RowSparseArray.zeros(shape))
            if rule:
                store.set_optimizer(kv.optimizer.create(rule, learning_rate=0.1))
            if codec:
                store.set_gradient_compression(
                    {"type": codec, "threshold": 0.4} if codec != "fp16" else {"type": codec}
                )
            for step in range(2):
                for key in SIZES:
                    store.push(key, gradients(store, key, step)[store.rank])
                if not codec:
                    store.push("table", random_rows(shape, 10 * step + store.rank))
            digest.add(*(held(store, key) for key in SIZES))
            digest.add(held(store, "table").todense())
            store.barrier()
    return digest.hex()


def settings_at_any_time(steps: int) -> str:
    """Each worker changes settings at any time, and no worker waits for another one."""
    digest, rng = Digest(), np.random.default_rng()
    with opened() as store:
        store.set_optimizer(kv.optimizer.SGD(learning_rate=0.1, momentum=0.9))
        for step in range(steps):
            if rng.random() < 0.3:
                store.set_learning_rate(float(rng.random()))
            if rng.random() < 0.2:
                store.update_optimizer(rescale_grad=float(rng.random()), wd=float(rng.random()) / 10)
            time.sleep(float(rng.random()) * 0.004)
            for key in SIZES:
                value = gradients(store, key, step)[store.rank]
                store.pushpull(key, value)
                digest.add(value)
        store.barrier()
    return digest.hex()


# ---------------------------------------------------------------------------------------------------- memory


def _bytes_of_memfds() -> int:
    """Memory that this process has in files without a name."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if str(link.readlink()).startswith("/memfd:"):
                total += link.stat().st_size
    return total


def memory_of_arrays(rounds: int) -> None:
    """Arrays of `empty` are made and freed, views outlive them, and each pushed value is read."""
    with opened() as store:
        sum_of_ranks, sizes = sum(range(store.num_workers)), []
        for step in range(rounds):
            array = store.empty("large")
            array[:] = store.rank + step
            view = array[10:20]
            store.push("large", array)
            del array
            out = store.empty("large")
            store.pull("large", out=out)
            assert (out == sum_of_ranks + store.num_workers * step).all()
            assert (view == store.rank + step).all() or (view == out[0]).all()
            sizes.append(_bytes_of_memfds())
        assert sizes[-1] == sizes[9]
        store.barrier()


# --------------------------------------------------------------------------------------------------- threads


def threads_in_opposite_order(size: int, credit: int) -> None:
    """Two threads of each worker wait for rounds that the other worker begins the other way round."""
    with create(timeout=30, credit_bytes=credit) as store:
        names = ["a", "b"][:: 1 if store.rank else -1]
        store.init(names, [np.zeros(size, F)] * 2)
        sums: dict[str, float] = {}

        def train(name: str) -> None:
            for _ in range(20):
                out = np.full(size, store.rank + 1, F)
                store.pushpull(name, out)
                assert (out == out[0]).all()
                sums[name] = sums.get(name, 0) + float(out[0])

        first, second = (threading.Thread(target=train, args=(name,)) for name in names)
        first.start()
        time.sleep(0.2)  # the first is inside a round which the other worker begins later
        second.start()
        first.join()
        second.join()
        assert sums == dict.fromkeys(names, 20 * sum(range(1, store.num_workers + 1)))


def an_update_of_the_whole_key(size: int, credit: int) -> None:
    """LAMB needs all parts of a key before it answers one; they are more than the credit."""
    with create(timeout=30, credit_bytes=credit) as store, kv.create("local", processes=1) as alone:
        ours, wanted = np.empty(size, F), np.empty(size, F)
        for one in (store, alone):
            one.init("a", np.linspace(-1, 1, size, dtype=F))
            one.set_optimizer(kv.optimizer.create("lamb", learning_rate=0.1))
        for step in range(4):
            parts = [np.full(size, rank + step, F) for rank in range(store.num_workers)]
            store.pushpull("a", parts[store.rank], out=ours)
            alone.pushpull("a", parts, out=[wanted] * len(parts))
            assert (ours == wanted).all()


def after_a_deadline(size: int) -> None:
    """Worker 0 gives up in a round for which worker 1 is late; both continue."""
    with create(timeout=3) as store:
        store.init("a", np.zeros(size, F))
        value = np.full(size, store.rank + 1, F)
        if store.rank == 0:
            with pytest.raises(kv.TimeoutError, match="missing: worker 1"):
                store.pushpull("a", value)
            value[:] = 77  # the caller may write it again, and the pushed value stays
            tell("gave up")
            hear()
        else:
            hear()
            store.pushpull("a", value)
            assert (value == 3).all()
        out = np.empty(size, F)
        store.pull("a", out=out)
        assert (out == 3).all()
        value[:] = 1
        store.pushpull("a", value)
        assert (value == 2).all()


def chains(seed: int, servers: int) -> list[int]:
    """Asynchronous calls in another order on each worker; return the number of chained calls."""
    store = opened(slice_bytes=65_536, credit_bytes=1 << 20)
    shared, own = random.Random(seed), random.Random(f"{seed} {store.rank}")
    sizes = {f"k{n}": shared.choice([1, 50, 5000, 70_000, 400_000]) for n in range(14)}
    store.init(list(sizes), [np.zeros(n, F) for n in sizes.values()])
    begun = _count_chained()
    for step in range(1, 13):
        value = {key: np.arange(n, dtype=F) % 7 * step for key, n in sizes.items()}
        wanted = {key: sum((w + 1) * one for w in range(store.num_workers)) for key, one in value.items()}
        arrays = {key: (store.rank + 1) * one for key, one in value.items()}
        outs = {key: np.empty_like(one) if own.random() < 0.3 else arrays[key] for key, one in arrays.items()}
        keys = list(sizes)
        if step % 3:  # else in the same order on all workers
            own.shuffle(keys)
        works, pushed = [], []
        while keys:
            some = [keys.pop() for _ in range(min(len(keys), own.randint(1, 4)))]
            given, priority = [arrays[key] for key in some], own.choice([0, 0, -1, 3])
            if own.random() < 0.2:
                works.append(store.push(some, given, priority=priority, async_op=True))
                pushed += some
            else:
                out = [outs[key] for key in some]
                works.append(store.pushpull(some, given, out, priority=priority, async_op=True))
            if own.random() < 0.2:
                time.sleep(0.003)
            if own.random() < 0.2:
                store.pull("small", out=np.zeros(SIZES["small"], F))
        if step % 2:
            own.shuffle(works)
        for work in works:
            work.wait()
        for key in pushed:
            store.pull(key, out=outs[key])
        for key, out in outs.items():
            np.testing.assert_array_equal(out, wanted[key], err_msg=f"{key} of step {step}")
        if step == 6:
            store.barrier()
    found = [len(begun), store._backend._client.driver._quick is not None]
    store.barrier()
    store.close()
    return found


def quotients() -> None:
    """Divided values have the bits of a division before the sum, on each way to the server."""
    store, n = opened(slice_bytes=65_536), [1, 5000, 70_000, 400_000, 1_000_003]
    keys = [f"q{size}" for size in n]
    store.init(keys, [np.zeros(size, F) for size in n])
    homes = [store.empty(key) for key in keys]
    for step, divisors in enumerate([(2, 2, 2), (3, 3, 3), (1, 1, 1), (2, 1, 2), (3, 4, 3), (4, 4, 4)] * 2):
        parts = [[draw("float32", size, 10 * step + rank) for rank in range(store.num_workers)] for size in n]
        mine = [part[store.rank].copy() for part in parts] if step % 3 else homes
        outs = [np.empty(size, F) for size in n] if step % 4 == 1 else mine
        for value, part in zip(mine, parts, strict=True):
            value[...] = part[store.rank]
        assert can_divide_values(store, mine)
        given = None if outs is mine else outs
        start_pushpull(store, keys, mine, given, divisors[store.rank], waits=step % 2 == 0).wait()
        for out, part, value in zip(outs, parts, mine, strict=True):
            wanted = total([one / F(divisor) for one, divisor in zip(part, divisors, strict=True)])
            assert_same_bits(out, wanted)
            assert given is None or value.tobytes() == part[store.rank].tobytes()
    mine, out = [np.full(size, 3, F) for size in (1, 5000)], np.empty(5000, F)
    start_pushpull(store, keys[:2], mine, [[], out], 2).wait()
    assert (out == 1.5 * store.num_workers).all() and (mine[0] == 3).all()
    store.init("half", np.zeros(8, np.float16))
    assert not can_divide_values(store, [np.zeros(8, np.float16)])
    with pytest.raises(kv.DTypeError):
        start_pushpull(store, ["half"], [np.full(8, 3, F)], None, 2).wait()
    store.barrier()
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    value = np.full(70_000, 0.8, F)  # 0.4 is too little to be sent
    start_pushpull(store, keys[2:3], [value], None, 2).wait()  # as a codec set since the division was planned
    assert not value.any()
    store.barrier()
    store.close()


def _count_chained() -> list[int]:
    """Note each call that is sent behind another call."""
    found: list[int] = []
    begin = QuickCall.begin

    def noted(call: QuickCall, machine: Any, sockets: Any, before: QuickCall | None) -> bool:
        begun = begin(call, machine, sockets, before)
        if begun and call.chained and before is not None:
            found.append(call.left)
        return begun

    QuickCall.begin = noted  # type: ignore[method-assign]
    return found


def many_on_the_way(count: int) -> None:
    """One worker is far ahead of the other, and waits for none of its operations until the end."""
    with create() as store:
        store.init("a", np.zeros(50, F))
        outs = [np.full(50, step * (store.rank + 1), F) for step in range(count)]
        time.sleep(store.rank)
        works = [store.pushpull("a", out, async_op=True) for out in outs]
        works[count // 2].wait(15)
        for work in works:
            work.wait(15)
        total = sum(range(1, store.num_workers + 1))
        assert [float(out[0]) for out in outs] == [step * total for step in range(count)]
        store.barrier()


# ------------------------------------------------------------------------------------------------------ keys


def keys_that_cannot_travel() -> None:
    """They are refused at the call, and no part of them remains."""
    with create() as store:
        for key in ("x" * 1025, "ä" * 513, "\ud800"):
            for call in (
                lambda key=key: store.init(key, np.ones(1, F)),
                lambda key=key: store.push(key, np.ones(1, F)),
            ):
                with pytest.raises(kv.KeyKindError):
                    call()
        deep = np.ones((1,) * 30 + (2,), F)
        store.init(["y" * 1024, "deep"], [np.ones(1, F), deep])
        assert sorted(store.keys()) == ["deep", "y" * 1024]
        out = np.zeros_like(deep)
        store.pull("deep", out=out)
        assert (out == 1).all()


def refused_by_a_server() -> None:
    """A request with numbers that are none fails at once; earlier and later requests do not."""
    with create() as store:
        store.init(["w", "x"], [np.ones(3, F)] * 2)
        cut = store._backend._slices._cut_payload

        def wrong(key: Any, *arguments: Any) -> Any:
            for one in cut(key, *arguments):
                bad = one.record._replace(threshold=float("nan"))
                yield one._replace(record=bad) if key.key == "w" else one

        store._backend._slices._cut_payload = wrong
        start = time.monotonic()
        with pytest.raises(kv.ProtocolError, match="was not carried out"):
            store.pushpull(["w", "x"], [[np.full(3, 2, F), np.full(3, 3, F)], np.full(3, 7, F)])
        assert time.monotonic() - start < 10
        out = np.zeros(3, F)
        for value in (7, 9):
            store.pull("x", out=out)
            assert (out == value).all()
            store.push("x", np.full(3, 9, F))


def keys_in_any_order(kind: str) -> None:
    """Every worker makes the same keys in an order of its own."""
    store = create()
    names: list[Any] = [f"layer {i}" for i in range(7)] if kind == "str" else [5, -3, 2**40, 0, 17, 4, 99]
    turn = 2 * store.rank % len(names)
    order = names[turn:] + names[:turn]
    if store.rank % 2:
        store.init(order, [np.full(3, names.index(name), F) for name in order])
    else:
        for name in order:
            store.init(name, np.full(3, names.index(name), F))
    for name in order:
        store.push(name, np.full(3, names.index(name) + store.rank, F))
    for name in order:
        out, n = np.empty(3, F), store.num_workers
        store.pull(name, out=out)
        assert (out == names.index(name) * n + n * (n - 1) // 2).all()
    store.barrier()
    assert store.keys() == names
    store.barrier()
    store.close()


def placed(servers: int) -> dict[str, list[int]]:
    """Where the bytes are; large keys on all servers, and all servers about equally full."""
    with opened() as store:
        places = store.placement()
        assert {key: sum(size for _, size in parts) for key, parts in places.items()} == {
            key: 4 * n for key, n in SIZES.items()
        }
        assert len(places["large"]) == servers
        assert len(places["small"]) == 1
        full: dict[str, int] = {}
        for parts in places.values():
            for server, size in parts:
                full[server] = full.get(server, 0) + size
        assert max(full.values()) <= 1.5 * min(full.values())
        store.barrier()
        return {key: [size for _, size in parts] for key, parts in places.items()}


# ------------------------------------------------------------------------------------------- refused calls


def out_of_reach() -> None:
    """Operations that need the weights in this process, or code of this process on servers."""
    with opened() as store:
        with pytest.raises(NotImplementedError, match="pull"):
            store.view("small")
        for setter in (store.set_updater, store._set_updater):
            with pytest.raises(kv.CapabilityError, match=r"register.*--import"):
                setter(lambda key, merged, stored: None)

        class Unregistered(own_rules.Halving):
            pass

        with pytest.raises(kv.ConfigError, match="register"):
            store.set_optimizer(Unregistered())
        kv.optimizer.register(Unregistered)
        with pytest.raises(kv.ConfigError, match="unregistered"):
            store.set_optimizer(Unregistered())
        trained(store, alone(), range(2))  # all workers continue
        store.barrier()


def own_rule() -> None:
    """A registered rule that the servers have imported."""
    with opened() as store, alone() as local:
        for made in (store, local):
            made.set_optimizer(own_rules.Momentous(learning_rate=0.1))
        trained(store, local, range(4))
        store.barrier()


def failing_rule() -> list[str]:
    """An error of a rule reaches every worker that waits; the value stays, and the next round works."""
    errors = []
    with opened() as store:
        store.set_optimizer(own_rules.Halving(fail_on="edge"))
        for verb in ("pushpull", "push and pull"):
            for key in SIZES:
                value = gradients(store, key, 0)[store.rank]
                before = held(store, key)
                if key != "edge":
                    store.pushpull(key, value)
                    assert_same_bits(value, before / F(2))
                    continue
                with pytest.raises(kv.UpdaterError, match="ZeroDivisionError on key 'edge'") as caught:
                    if verb == "pushpull":
                        store.pushpull(key, value)
                    else:
                        store.push(key, value)
                        store.pull(key, out=value)
                errors.append(str(caught.value))
                assert_same_bits(held(store, key), lcg(SIZES[key], 5))
        store.barrier()
    return errors


# ------------------------------------------------------------------------------------------------- deadlines


def deadline() -> None:
    """A round that stays incomplete ends in an error that names the missing workers."""
    first = opened()
    first.barrier()
    store = opened(group="short", timeout=1.5)
    first.barrier()
    if store.rank == 0:
        store.push("large", np.ones(SIZES["large"], F))
        with pytest.raises(kv.errors.TimeoutError, match=r"pull.*worker 1"):
            store.pull("large", out=np.empty(SIZES["large"], F))
        with pytest.raises(kv.errors.TimeoutError, match=r"barrier 1.*worker 1"):
            store.barrier()
        tell("late")
        hear()
    else:
        hear()
        store.push("large", np.ones(SIZES["large"], F))
    out = np.empty(SIZES["large"], F)
    store.pull("large", out=out)
    assert (out == 2).all()
    first.barrier()
    store.close()
    first.close()


# ----------------------------------------------------------------------------------------------------- files


def files_go_to_local(folder: str) -> None:
    """Worker 0 saves values and states; `local` continues from the file, and the other way round."""
    values, states = Path(folder) / "values", Path(folder) / "states"
    with opened() as store, alone() as local:
        for made in (store, local):
            made.set_optimizer(kv.optimizer.Adam(learning_rate=0.1))
        trained(store, local, range(2))
        if store.rank == 0:
            store.save(values)
            store.save_optimizer_states(states)
        store.barrier()
        with alone() as other:
            other.set_optimizer(kv.optimizer.Adam(learning_rate=0.1))
            other.load(values)
            other.load_optimizer_states(states)
            trained(store, other, range(2, 4))
        store.barrier()
        if store.rank == 0:  # back to where `local` is
            local.save(values)
            local.save_optimizer_states(states)
            store.load(values)
            store.load_optimizer_states(states)
        store.barrier()
        trained(store, local, range(4, 6))
        store.barrier()


# ------------------------------------------------------------------------------------------------ dist_async


def at_once() -> None:
    """Without rounds: each push counts, without regard to other workers; worker after worker here."""
    with create() as store:
        store.init(["plain", "large"], [np.full(3, 7, F), np.full(70_001, 7, F)])
        for turn in range(store.num_workers):
            if turn == store.rank:
                for key, n in (("plain", 3), ("large", 70_001)):
                    store.push(key, np.full(n, 1 + store.rank, F))
                    out = np.empty(n, F)
                    store.pull(key, out=out)
                    assert (out == 1 + store.rank).all()
            store.barrier()
        assert (held(store, "large") == store.num_workers).all()
        store.barrier()
        store.set_optimizer(kv.optimizer.SGD(learning_rate=1))
        store.barrier()
        for _ in range(20):
            store.push("large", np.full(70_001, 1, F))
            mine = np.full(3, 2, F)
            store.pushpull("plain", mine)
            assert mine[0] <= store.num_workers - 2
        store.barrier()
        n = store.num_workers
        assert (held(store, "large") == n - 20 * n).all()
        assert (held(store, "plain") == n - 40 * n).all()
        store.barrier()


def async_failure() -> None:
    """An error in the update is the pusher's."""
    with create() as store:
        store.init("edge", np.full(5, 8, F))
        store.set_optimizer(own_rules.Halving(fail_on="edge"))
        with pytest.raises(kv.UpdaterError, match="ZeroDivisionError on key 'edge'"):
            store.push("edge", np.ones(5, F))
            store.barrier()  # a small push is not waited for
        assert (held(store, "edge") == 8).all()
        store.barrier()


def a_key_in_the_order_of_the_calls() -> None:
    """More is pushed than there is credit for, and later operations of a key have higher priorities."""
    with create() as store:
        n = 1 << 18
        store.init(["k", "small"], [np.zeros(n, F), np.zeros(8, F)])
        out = np.empty(8, F)
        store.push("small", np.full(8, 1, F), async_op=True)
        store.push("k", np.zeros(n, F), async_op=True)
        store.pull("small", out=out, priority=-1, async_op=True)
        store.push("small", np.full(8, 2, F), priority=1, async_op=True)
        store.wait()
        assert (out == 1).all() and (held(store, "small") == 2).all(), out
        ones = np.ones(n, F)
        outs = [np.empty(n, F) for _ in range(6)]
        for step, out in enumerate(outs):
            store.push("k", (2 * step + 1) * ones, priority=0, async_op=True)
            store.push("k", (2 * step + 2) * ones, priority=3 * step + 1, async_op=True)
            store.pull("k", out=out, priority=3 * step + 2, async_op=True)
        store.wait()
        for step, out in enumerate(outs):
            assert (out == 2 * step + 2).all(), (step, np.unique(out))
        assert (held(store, "k") == 2 * len(outs)).all()


def a_pull_sees_its_push() -> None:
    """A second push of a small key waits for the first pull; the second pull must not overtake it."""
    with create() as store:
        store.init("k", np.zeros(8, F))
        outs = [np.empty(8, F) for _ in range(40)]
        for step, out in enumerate(outs):
            store.push("k", np.full(8, step, F), async_op=True)
            store.pull("k", out=out, async_op=True)
        store.wait()
        assert [float(out[0]) for out in outs] == list(range(len(outs)))


def a_pull_has_no_later_push(turns: int) -> None:
    """Another worker changes the value during the copy: it is read again, before this worker's next push."""
    with create() as store:
        n, outs = 40_000, [np.empty(40_000, F) for _ in range(4)]
        each = n // store.num_workers
        own = slice(store.rank * each, (store.rank + 1) * each)
        store.init("k", np.zeros(n, F))
        store.set_optimizer(kv.optimizer.Test(learning_rate=-1))
        store.barrier()
        one = np.zeros(n, F)
        one[own] = 1
        wrong = []
        for turn in range(turns):
            for out in outs:
                store.pull("k", out=out, async_op=True)
                store.push("k", one, async_op=True)
            store.wait()
            for number, out in enumerate(outs, turn * len(outs)):
                if (out[own] != number).any():
                    wrong.append((number, np.unique(out[own])))
        store.barrier()
        assert not wrong, (len(wrong), wrong[:3])


def one_update_at_a_time(rounds: int) -> str:
    """All workers push at once into the same keys: no push is lost, none is half done."""
    with opened() as store:
        store.init("sum", start_of((40_000,), "float32", 3) * 0)
        store.set_optimizer(kv.optimizer.Test(learning_rate=-1))
        for _ in range(rounds):
            store.push("sum", np.ones(40_000, F), async_op=True)
        store.wait()
        store.barrier()
        assert (held(store, "sum") == rounds * store.num_workers).all()
        store.barrier()
    return "done"


def a_table_larger_than_a_message(path: str) -> None:
    """Its rows cannot be sent together: the server says so, and continues."""
    store = create()
    shape = rows, width = 1100, 1 << 16  # 275 MiB
    store.init("t", kv.RowSparseArray.zeros(shape))
    store.set_optimizer(kv.optimizer.SGD(learning_rate=1.0))
    for ids in np.split(np.arange(rows), 2):
        store.push("t", kv.RowSparseArray(np.full((len(ids), width), -ids[0] - 1, F), ids, shape))
    with pytest.raises(kv.CapabilityError, match=r"server 0 .* of key 't' .*row_sparse_pull"):
        store.save(path)
    found = kv.RowSparseArray.zeros(shape)
    store.row_sparse_pull("t", out=found, row_ids=np.array([0, rows - 1]))
    assert found.data[:, [0, -1]].tolist() == [[1, 1], [rows // 2 + 1] * 2]
    store.close()


def large_rows() -> None:
    """Rows that arrive as large frames, to outs that lie apart, together, twice, or are of another type."""
    shape, names = (3000, 64), ["a", "b"]
    with create() as store, kv.create("local", processes=1) as local:
        for made in (store, local):
            made.init(names, [random_rows(shape, 5), kv.RowSparseArray.zeros(shape)])
            made.set_optimizer(kv.optimizer.create("sgd", learning_rate=0.5))
        for step in range(4):
            for key in names:
                parts = [random_rows(shape, 10 * step + w) for w in range(store.num_workers)]
                local.push(key, parts)
                store.push(key, parts[store.rank])
            rng = np.random.default_rng([step, store.rank])
            ids = [rng.integers(0, shape[0], 1500), rng.integers(0, shape[0], 900), np.arange(0, 3000, 2)]
            found, wanted = ([made_outs(shape) for _ in range(2)] for _ in range(2))
            for made, (outs, one) in ((store, found), (local, wanted)):
                made.row_sparse_pull(["a", "b"], out=[outs[:3], outs[3:]], row_ids=[ids, ids[:2]])
                made.row_sparse_pull("a", out=one[0], row_ids=ids[0])
                work = made.row_sparse_pull("b", out=one[1], row_ids=ids[1], async_op=True)
                if work is not None:
                    work.wait()
            for out, other in zip(found[0] + found[1], wanted[0] + wanted[1], strict=True):
                assert_same_bits(out.indices, other.indices)
                assert_same_bits(out.data, other.data)


def made_outs(shape: tuple[int, ...]) -> list[kv.RowSparseArray]:
    """Five outs: the first has room, the next two share theirs, the fourth is the fifth, and float64."""
    both, width = np.zeros((2000, *shape[1:]), F), shape[1:]
    first = kv.RowSparseArray(np.zeros((1600, *width), F), np.arange(1600), shape)
    shared = [kv.RowSparseArray(both, np.arange(2000), shape) for _ in range(2)]
    last = kv.RowSparseArray.zeros(shape, np.float64)
    return [first, *shared, last, last]


def until_the_server_dies(size: int) -> int:
    """Call quickly until the server is lost; the number of calls."""
    store = kv.create("dist_sync")
    store.init("w", np.zeros(size, F))
    value, out, calls = np.ones(size, F), np.zeros(size, F), 0
    with pytest.raises(kv.PeerLostError, match="server 0"):
        while True:
            store.pushpull("w", value, out=out)
            assert (out == store.num_workers).all()
            calls += 1
            if calls == 20:
                tell("ready")
    return calls


def one_comes_late(size: int) -> None:
    """Call until a round was quick to its end for both, though one came a while after the other."""
    store = kv.create("dist_sync", same_host_shm=False)
    store.init(["w", "good"], [np.zeros(size, F), np.zeros(1, F)])
    value, good = np.ones(size, F), np.zeros(1, F)
    with pytest.MonkeyPatch.context() as patched:
        quick, end = Quick(patched), pace.deadline(20)
        while good[0] < store.num_workers:
            assert time.monotonic() < end, f"{quick.begun} begun, {quick.adopted} adopted"
            before = quick.begun, quick.adopted
            time.sleep(0.3 if store.rank else 0)
            store.pushpull("w", value)
            assert (value == store.num_workers).all()
            value[:], good[:] = 1, quick.begun > before[0] and quick.adopted == before[1]
            store.pushpull("good", good)
    store.close()


def rows_until_the_server_dies(rows: int) -> int:
    """Push and pull rows quickly until the server is lost; the number of calls."""
    store, shape = kv.create("dist_sync"), (2 * rows, 16)
    store.init("t", kv.RowSparseArray(np.zeros(shape, F), np.arange(2 * rows), shape))
    store.set_optimizer(kv.optimizer.SGD(learning_rate=1.0))
    ids, out, calls = np.arange(store.rank, 2 * rows, 2), kv.RowSparseArray.zeros(shape), 0
    value = kv.RowSparseArray(np.ones((rows, 16), F), ids, shape)
    with pytest.raises(kv.PeerLostError, match="server 0"):
        while True:
            store.push("t", value)
            store.row_sparse_pull("t", out=out, row_ids=ids)
            calls += 1
            assert (out.data == -calls).all() and (out.indices == ids).all()
            if calls == 20:
                tell("ready")
    return calls


def equal_rows_beside_a_push() -> None:
    """Pulls of the same rows before and after a push, all of which the server answers at once."""
    store, shape = create(same_host_shm=False), (1000, 16)
    ids, zeros = np.arange(0, 1000, 2), np.zeros(shape, F)
    store.init("t", kv.RowSparseArray(zeros, np.arange(1000), shape))
    store.set_optimizer(kv.optimizer.SGD(learning_rate=1.0))
    gradient = kv.RowSparseArray(np.ones((1000, 16), F), np.arange(1000), shape)
    outs = [kv.RowSparseArray.zeros(shape) for _ in range(2)]
    for step in range(5):
        store.row_sparse_pull("t", out=outs, row_ids=[ids, ids])
        tell(f"stop {step}")
        hear()
        works = [
            store.row_sparse_pull("t", out=outs[0], row_ids=ids, async_op=True),
            store.push("t", gradient, async_op=True),
            store.row_sparse_pull("t", out=outs[1], row_ids=ids, async_op=True),
        ]
        tell(f"asked {step}")
        for work in works[:: -1 if step % 2 else 1]:
            work.wait()
        for out, pushes in zip(outs, (step, step + 1), strict=True):
            assert (out.indices == ids).all()
            assert (out.data == -pushes).all(), (step, out.data)
    store.close()


def by_encrypted_streams(altered: bool) -> tuple[str, str]:
    """Sums are those of `local`, over streams with ciphers; where these are altered, over ZeroMQ."""
    if altered:
        connect = stream_client._begin_connect
        stream_client._begin_connect = lambda address: connect(Altering(address).address)
    sent = _count_sent()
    store, digest = opened(same_host_shm=False), Digest()
    streams = list(store._backend._client.driver._sockets._streams.values())
    assert streams and all(one._cipher for one in streams)
    if not altered:
        _until_open(store, streams)
        sent.clear()
    with alone() as local:
        for step in range(12):
            for key, n in SIZES.items():
                values, out, expected = gradients(store, key, step), np.empty(n, F), np.empty(n, F)
                store.pushpull(key, values[store.rank], out=out)
                local.pushpull(key, values, out=expected)
                assert_same_bits(out, expected)
                digest.add(out)
    steps = sum(sent) / (4 * sum(SIZES.values()))
    assert steps > 6 if altered else steps < 1, steps
    told = repr(store) + repr(store._backend) + repr(vars(store._backend))
    assert not any(one._offer.secret.hex() in told for one in streams)
    store.barrier()
    store.close()
    return digest.hex(), "".join(one._offer.secret.hex() for one in streams)


def reads_late() -> None:
    """Request a value, push into later rounds, and receive nothing during this: no Python thread runs."""
    library = ctypes.PyDLL(None)
    store = opened(slice_bytes=1 << 24)
    store.init("late", np.zeros(4_000_000, F))
    for _ in range(3):
        out = np.zeros(4_000_000, F)
        found = store.pushpull("late", np.ones(4_000_000, F), out=out, async_op=True)
        later = [store.push("late", np.full(4_000_000, 10, F), async_op=True) for _ in range(2)]
        if store.rank:
            library.usleep(400_000)
        for one in (found, *later):
            one.wait()
        assert (out == 2).all()
        store.barrier()
    store.close()


def _until_open(store: Any, streams: list[Any]) -> None:
    """Read until all streams are open; an attempt is made with each message."""
    end, out = pace.deadline(20), {key: np.empty(n, F) for key, n in SIZES.items()}
    while not all(one._stream for one in streams):
        assert time.monotonic() < end
        store.pull(list(out), out=list(out.values()))
    store.barrier()


def _count_sent() -> list[int]:
    """Count the bytes of all messages that are sent over ZeroMQ."""
    usual, sent = DealerChannel.send, [0]

    def send(self: Any, frames: Any) -> None:
        sent.append(sum(memoryview(frame).nbytes for frame in frames))
        usual(self, frames)

    DealerChannel.send = send  # type: ignore[method-assign]
    return sent


class Altering:
    """A proxy between two processes, for one connection: it forwards their data, and alters it."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._run, args=((host, int(port)),), daemon=True).start()

    def _run(self, target: tuple[str, int]) -> None:
        with self._listening:
            near, _ = self._listening.accept()
        with near, socket.create_connection(target) as far:
            back = threading.Thread(target=_pass_altered, args=(far, near), daemon=True)
            back.start()
            _pass_altered(near, far)
            back.join()


def _pass_altered(one: socket.socket, other: socket.socket) -> None:
    passed = 0
    with contextlib.suppress(OSError):
        while data := one.recv(1 << 16):
            altered = bytearray(data)
            if passed <= ALTERED < passed + len(data):
                altered[ALTERED - passed] ^= 1
            other.sendall(altered)
            passed += len(data)
    for connection in (one, other):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


# -------------------------------------------------------------------------------------------------- counters


def observed_server() -> dict[str, Any]:
    """Be a server that records its events; return these, its counters and the names of its slices."""
    roles = find_roles()
    assert roles is not None
    native.record_events(1 << 16)
    loop = ServerLoop(roles, ps_config())
    loop.counters.take_times()
    loop.run()
    recorded = recorded_events.recorded()
    return {"counters": loop.counters.read(), "events": recorded, "names": list(loop.slice_names().items())}


def counted(size: int, timed: bool = False, packed: bool = False) -> dict[str, Any]:
    """Push and pull two keys in several ways; return what the worker has counted."""
    if timed:
        native.record_events(1 << 16)
    with create() as store:
        counters = store._counters
        if timed:
            counters.take_times()
        keys, value, out = ["a", "b"], np.ones(size, F), np.empty(size, F)
        store.init(keys, [np.zeros(size, F)] * 2)
        if packed:
            store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        store.pull(keys, out=[out, np.empty(size, F)])  # a server announces its memory with its first reply
        store.barrier()
        before = counters.read()
        for _ in range(3):
            store.pushpull("a", value, out=out)
            store.pushpull(keys, [value, value], out=[out, np.empty(size, F)])
        for _ in range(2):
            store.push("b", [value, value])
            store.pull("b", out=[out, np.empty(size, F)])
            store.push("b", value, async_op=True).wait()
            store.pull(keys, out=[out, np.empty(size, F)])
        own = store.empty("a")
        own[:] = 1
        for _ in range(2):
            store.pushpull("a", own)
        store.barrier()
        after, parts = counters.read(), len(store._backend.names())
        return {"before": before, "after": after, "parts": parts, "events": recorded_events.recorded()}


def waits(size: int) -> dict[str, Any]:
    """Push and pull some rounds, before the last of which the last worker waits for the test."""
    native.record_events(1 << 16)
    with create() as store:
        store._counters.take_times()
        store.init("w", np.zeros(size, F))
        out = np.empty(size, F)
        for _ in range(4):
            store.pushpull("w", np.ones(size, F), out=out)
        store.barrier()
        if store.rank == store.num_workers - 1:
            tell("is late")
            hear()
        store.pushpull("w", np.ones(size, F), out=out)
        store.barrier()
        return {"counters": store._counters.read(), "events": recorded_events.recorded()}


def survives() -> dict[str, Any]:
    """Push and pull until another worker is lost; return the counts, and the records."""
    native.record_events(1 << 16)
    with create(on_peer_loss="continue") as store:
        store._counters.take_times()
        store.init("w", np.zeros(10, F))
        tell("trains")
        end = pace.deadline(30)
        while store.rank == 0 and not store.statistics().losses:
            assert time.monotonic() < end
            store.pushpull("w", np.ones(10, F))
        if store.rank:
            hear()
        return {"losses": store.statistics().losses, "events": recorded_events.recorded()}


# ----------------------------------------------------------------------------------------------------- hosts

OF_A_SLICE = 131072 // 4  # elements


def is_by_hosts(store: kv.KVStore) -> bool:
    return isinstance(store._backend, HierarchyBackend)


def kind_of_store() -> bool:
    """Whether hosts push; the sum is right in any case."""
    with create() as store:
        store.init("w", np.zeros(5, F))
        out = np.full(5, store.rank + 1, F)
        store.pushpull("w", out)
        assert (out == sum(range(store.num_workers + 1))).all()
        store.barrier()
        return is_by_hosts(store)


def bytes_to_servers(slices: int, rounds: int) -> int:
    """Bytes of values that this worker has sent to servers in some rounds of a large key."""
    with create() as store:
        store.init("w", np.zeros(slices * OF_A_SLICE, F))
        store.barrier()
        before = sum(store.statistics().sent)
        out = np.ones(slices * OF_A_SLICE, F)
        for _ in range(rounds):
            out[...] = 1
            store.barrier()  # the last worker at a slice sends it: all begin together
            store.pushpull("w", out)
            assert (out == store.num_workers).all()
        store.barrier()
        return int(sum(store.statistics().sent) - before)


def not_by_hosts() -> None:
    """What cannot be done is said, and changes nothing."""
    with create() as store:
        rows = kv.RowSparseArray(np.ones((1, 2), F), [1], (3, 2))
        store.init("w", np.zeros((3, 2), F))
        with pytest.raises(kv.errors.KVStoreError, match="'w'"):
            store.row_sparse_pull("w", out=rows, row_ids=np.array([1]))
        store.pushpull("w", out := np.ones((3, 2), F))
        assert (out == 2).all()
        assert (held(store, "w") == 2).all()
        with pytest.raises(NotImplementedError):
            store.view("w")
        store.barrier()


def packed(settings: dict[str, Any], hosts: list[int], rounds: int) -> None:
    """A host's sum is packed with the residual of the host; all workers get the same result, bit for bit."""
    with create() as store, kv.create("device") as model:
        n = 3 * OF_A_SLICE // 2 + 1
        for one in (store, model):
            one.init("w", np.zeros(n, F))
            one.set_gradient_compression(settings)
        for t in range(rounds):
            parts = [draw("float32", n, 100 * t + rank) for rank in range(store.num_workers)]
            sums = [
                total([part for part, there in zip(parts, hosts, strict=True) if there == host])
                for host in dict.fromkeys(hosts)
            ]
            want, out = np.empty(n, F), parts[store.rank].copy()
            model.pushpull("w", sums, out=want)
            if t % 2:
                store.pushpull("w", out)
            else:
                store.push("w", out)
                store.pull("w", out=out)
            assert_same_bits(out, want)
        with pytest.raises(kv.errors.CapabilityError, match="flat"):
            store.save_residuals("nowhere")
        store.barrier()


def codecs_differ() -> str:
    """Workers of one host that set different codecs: the second gets an error."""
    with create() as store:
        store.init("w", np.zeros(5, F))
        found = "set"
        try:
            store.set_gradient_compression({"type": "2bit", "threshold": 0.5 + store.rank})
        except kv.errors.ConfigError as error:
            assert "codec" in str(error)
            found = "refused"
        store.barrier()
        return found


def asynchronous() -> bool:
    """A store without rounds."""
    with kv.create("dist_async", hierarchy="host") as store:
        store.init("w", np.zeros(5, F))
        store.push("w", np.ones(5, F))
        store.barrier()
        return is_by_hosts(store)


def refused() -> str:
    """Create a store with options that other workers contradict; return whether this worker is refused."""
    try:
        create(timeout=3).close()
    except kv.errors.ConfigError as error:
        assert "hierarchy" in str(error)
        return "refused"
    except kv.errors.KVStoreError as error:
        return type(error).__name__
    return "created"
