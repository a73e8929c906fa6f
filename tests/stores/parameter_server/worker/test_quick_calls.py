"""Quick calls on real servers: the values of usual calls, and the state of the machine after them."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import own_rules
import pace
import pytest
from nightly import each_once, nightly_unless
from quick_counter import Quick
from servers import ServedJob

import kvstore as kv
from kvstore.arrays.element_types import dtype_named
from kvstore.stores.parameter_server.protocol.events import StreamLost
from kvstore.stores.parameter_server.worker import backend
from kvstore.stores.parameter_server.worker.quick_calls import QuickCall

F = np.float32


def filled(shape: Any, dtype: Any, start: int) -> Any:
    return (np.arange(start, start + np.prod(shape, dtype=int)) % 100).reshape(shape).astype(dtype)


SHAPES: list[tuple[int, ...]] = [(), (1,), (3, 5, 7), (1024,), (9, 1001), (40_000,)]
TYPES = ["float32", "float16", "float64", "bfloat16", "int64", "int8"]
#: Every time each shape and each type by streams and by memory.
VALUES = nightly_unless(
    lambda shape, dtype, shm: SHAPES.index(shape) == (TYPES.index(dtype) + shm) % len(SHAPES),
    itertools.product(SHAPES, TYPES, (False, True)),
)


@pytest.mark.parametrize(("shape", "dtype", "shm"), VALUES)
def test_values_of_all_shapes_and_types(
    quick: Quick, create: Callable[..., kv.KVStore], shape: tuple[int, ...], dtype: str, shm: bool
) -> None:
    store, kind = create(same_host_shm=shm), dtype_named(dtype)
    store.init("a", np.zeros(shape, kind))
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        value, out = filled(shape, kind, calls), np.zeros(shape, kind)
        store.pushpull("a", value, out=out)
        assert (out == value).all() and (value == filled(shape, kind, calls)).all()

    quick.call(call)
    out = np.zeros(shape, kind)
    store.pull("a", out=out)
    assert (out == filled(shape, kind, calls)).all()


@pytest.mark.parametrize(("size", "slice_bytes"), each_once([100, 100_000], [0, 4096, 40_000]))
def test_outs_that_are_values_and_lists_of_one(
    quick: Quick, create: Callable[..., kv.KVStore], size: int, slice_bytes: int
) -> None:
    store = create(slice_bytes=slice_bytes)
    store.init(1, np.zeros(size, F))
    store.set_optimizer(own_rules.Added())
    total = np.zeros(size, F)
    for given in (
        lambda v: (v,),
        lambda v: (v, v),
        lambda v: ([v],),
        lambda v: ([v], [v]),
        lambda v: (v, v[:]),
    ):

        def call(given: Any = given) -> None:
            value = filled(size, F, 3)
            total[:] += value
            store.pushpull(1, *given(value))
            assert (value == total).all()

        quick.call(call)


@pytest.mark.parametrize("slice_bytes", [4096, 100_000, 1 << 20])
def test_several_slices(quick: Quick, create: Callable[..., kv.KVStore], slice_bytes: int) -> None:
    store = create(slice_bytes=slice_bytes)
    value, out = filled(400_003, F, 7), np.zeros(400_003, F)
    store.init("a", out)

    def call() -> None:
        value[:] += 1
        store.pushpull("a", value, out=out)
        assert (out == value).all()

    quick.call(call)


def test_calls_that_are_not_usual(quick: Quick, create: Callable[..., kv.KVStore]) -> None:
    store = create()
    store.init("a", np.zeros((4, 6), F))
    store.init("empty", np.zeros((0, 6), F))
    store.init("table", kv.RowSparseArray.zeros((4, 6)))
    value, out = filled((4, 6), F, 1), np.zeros((4, 6), F)
    both = np.zeros((5, 6), F)
    strided = np.zeros((4, 12), F)[:, ::2]
    for pushed, target in (
        ([value, value], out),
        (value, [out, np.zeros((4, 6), F)]),
        (value[:, ::-1], out),
        (value, strided),
        (value, np.zeros((4, 6), np.float64)),
    ):
        store.pushpull("a", pushed, out=target)
        asked = np.sum(pushed, axis=0) if isinstance(pushed, list) else pushed
        assert (np.asarray(target if not isinstance(target, list) else target[0]) == asked).all()
    assert not quick.asked
    both[:4] = value
    store.pushpull("a", both[:4], out=both[1:])
    assert (both[1:] == value).all()
    nothing = np.zeros((0, 6), F)
    store.pushpull("empty", nothing, out=nothing.copy())
    frozen = value.copy()
    frozen.flags.writeable = False
    wrong = value.astype(np.float64)
    other = np.zeros((6, 4), F)
    for pushed, target in ((wrong, out), (value, other), (value[:3], out), (value, frozen), (frozen, None)):
        with pytest.raises(kv.KVStoreError):
            store.pushpull("a", pushed, out=target)
    with pytest.raises(kv.KeyNotFoundError):
        store.pushpull("b", value, out=out)
    assert not quick.begun
    quick.call(lambda: store.pushpull("a", frozen, out=out))
    assert (out == frozen).all()


@pytest.mark.parametrize("shm", [False, True])
def test_a_key_on_two_servers(quick: Quick, create: Callable[..., kv.KVStore], shm: bool) -> None:
    store = create(2, slice_bytes=20_000, same_host_shm=shm)
    value, out = filled(100_000, F, 1), np.zeros(100_000, F)
    store.init(["large", "small"], [out, out[:10]])

    def call() -> None:
        value[:] += 1
        store.pushpull("large", value, out=out)
        assert (out == value).all()

    quick.call(call)
    quick.call(lambda: store.pushpull("small", value[:10], out=out[:10]))


@pytest.mark.parametrize(
    ("names", "servers", "shm"),
    each_once([[3, 1, 2, 70_000], ["d", "a", "c", "b"]], [1, 2], [False, True]),
)
def test_lists_of_keys(
    quick: Quick, create: Callable[..., kv.KVStore], names: list[Any], servers: int, shm: bool
) -> None:
    store = create(servers, slice_bytes=40_000, same_host_shm=shm)
    sizes, kinds = [5, 100_000, 3000, 1], [F, F, np.float64, np.int8]
    zeros = [np.zeros(n, kind) for n, kind in zip(sizes, kinds, strict=True)]
    store.init(names, zeros)
    calls = 0

    def call(inside: bool = False, same: bool = False) -> None:
        nonlocal calls
        calls += 1
        given = [filled(n, kind, calls) for n, kind in zip(sizes, kinds, strict=True)]
        values = [value.copy() for value in given]
        outs = values if same else [np.full_like(value, -1) for value in values]
        store.pushpull(
            list(names), [[one] for one in values] if inside else values, out=None if same else outs
        )
        for one, out in zip(given, outs, strict=True):
            assert (out == one).all()

    quick.call(call)
    quick.call(lambda: call(inside=True))
    quick.call(lambda: call(same=True))
    store.init("new" if isinstance(names[0], str) else 5, np.zeros(3, F))
    quick.call(call)


def test_lists_that_are_not_usual(quick: Quick, create: Callable[..., kv.KVStore]) -> None:
    store = create()
    store.init([1, 2, 3], [np.zeros(4, F)] * 3)
    one, two = np.full(4, 1, F), np.full(4, 2, F)
    outs = [np.zeros(4, F) for _ in range(3)]
    quick.call(lambda: store.pushpull([1, 2], [one, two], out=outs[:2]))
    begun = quick.begun
    store.pushpull([1, 1], [one, two], out=[outs[0], outs[1]])
    assert (outs[0] == 3).all() and (outs[1] == 3).all()
    memory = np.zeros(6, F)
    store.pushpull([1, 2], [one, two], out=[memory[:4], memory[2:]])
    assert (memory[2:] == 2).all() and (memory[:2] == 1).all()
    with pytest.raises(kv.KeyKindError):
        store.pushpull([True, 2], [one, two], out=outs[:2])
    with pytest.raises(kv.KeyNotFoundError):
        store.pushpull([1, 9], [one, two], out=outs[:2])
    with pytest.raises(kv.ShapeError):
        store.pushpull([1, 2], [one], out=outs[:2])
    with pytest.raises(kv.KVStoreError):
        store.pushpull([1, 2], [one, two.astype(np.float64)], out=outs[:2])
    store.pushpull([], [], out=[])
    assert quick.begun == begun
    quick.call(lambda: store.pushpull([2, 1], [two, one], out=outs[:2]))
    assert (outs[0] == 2).all() and (outs[1] == 1).all()


@pytest.mark.parametrize("shm", [False, True])
def test_arrays_of_empty(quick: Quick, create: Callable[..., kv.KVStore], shm: bool) -> None:
    """An array in memory that servers read is not copied; the sum may be written there."""
    store = create(slice_bytes=40_000, same_host_shm=shm)
    store.init(["a", "b"], [np.zeros(50_000, F), np.zeros(3, F)])
    home, small = store.empty("a"), store.empty("b")
    calls = 0

    def call(into: bool) -> None:
        nonlocal calls
        calls += 1
        home[:], small[:] = calls, calls
        outs = [np.zeros(50_000, F), np.zeros(3, F)] if into else [home, small]
        store.pushpull(["a", "b"], [home, small], out=outs)
        assert all((out == calls).all() for out in outs)

    quick.call(lambda: call(into=True))
    quick.call(lambda: call(into=False))


def run_random_program(store: kv.KVStore, names: list[str], sizes: list[int], seed: int) -> list[bytes]:
    """Run a program of pushes, pulls and both, of one key and of lists; return all that was received."""
    draw = random.Random(seed)
    numbers = np.random.default_rng(seed)
    found: list[bytes] = []
    for _ in range(60):
        several = draw.random() < 0.4
        chosen = draw.sample(range(len(names)), draw.randint(1, len(names)) if several else 1)
        values = [numbers.normal(0, 1, sizes[at]).astype(F) for at in chosen]
        outs = [np.empty(sizes[at], F) for at in chosen]
        given: Any = [names[at] for at in chosen], values, outs
        if not several:
            given = given[0][0], values[0], outs[0]
        verb = draw.choice(["push", "push", "pull", "pull", "pushpull", "same"])
        if verb == "push":
            store.push(*given[:2])
            for value in values:
                value[:] = np.nan  # it is the caller's again
        elif verb == "pull":
            store.pull(given[0], out=given[2])
        else:
            store.pushpull(*given[:2], **({"out": given[2]} if verb == "pushpull" else {}))
        if verb != "push":
            found += [out.tobytes() for out in (values if verb == "same" else outs)]
    return found


def pushed(ours: Any) -> tuple[int, int]:
    """Return how many calls have pushed, and the stamp of the last one."""
    return ours._pushes.made, ours._optimizer.clock.stamp


def traffic(ours: Any, servers: int) -> list[int]:
    """Count bytes sent, answered and received, and requests, of all servers."""
    tables = [ours._client._machine._servers[server].requests for server in range(servers)]
    names = ("_sent", "_answered", "_received", "_next")
    return [sum(getattr(table, name) for table in tables) for name in names]


CODECS = [None, "2bit", "1bit", "fp16", "bf16"]
ASYNC = {"dist_sync": False, "dist_async": True}


def often(kind: str, codec: str | None, servers: int, shm: bool) -> bool:
    """Each codec with rounds and without; each of these on one server and two, by memory and by streams."""
    number = CODECS.index(codec)
    return servers == 1 + (number + ASYNC[kind]) % 2 and shm == ASYNC[kind] ^ (number % 3 == 0)


PROGRAMS = nightly_unless(often, itertools.product(ASYNC, CODECS, (1, 2), (False, True)))


@pytest.mark.parametrize(("kind", "codec", "servers", "shm"), PROGRAMS)
def test_random_programs_as_in_the_usual_way(
    quick: Quick,
    on_servers: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    codec: str | None,
    servers: int,
    shm: bool,
) -> None:
    names, sizes = list("abcde"), [1, 77, 1024, 9001, 70_000]
    found = []
    for usual in (False, True):
        options = {"same_host_shm": shm, "slice_bytes": 40_000}
        with (
            monkeypatch.context() as patched,
            kv.create(on_servers(f"{kind}:{servers}"), **options) as store,
        ):
            for verb in ("push", "pull", "pushpull") if usual else ():
                patched.setattr(backend.QuickCalls, verb, lambda *_: False)
            store.init(names, [np.ones(size, F) for size in sizes])
            if codec is not None:
                store.set_gradient_compression({"type": codec})
            ours: Any = store._backend
            before, quick.begun = traffic(ours, servers), 0
            received = [run_random_program(store, names, sizes, seed) for seed in range(2)]
            store.set_optimizer(own_rules.Added())
            received.append(run_random_program(store, names, sizes, 2))
            store.barrier()
            assert bool(quick.begun) != usual
            counted = [now - then for now, then in zip(traffic(ours, servers), before, strict=True)]
            residuals = [ours.feedback and ours.feedback.residual(name) for name in names]
            kept = [one if one is None else one.tobytes() for one in residuals]
            found.append((received, counted, kept, pushed(ours), [ours._keys.get(n).pushes for n in names]))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("size", "shm"), [(100, True), (100_000, True), (100_000, False), (300_000, True), (300_000, False)]
)
def test_a_push_then_a_pull(quick: Quick, create: Callable[..., kv.KVStore], size: int, shm: bool) -> None:
    """A pushed array is not the caller's any more when the push returns, waited for or not."""
    store = create(same_host_shm=shm)
    store.init(["a", "b"], [np.zeros(size, F)] * 2)
    out, calls = np.zeros(size, F), 0

    def call(key: str) -> None:
        nonlocal calls
        calls += 1
        value = np.full(size, calls, F)
        store.push("a", value)
        value[:] = -1
        store.pull(key, out=out)
        assert (out == (calls if key == "a" else 0)).all()

    quick.call(lambda: call("a"))
    begun = quick.begun
    quick.call(lambda: call("b"))
    assert quick.begun >= begun + 2


@pytest.mark.parametrize("shm", [True, False])
def test_a_push_of_a_list_then_a_pull(quick: Quick, create: Callable[..., kv.KVStore], shm: bool) -> None:
    """An array in shared memory is not copied besides, a small one is: neither is the caller's."""
    store, names, sizes = create(same_host_shm=shm), list("abc"), [10, 60_000, 5000]
    store.init(names, [np.zeros(size, F) for size in sizes])
    outs, calls = [np.zeros(size, F) for size in sizes], 0

    def call() -> None:
        nonlocal calls
        calls += 1
        values = [np.full(size, calls * 10 + at, F) for at, size in enumerate(sizes)]
        store.push(names, values)
        for value in values:
            value[:] = -1
        store.pull(names, out=outs)
        assert all((out == calls * 10 + at).all() for at, out in enumerate(outs))

    for _ in range(5):
        quick.call(call)


@pytest.mark.parametrize(
    ("size", "shm", "let_go"),
    [
        (100, False, True),
        (100_000, False, True),
        (100_000, True, True),
        (300_000, False, False),
        (300_000, True, True),
    ],
)
def test_the_wait_for_a_push(create: Callable[..., kv.KVStore], size: int, shm: bool, let_go: bool) -> None:
    """The caller, of an array that is too large to copy, or that servers read where it is."""
    store = create(same_host_shm=shm)
    store.init("a", np.zeros(size, F))
    driver: Any = store._backend._client.driver  # type: ignore[attr-defined]
    value, end = np.ones(size, F), pace.deadline(20)
    home = store.empty("a") if shm else None

    def is_let_go(pushed: Any) -> bool:
        store.pull("a", out=np.zeros(size, F))
        store.push("a", pushed)
        return driver._quick is not None

    while let_go and not is_let_go(value):
        assert time.monotonic() < end
    assert let_go or not any(is_let_go(value) for _ in range(20))
    assert home is None or not any(is_let_go(home) for _ in range(20))
    store.pull("a", out=value)


def test_small_pushes_one_after_the_other(quick: Quick, create: Callable[..., kv.KVStore]) -> None:
    store = create(2)
    names, out = list("abcd"), np.zeros(10, F)
    store.init(names, [np.zeros(10, F)] * 4)
    store.set_optimizer(own_rules.Added())
    for step in range(1, 100):
        for name in names:
            store.push(name, np.ones(10, F))
        if step % 10 == 0:
            store.barrier()
        if step % 3 == 0:
            store.pull(names, out=(outs := [np.zeros(10, F) for _ in names]))
            assert all((one == step).all() for one in outs)
    store.pull("d", out=out)
    assert (out == 99).all() and quick.begun > 100


def test_calls_of_another_kind_after_a_push_that_is_not_waited_for(
    quick: Quick, create: Callable[..., kv.KVStore]
) -> None:
    store = create()
    store.init(["a", "b"], [np.zeros(10, F)] * 2)
    store.set_optimizer(own_rules.Added())
    pushes, other = 0, np.zeros((10,), np.float64)
    for after in (
        store.barrier,
        lambda: store.pull("a", out=other),
        lambda: store.init(f"c{pushes}", np.zeros(3, F)),
        lambda: store.push("a", [np.zeros(10, F)] * 2),
        lambda: store.push("a", np.zeros(10, F), async_op=True).wait(),  # type: ignore[union-attr]
        store.keys,
    ):

        def call(after: Any = after) -> None:
            nonlocal pushes
            pushes += 1
            store.push("a", np.ones(10, F))
            after()
            store.pull("a", out=other)
            assert (other == pushes).all()

        quick.call(call, adopted=None)


def test_an_error_after_a_push_that_is_not_waited_for(
    quick: Quick, create: Callable[..., kv.KVStore]
) -> None:
    store = create()
    store.init([0, 1], [np.ones(10, F)] * 2)
    store.set_optimizer(own_rules.Halving(fail_on=1))
    out = np.zeros(10, F)

    def fails() -> None:
        store.push(1, np.ones(10, F))
        with pytest.raises(kv.UpdaterError, match="on demand"):
            store.pull(1, out=out)
        assert not out.any()

    quick.call(fails, adopted=True)
    store.barrier()
    quick.call(lambda: (store.push(0, np.ones(10, F)), store.pull(0, out=out)))
    assert out[0] < 1


@pytest.mark.parametrize(("size", "shm"), [(10, True), (100_000, True), (100_000, False)])
@pytest.mark.parametrize("closed", [False, True])
def test_a_stream_that_breaks_before_a_push_is_answered(
    quick: Quick,
    create: Callable[..., kv.KVStore],
    closed: bool,
    size: int,
    shm: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVSTORE_RESEND", "1000")  # the requests on the stream are repeated sooner
    store = create(same_host_shm=shm)
    store.init("a", np.zeros(size, F))
    store.set_optimizer(own_rules.Added())
    out, pushes = np.zeros(size, F), 0

    def push() -> None:
        nonlocal pushes
        pushes += 1
        value = np.ones(size, F)
        store.push("a", value)
        value[:] = -1

    driver: Any = store._backend._client.driver  # type: ignore[attr-defined]
    step, ended = driver._machine.step, []

    def noted(event: Any, now: float) -> Any:
        ended.extend([event] if type(event) is StreamLost else [])
        return step(event, now)

    monkeypatch.setattr(driver._machine, "step", noted)
    for after in (lambda: None, push, store.barrier):
        end = pace.deadline(20)
        while True:
            push()
            if driver._quick is not None:
                break
            assert time.monotonic() < end
        stream = driver._quick._ways[0].stream
        if closed:
            stream.close()
        else:
            with socket.socket(fileno=os.dup(stream.fileno())) as other:
                other.shutdown(socket.SHUT_RDWR)
        after()
        store.pull("a", out=out)
        assert (out == pushes).all()
        assert ended
        ended.clear()


def test_codecs_that_are_not_usual(quick: Quick, create: Callable[..., kv.KVStore]) -> None:
    store = create()
    store.init(["a", "b"], [np.zeros(10, F)] * 2)
    store.init("other", np.zeros(10, np.float64))
    store.set_gradient_compression({"type": "fp16"})
    value, out = np.full(10, 0.1, F), np.zeros(10, F)
    quick.call(lambda: store.pushpull("a", value, out=out))
    assert (out == value.astype(np.float16).astype(F)).all()
    begun = quick.begun
    with pytest.raises(kv.DTypeError):
        store.pushpull("other", value.astype(np.float64))
    with pytest.raises(kv.DTypeError):
        store.push("other", value.astype(np.float64))
    assert quick.begun == begun
    store.pull("other", out=np.zeros(10))
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    residual = np.zeros(10, F)

    def call() -> None:
        store.pushpull("b", value, out=out)
        residual[:] += value
        sent = np.where(residual >= 0.5, F(0.5), F(0))
        residual[:] -= sent
        assert (out == sent).all() and (value == F(0.1)).all()

    for _ in range(12):
        quick.call(call)


def test_a_codec_that_is_set_while_a_push_has_no_answer(
    quick: Quick, create: Callable[..., kv.KVStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The push lies in memory of both, and no thread waits for it."""
    store = create(same_host_shm=True)
    driver: Any = store._backend._client.driver  # type: ignore[attr-defined]
    store.init("a", np.zeros(200_000, F))
    value, out = np.ones(200_000, F), np.zeros(200_000, F)
    end = pace.deadline(20)
    while driver._quick is None:
        assert time.monotonic() < end
        store.push("a", value)
    monkeypatch.setattr(driver, "_ticked", time.monotonic() + 1000)
    store.set_gradient_compression({"type": "2bit", "threshold": 1.0})
    store.push("a", value)
    store.pull("a", out=out)
    assert (out == 1).all()


def test_what_is_under_way_comes_first(quick: Quick, create: Callable[..., kv.KVStore]) -> None:
    store = create()
    store.init("a", np.zeros(10, F))
    store.set_optimizer(own_rules.Added())
    out, pushes = np.zeros(10, F), 0
    for _ in range(200):
        store.push("a", np.ones(10, F))
        store.pushpull("a", np.ones(10, F), out=out)
        pushes += 2
        assert (out == pushes).all()


def counts(store: kv.KVStore, server: int = 0) -> dict[str, Any]:
    table: Any = store._backend._client._machine._servers[server].requests  # type: ignore[attr-defined]
    names = ("_sent", "_answered", "_received", "_next", "pushes", "accepted", "complete", "_flying")
    found = {name: getattr(table, name) for name in names}
    return {name: sorted(one.values()) if isinstance(one, dict) else one for name, one in found.items()}


@pytest.mark.parametrize("slice_bytes", [0, 4096])
def test_the_machine_counts_as_after_usual_calls(
    quick: Quick,
    create: Callable[..., kv.KVStore],
    monkeypatch: pytest.MonkeyPatch,
    slice_bytes: int,
) -> None:
    found = []
    for usual in (False, True):
        store = create(slice_bytes=slice_bytes)
        store.init("a", np.zeros(10_000, F))
        out = np.zeros(10_000, F)
        for _ in range(20):
            quick.begun = 0
            if usual:
                with monkeypatch.context() as patched:
                    patched.setattr(backend.QuickCalls, "pushpull", lambda *_: False)
                    store.pushpull("a", out, out=out)
                assert not quick.begun
            else:
                store.pushpull("a", out, out=out)
        ours: Any = store._backend
        key = ours._keys.get("a")
        found.append((counts(store), key.pushes, pushed(ours), ours._pushes.calls._last["a"]))
    quick_state, usual_state = found
    quick_state[0]["_flying"] = usual_state[0]["_flying"]  # zero, or none
    assert quick_state == usual_state


SIZES = {"a": 10_000, "b": 300_000, "c": 1, "d": 2_000_000, "e": 50, "f": 700_000}


def begin_all(store: kv.KVStore, step: int) -> Iterator[tuple[str, Any, Any]]:
    """Begin a call for each key, or each two; yield names, handles, and outs."""
    for names in (["a"], ["b", "c"], ["d"], ["e"], ["f"]):
        values = [np.full(SIZES[name], step, F) for name in names]
        outs = [np.zeros(SIZES[name], F) for name in names]
        yield "".join(names), store.pushpull(names, values, out=outs, async_op=True), outs


@pytest.mark.parametrize("shm", [False, True])
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("backwards", [False, True])
def test_asynchronous_calls_are_chained(
    quick: Quick, create: Callable[..., kv.KVStore], servers: int, shm: bool, backwards: bool
) -> None:
    store = create(servers, same_host_shm=shm)
    store.init(list(SIZES), [np.zeros(n, F) for n in SIZES.values()])
    steps = itertools.count(1)

    def call() -> None:
        step, begun = next(steps), quick.begun
        works = list(begin_all(store, step))
        for _, work, outs in reversed(works) if backwards else works:
            work.wait()
            assert all((out == step).all() for out in outs)
        quick.begun -= quick.begun - begun < len(works)  # `call` repeats it

    quick.call(call)
    assert store._backend._client.driver._quick is None  # type: ignore[attr-defined]


def test_the_machine_counts_chained_calls_as_usual_ones(
    create: Callable[..., kv.KVStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for usual in (False, True):
        with monkeypatch.context() as patched:
            if usual:
                patched.setattr(backend.QuickCalls, "start", lambda *_: False)
                patched.setattr(backend.QuickCalls, "pushpull", lambda *_: False)
            store = create(2)
            store.init(list(SIZES), [np.zeros(n, F) for n in SIZES.values()])
            for step in range(1, 12):
                works = list(begin_all(store, step))
                if step % 4 == 0:  # the others continue as usual ones
                    store.pull("c", out=np.zeros(1, F))
                for _, work, _ in works:
                    work.wait()
            ours: Any = store._backend
            state = [counts(store, server) for server in (0, 1)]
            for one in state:
                one["_flying"] = [each for each in one["_flying"] if each]
            found.append((state, [ours._keys.get(key).pushes for key in SIZES], pushed(ours)))
            store.close()
    assert found[0] == found[1]


def test_a_chain_is_not_overtaken(quick: Quick, create: Callable[..., kv.KVStore]) -> None:
    """A more urgent call uses the general path, which sends it first; so does the same key once more."""
    store = create()
    store.init(["a", "b"], [np.zeros(100_000, F)] * 2)
    outs = [np.zeros(100_000, F) for _ in range(3)]

    def call() -> None:
        works = [
            store.pushpull(key, np.full(100_000, at, F), out=outs[at], priority=priority, async_op=True)
            for at, (key, priority) in enumerate([("a", 0), ("b", 1), ("a", 0)])
        ]
        for at, work in enumerate(works):
            assert work is not None
            work.wait()
            assert (outs[at] == at).all()

    quick.call(call, adopted=True)


@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_stream_that_breaks_under_a_chain(
    create: Callable[..., kv.KVStore], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    store = create(2)
    store.init(list(SIZES), [np.zeros(n, F) for n in SIZES.values()])
    begin = QuickCall.begin
    cut = 0

    def begun(call: QuickCall, machine: Any, sockets: Any, before: Any) -> bool:
        nonlocal cut
        done = begin(call, machine, sockets, before)
        if done and (before is not None) == (when == "behind"):
            cut += 1
            fileno = os.dup(call._ways[-1].stream.fileno())
            with contextlib.suppress(OSError), socket.socket(fileno=fileno) as other:
                other.shutdown(socket.SHUT_RDWR)
        return done

    for step in range(1, 8):
        with monkeypatch.context() as patched:
            if step % 2:
                patched.setattr(QuickCall, "begin", begun)
            works = list(begin_all(store, step))
            for _, work, outs in works:
                work.wait()
                assert all((out == step).all() for out in outs)
    assert cut


def test_an_error_of_the_server_in_a_chain(create: Callable[..., kv.KVStore]) -> None:
    store = create()
    store.init(list(SIZES), [np.full(n, 8, F) for n in SIZES.values()])
    store.set_optimizer(own_rules.Halving(fail_on="d"))
    for step in (1, 2):
        for name, work, outs in list(begin_all(store, step)):
            if name == "d":
                with pytest.raises(kv.UpdaterError, match="on demand"):
                    work.wait()
            else:
                work.wait()
                assert all((out == 8 / 2**step).all() for out in outs), name


def test_two_threads(quick: Quick, create: Callable[..., kv.KVStore]) -> None:
    store = create()
    errors: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for step in range(150):
                value, out = np.full(1000, step, F), np.zeros(1000, F)
                store.pushpull(name, value, out=out)
                assert (out == step).all()
        except BaseException as error:
            errors.append(error)

    store.init(["a", "b"], [np.zeros(1000, F)] * 2)
    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and quick.begun


def test_an_error_of_the_server(quick: Quick, create: Callable[..., kv.KVStore]) -> None:
    store = create()
    store.init([0, 1], [np.ones(10, F)] * 2)
    store.set_optimizer(own_rules.Halving(fail_on=1))
    value, out = np.ones(10, F), np.zeros(10, F)

    def fails() -> None:
        with pytest.raises(kv.UpdaterError, match="on demand"):
            store.pushpull(1, value, out=out)
        assert not out.any()

    quick.call(fails, adopted=True)
    quick.call(lambda: store.pushpull(0, value, out=out))
    assert out[0] < 1


@pytest.mark.parametrize(("size", "when"), each_once([1000, 400_000], ["before", "meanwhile", "closed"]))
def test_a_stream_that_breaks(
    quick: Quick, create: Callable[..., kv.KVStore], monkeypatch: pytest.MonkeyPatch, when: str, size: int
) -> None:
    store = create()
    store.init("a", np.zeros(size, F))
    store.set_optimizer(own_rules.Added())
    out, total = np.zeros(size, F), 0
    begin, wait = QuickCall.begin, QuickCall.wait

    def cut(stream: Any) -> None:
        if when == "closed":
            stream.close()
            return
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(stream.fileno())) as other:
            other.shutdown(socket.SHUT_RDWR)  # unless the server has closed it by now

    def begun(call: QuickCall, machine: Any, sockets: Any, before: Any) -> bool:
        stream = sockets.server_stream(0)
        if stream is not None and when != "meanwhile":
            cut(stream)
            monkeypatch.setattr(sockets, "server_stream", lambda server: stream)
            try:
                return begin(call, machine, sockets, before)
            finally:
                monkeypatch.undo()
        return begin(call, machine, sockets, before)

    def waited(call: QuickCall, *arguments: Any) -> Any:
        if when == "meanwhile":
            cut(call._ways[0].stream)
        return wait(call, *arguments)

    def call() -> None:
        nonlocal total
        total += 1
        store.pushpull("a", np.ones(size, F), out=out)
        assert (out == total).all()

    quick.call(call)
    with monkeypatch.context() as patched:
        patched.setattr(QuickCall, "begin", begun)
        patched.setattr(QuickCall, "wait", waited)
        begun_before = quick.begun
        end = pace.deadline(20)
        while quick.begun == begun_before:
            call()
            assert time.monotonic() < end
    for _ in range(10):
        call()


def test_an_interrupted_wait(
    quick: Quick, create: Callable[..., kv.KVStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = create()
    store.init("a", np.zeros(1000, F))
    store.set_optimizer(own_rules.Added())
    out = np.zeros(1000, F)
    quick.call(lambda: store.pushpull("a", np.zeros(1000, F), out=out))

    def interrupted(call: QuickCall, *_: Any) -> Any:
        signal.raise_signal(signal.SIGINT)

    begun = quick.begun
    with monkeypatch.context() as patched:
        patched.setattr(QuickCall, "wait", interrupted)
        end = pace.deadline(20)
        while quick.begun == begun:
            assert time.monotonic() < end
            try:
                store.pushpull("a", np.ones(1000, F), out=out)
            except KeyboardInterrupt:
                break
            out[:] = 0
    out[:] = -1
    found = np.zeros(1000, F)
    store.pull("a", out=found)
    assert found[0] >= 1 and (found == found[0]).all(), "the sent bytes count"
    assert (out == -1).all(), "and nothing is delivered later"
    store.pushpull("a", np.ones(1000, F), out=out)
    assert (out == found + 1).all()


def test_a_worker_that_comes_late_makes_no_call_slow(served: Callable[..., ServedJob]) -> None:
    job = served(2, 1)
    job.start_all("procs_dist", "one_comes_late", 20_000)
    job.results()


DYING = [("until_the_server_dies", 1000), ("until_the_server_dies", 400_000),
         ("rows_until_the_server_dies", 50), ("rows_until_the_server_dies", 20_000)]  # fmt: skip


@pytest.mark.parametrize(("body", "size"), nightly_unless(lambda _, size: size > 1000, DYING))
def test_a_server_that_dies_meanwhile(served: Callable[..., ServedJob], body: str, size: int) -> None:
    job = served(2, 1, KVSTORE_SAME_HOST_SHM="0", KVSTORE_DEAD_AFTER=pace.variable(2))
    workers = job.start_all("procs_dist", body, size)
    for worker in workers:
        worker.expect("ready")
    job.servers[0].signal(signal.SIGKILL)
    assert min(job.results()) > 0
