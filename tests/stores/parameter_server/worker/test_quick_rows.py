"""Quick calls about rows on real servers: values, counts and errors are those of usual calls."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pace
import pytest
from nightly import each_once, nightly_unless
from quick_counter import Quick

import kvstore as kv
from kvstore.arrays.element_types import dtype_named
from kvstore.stores.parameter_server.worker import quick_rows
from kvstore.stores.parameter_server.worker.quick_calls import QuickCall

F = np.float32
SHAPE = (4000, 3, 4)


def table(dtype: Any = F, shape: tuple[int, ...] = SHAPE) -> kv.RowSparseArray:
    rows = np.random.default_rng(1).normal(0, 1, shape).astype(dtype)
    return kv.RowSparseArray(rows, np.arange(shape[0]), shape)


def drawn_ids(draw: random.Random) -> Any:
    """Ids as a caller may give them: unsorted and repeated, or none, of several types and shapes."""
    count = draw.choice([0, 1, 2, 50, 600, 2500])
    ids = np.array([draw.randrange(SHAPE[0]) for _ in range(count)], np.int64)
    how = draw.randrange(6)
    if how == 0:
        return ids.tolist()
    if how == 1:
        return np.unique(ids)
    if how == 2:
        return (ids % 200).astype(np.uint8)
    if how == 3:
        return ids.astype(draw.choice([np.int32, np.uint64, np.float64]))
    return ids.reshape(-1, 2) if how == 4 and count % 2 == 0 else ids[::-1]


def drawn_rows(draw: random.Random, numbers: np.random.Generator, dtype: Any) -> kv.RowSparseArray:
    """Rows to be pushed; of repeated ids they are summed."""
    ids = np.asarray(drawn_ids(draw), np.int64).ravel()
    return kv.RowSparseArray(numbers.normal(0, 1, (len(ids), *SHAPE[1:])).astype(dtype), ids, SHAPE)


def run_random_program(store: kv.KVStore, dtype: Any, seed: int) -> list[bytes]:
    """Run a program of pushes and pulls of rows; return all that was received."""
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    outs = [kv.RowSparseArray.zeros(SHAPE, kind) for kind in (dtype, dtype, np.float64)]
    found: list[bytes] = []
    for _ in range(40):
        verb = draw.choice(["push", "pull", "pull", "dense", "lists"])
        if verb == "push":
            value = drawn_rows(draw, numbers, dtype)
            store.push("t", value)
            value.data[...] = np.nan  # it is the caller's again
            continue
        chosen = [draw.choice(outs)]
        if verb == "pull":
            store.row_sparse_pull("t", out=chosen[0], row_ids=drawn_ids(draw))
        elif verb == "lists":
            chosen = outs[1:]
            store.push("t", [drawn_rows(draw, numbers, dtype) for _ in range(2)])
            store.row_sparse_pull(["t"], out=[chosen], row_ids=[[drawn_ids(draw) for _ in chosen]])
        else:
            store.push("d", np.full(10, draw.random(), F))  # small: it is not waited for
            store.row_sparse_pull("t", out=chosen[0], row_ids=drawn_ids(draw))
        found += [part for out in chosen for part in (out.data.tobytes(), out.indices.tobytes())]
    return found


def counts(store: Any, servers: int) -> list[Any]:
    """Count bytes and requests of all servers, and pushes."""
    tables = [store._client._machine._servers[server].requests for server in range(servers)]
    names = ("_sent", "_answered", "_received", "_next")
    sums = [sum(getattr(one, name) for one in tables) for name in names]
    return [*sums, store._pushes.made, store._optimizer.clock.stamp, store._keys.get("t").pushes]


#: Every time each type, and one server and two with rounds and without.
PROGRAMS = nightly_unless(
    lambda kind, dtype, servers, shm: (
        servers == 1 + (["float32", "float16", "float64"].index(dtype) + (kind == "dist_async")) % 2
        and shm == (dtype == "float64")
    ),
    itertools.product(["dist_sync", "dist_async"], ["float32", "float16", "float64"], (1, 2), (False, True)),
)


@pytest.mark.parametrize(("kind", "dtype", "servers", "shm"), PROGRAMS)
def test_random_programs_as_in_the_usual_way(
    quick: Quick,
    on_servers: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    dtype: str,
    servers: int,
    shm: bool,
) -> None:
    found = []
    for usual in (False, True):
        options = {"same_host_shm": shm, "slice_bytes": 1 << 20 if servers == 1 else 70_000}
        with (
            monkeypatch.context() as patched,
            kv.create(on_servers(f"{kind}:{servers}"), **options) as store,
        ):
            for verb in ("push", "pull") if usual else ():
                patched.setattr(quick_rows.QuickRowCalls, verb, lambda *_: False)
            store.init(["t", "d"], [table(dtype_named(dtype)), np.zeros(10, F)])
            received, begun = [], quick.begun
            for seed in range(2):
                received.append(run_random_program(store, dtype_named(dtype), seed))
                store.set_optimizer(kv.optimizer.SGD(learning_rate=0.1))
            store.barrier()
            assert usual or quick.begun > begun + 20
            found.append((received, counts(store._backend, servers)))
    assert found[0] == found[1]


def test_lists_of_one(quick: Quick, create: Callable[..., kv.KVStore]) -> None:
    store = create()
    store.init("t", table())
    out, value = kv.RowSparseArray.zeros(SHAPE), table()
    quick.call(lambda: store.push("t", [value]))
    for ids, outs in (([np.array([3, 1])], [out]), (np.array([3, 1]), [out]), ([np.array([3, 1])], out)):
        out.data[...] = 0
        quick.call(lambda ids=ids, outs=outs: store.row_sparse_pull("t", out=outs, row_ids=ids))  # type: ignore[misc]
        assert (out.data == value.data[[1, 3]]).all()
    begun = quick.begun
    store.row_sparse_pull("t", out=[out], row_ids=[7])
    assert (out.data == value.data[7]).all() and quick.begun == begun


@pytest.mark.parametrize("servers", [1, 2])
def test_large_rows(quick: Quick, create: Callable[..., kv.KVStore], servers: int) -> None:
    """They are received where they belong, in memory that is used again."""
    shape = (30_000, 32)
    store = create(servers, slice_bytes=2_000_000)
    mirror = table(shape=shape).data.copy()
    store.init("t", table(shape=shape))
    store.set_optimizer(kv.optimizer.SGD(learning_rate=1.0))
    ids = np.random.default_rng(3).permutation(shape[0])[:20_000]
    out = kv.RowSparseArray(np.full(shape, np.nan, F), np.arange(shape[0]), shape)
    memory = out.data.ctypes.data

    def call() -> None:
        rows = np.random.default_rng(4).normal(0, 1, (20_000, 32)).astype(F)
        mirror[ids] -= rows
        given = ids.copy()
        store.push("t", kv.RowSparseArray(rows, given, shape))
        rows[:] = np.nan
        store.row_sparse_pull("t", out=out, row_ids=given)
        given[:] = 0
        assert (out.indices == np.sort(ids)).all() and (out.data == mirror[out.indices]).all()
        assert out.data.ctypes.data == memory

    begun = quick.begun
    quick.call(call)
    quick.call(call)
    assert quick.begun >= begun + 4


def test_calls_that_are_not_usual(quick: Quick, create: Callable[..., kv.KVStore]) -> None:
    store = create()
    store.init(["t", "dense"], [table(), np.zeros(SHAPE, F)])
    store.init(
        ["whole", "thin"], [kv.RowSparseArray.zeros((4, 2), np.int64), kv.RowSparseArray.zeros((4, 0))]
    )
    value, out, ids = table(), kv.RowSparseArray.zeros(SHAPE), np.array([3, 1])
    other = kv.RowSparseArray.zeros((4000, 12))
    begun = quick.begun
    for wrong, error in (
        (np.array([0, 4000]), kv.RowIndexError),
        (np.array([-1]), kv.RowIndexError),
        (np.array([2**64 - 1], np.uint64), kv.RowIndexError),
        (np.array([np.nan]), kv.RowIndexError),
        (np.array(["a"]), kv.DTypeError),
        (None, kv.ArrayError),
    ):
        with pytest.raises(error):
            store.row_sparse_pull("t", out=out, row_ids=wrong)
    for name, target, error in (
        ("t", other, kv.ShapeError),
        ("t", np.zeros(SHAPE, F), kv.ArrayError),
        ("t", None, kv.ArrayError),
        ("dense", out, kv.ArrayError),
        ("none", out, kv.KeyNotFoundError),
    ):
        with pytest.raises(error):
            store.row_sparse_pull(name, out=target, row_ids=ids)
    outside = table()
    outside.indices = outside.indices + 1
    for pushed, error in (
        (other, kv.ShapeError),
        (table(np.float64), kv.DTypeError),
        (outside, kv.RowIndexError),
    ):
        with pytest.raises(error):
            store.push("t", pushed)
    with pytest.raises(kv.KeyNotFoundError):
        store.push("none", value)
    store.push("thin", kv.RowSparseArray(np.zeros((2, 0), F), [0, 1], (4, 0)))
    store.push("t", kv.RowSparseArray.zeros(SHAPE))
    store.row_sparse_pull("t", out=out, row_ids=np.zeros(0, np.int64))
    assert not out.nnz_rows and quick.begun == begun
    store.row_sparse_pull("t", out=out, row_ids=ids)
    assert not out.data.any(), "the sum of no rows has taken the table's place"
    turned = table()
    turned.data, turned.indices = turned.data[::-1], turned.indices[::-1]
    store.push("t", turned)
    store.row_sparse_pull("t", out=out, row_ids=ids)
    assert (out.data == value.data[[1, 3]]).all() and out.indices.tolist() == [1, 3]
    store.set_optimizer(kv.optimizer.SGD())
    with pytest.raises(kv.DTypeError):
        store.push("whole", kv.RowSparseArray(np.zeros((1, 2), np.int64), [1], (4, 2)))
    store.close()
    for call in (
        lambda: store.push("t", other),
        lambda: store.push("t", value),
        lambda: store.row_sparse_pull("t", out=out, row_ids=ids),
    ):
        with pytest.raises(kv.ClosedError):
            call()


def test_a_codec_is_told_of(create: Callable[..., kv.KVStore]) -> None:
    store = create()
    store.init("t", table())
    store.set_gradient_compression({"type": "2bit"})
    with pytest.raises(kv.KVStoreError, match=r"row-sparse|dense"):
        store.push("t", table())


@pytest.mark.parametrize(("count", "when"), each_once([20, 3000], ["meanwhile", "closed"]))
def test_a_stream_that_breaks(
    quick: Quick, create: Callable[..., kv.KVStore], monkeypatch: pytest.MonkeyPatch, when: str, count: int
) -> None:
    """The general path continues the unanswered calls: no push is lost, and none counts twice."""
    store = create()
    mirror = table().data.copy()
    store.init("t", table())
    store.set_optimizer(kv.optimizer.SGD(learning_rate=1.0))
    out, ids = kv.RowSparseArray.zeros(SHAPE), np.arange(count)
    wait = QuickCall.wait

    def waited(call: QuickCall, *arguments: Any) -> Any:
        stream = call._ways[0].stream
        if when == "closed":
            stream.close()
        else:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(stream.fileno())) as other:
                other.shutdown(socket.SHUT_RDWR)  # unless the server has closed it by now
        return wait(call, *arguments)

    def push() -> None:
        mirror[ids] -= 1
        store.push("t", kv.RowSparseArray(np.ones((count, *SHAPE[1:]), F), ids, SHAPE))

    def pull() -> None:
        store.row_sparse_pull("t", out=out, row_ids=ids)
        assert (out.data == mirror[ids]).all()

    for broken, then in ((push, pull), (pull, push)):
        with monkeypatch.context() as patched:
            patched.setattr(QuickCall, "wait", waited)
            quick.call(broken, adopted=True)
        then()
        pull()


def test_a_stream_that_ends_while_rows_are_sent(
    quick: Quick, create: Callable[..., kv.KVStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server lives on, and has the rows for a repeated request."""
    shape = 8000, 512
    store, out, ids = create(), kv.RowSparseArray.zeros(shape), np.arange(8000)
    value = kv.RowSparseArray(np.ones(shape, F), ids, shape)
    store.init("t", kv.RowSparseArray(np.zeros(shape, F), ids, shape))
    store.set_optimizer(kv.optimizer.SGD(learning_rate=1.0))
    store.push("t", value)
    store.push("t", value)
    wait = QuickCall.wait

    def closed(call: QuickCall, *arguments: Any) -> Any:
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(call._ways[0].stream.fileno())) as other,
        ):
            other.shutdown(socket.SHUT_RDWR)  # unless the server has closed it by now
        return wait(call, *arguments)

    def pull() -> None:
        store.row_sparse_pull("t", out=out, row_ids=ids)
        assert (out.data == -2).all()

    for _ in range(5):
        with monkeypatch.context() as patched:
            patched.setattr(QuickCall, "wait", closed)
            quick.call(pull, adopted=True)
    quick.call(pull)


@pytest.mark.parametrize("asked", [50, 3000])
def test_an_interrupted_wait(
    quick: Quick, create: Callable[..., kv.KVStore], monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    """Ids are copied, however many: data in flight is not the caller's."""
    store = create()
    store.init("t", table())
    out, ids = kv.RowSparseArray.zeros(SHAPE), np.arange(asked)
    other = kv.RowSparseArray.zeros(SHAPE)
    quick.call(lambda: store.row_sparse_pull("t", out=other, row_ids=ids))

    def interrupted(call: QuickCall, *_: Any) -> Any:
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(QuickCall, "wait", interrupted)
        end = pace.deadline(20)
        while True:
            assert time.monotonic() < end
            try:
                store.row_sparse_pull("t", out=out, row_ids=ids)
            except KeyboardInterrupt:
                break
            out = kv.RowSparseArray.zeros(SHAPE)
    store.row_sparse_pull("t", out=other, row_ids=ids)
    assert not out.nnz_rows, "nothing is delivered later"
    assert (other.data == table().data[:asked]).all()
