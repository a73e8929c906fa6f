"""A push that raises before it is sent has changed nothing, however it fails."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pace
import pytest
from quick_counter import Quick

import kvstore as kv
from kvstore import compression
from kvstore.stores.parameter_server.protocol.messages import Failure
from kvstore.stores.parameter_server.transport.sockets import WorkerSockets
from kvstore.stores.parameter_server.worker import backend, quick_calls, request_builder

F = np.float32
KEYS = ["a", "b"]
Patch = pytest.MonkeyPatch
Context = contextlib.AbstractContextManager[Any]


@compression.register
class Halves(compression.Codec):
    """Sends half of the data, and fails on demand."""

    name = "halves"
    feedback = True
    fails_on: Any = None

    def nbytes(self, size: int) -> int:
        return 4 * size

    def encode(self, gradient: Any, residual: Any, packed: Any) -> None:
        if gradient.size == self.fails_on:
            raise ZeroDivisionError("on demand")
        residual += gradient
        residual /= 2
        packed.view(F)[:] = residual.reshape(-1)

    def decode(self, packed: Any, gradient: Any) -> None:
        gradient.reshape(-1)[:] = packed.view(F)


def state(store: kv.KVStore) -> dict[str, Any]:
    """All that a push changes in its worker."""
    ours: Any = store._backend
    pushes, tables = ours._pushes, [link.requests for link in ours._client._machine._servers.all()]
    residuals = {} if pushes.feedback is None else pushes.feedback._residuals
    return {
        "pushes": {key.key: key.pushes for key in ours._keys},
        "made": pushes.made,
        "clock": (pushes.optimizer.clock.stamp, dict(pushes.optimizer.clock.counts)),
        "calls": {key: list(calls) for key, calls in pushes.calls._last.items()},
        "residuals": {name: one.tolist() for name, one in residuals.items() if one.any()},
        "machine": [dict(table.pushes) for table in tables],
        "operations": list(ours._client._operations.open),
    }


# --------------------------------------------------------------------------------------------- how it fails


def refuse(*_: Any) -> Any:
    raise MemoryError("on demand")


@contextlib.contextmanager
def the_codec(store: Any, patch: Patch) -> Iterator[None]:
    patch.setattr(Halves, "fails_on", 70)
    yield


@contextlib.contextmanager
def an_earlier_push(store: Any, patch: Patch) -> Iterator[None]:
    store._backend._client._operations.failed = Failure("UpdaterError", "on demand")
    yield


@contextlib.contextmanager
def another_thread_at_the_sockets(store: Any, patch: Patch) -> Iterator[None]:
    driver = store._backend._client.driver
    patch.setattr(driver, "timeout", 0.01)
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with driver._lock:
            held.set()
            over.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    assert held.wait(60)
    try:
        yield
    finally:
        over.set()
        other.join()


@contextlib.contextmanager
def a_message_that_is_too_large(store: Any, patch: Patch) -> Iterator[None]:
    patch.setattr(WorkerSockets, "frame_bytes", 100)
    yield


@contextlib.contextmanager
def memory_for_requests(store: Any, patch: Patch) -> Iterator[None]:
    cut = request_builder.RequestBuilder._cut_payload

    def cut_one(slices: Any, key: Any, *arguments: Any) -> Any:
        return refuse() if key.key == "b" else cut(slices, key, *arguments)

    patch.setattr(request_builder.RequestBuilder, "_cut_payload", cut_one)
    yield


@contextlib.contextmanager
def memory_for_rows(store: Any, patch: Patch) -> Iterator[None]:
    patch.setattr(request_builder, "sum_rows", refuse)
    yield


# ------------------------------------------------------------------------------------------- pushed values


def pushed(store: kv.KVStore, values: Any) -> None:
    store.push(KEYS, values)


def pushed_and_pulled(store: kv.KVStore, values: Any) -> None:
    store.pushpull(KEYS, values, out=[np.empty_like(one) for one in values])


def pushed_in_the_background(store: kv.KVStore, values: Any) -> None:
    work = store.push(KEYS, values, async_op=True)
    assert work is not None
    work.wait()


def pushed_in_a_step(store: kv.KVStore, values: Any) -> None:
    with store.step():
        for key, value in zip(KEYS, values, strict=True):
            store.push(key, value)


VERBS = [pushed, pushed_and_pulled, pushed_in_the_background, pushed_in_a_step]
WAYS = [
    (None, an_earlier_push, kv.UpdaterError),
    (None, another_thread_at_the_sockets, kv.TimeoutError),
    (None, memory_for_requests, MemoryError),
    (None, a_message_that_is_too_large, kv.CapabilityError),
    ("halves", the_codec, kv.CodecError),
    ("halves", memory_for_requests, MemoryError),
    ("2bit", memory_for_requests, MemoryError),
    ("2bit", an_earlier_push, kv.UpdaterError),
    ("2bit", another_thread_at_the_sockets, kv.TimeoutError),
]


def trained(
    store: kv.KVStore, push: Callable[..., None], fail: Callable[[], Context] | None = None
) -> list[Any]:
    """Push five times, the third time in vain; return the results."""
    store.set_optimizer(
        kv.optimizer.SGD(lr_scheduler=kv.optimizer.lr_scheduler.MultiFactorScheduler([3], 0.5, base_lr=1.0))
    )
    values = [np.linspace(-1, 1, size, dtype=F) for size in (50, 70)]
    for step in range(5):
        if step == 2 and fail is not None:
            before = state(store)
            with fail():
                push(store, values)
            assert state(store) == before
        push(store, values)
    outs = [np.empty_like(one) for one in values]
    store.pull(KEYS, out=outs)
    return [out.tolist() for out in outs]


@pytest.mark.parametrize("push", VERBS)
@pytest.mark.parametrize(("codec", "fails", "error"), WAYS)
def test_what_was_not_sent_does_not_count(
    create: Callable[..., kv.KVStore],
    monkeypatch: Patch,
    codec: str | None,
    fails: Callable[..., Context],
    error: type[Exception],
    push: Callable[..., None],
) -> None:
    found = []

    for in_vain in (False, True):
        store = create()
        for quick in (backend.QuickCalls, backend.QuickRowCalls):
            monkeypatch.setattr(quick, "push", lambda *_: False)
            for verb in ("pushpull", "start"):
                monkeypatch.setattr(backend.QuickCalls, verb, lambda *_: False)
        store.init(KEYS, [np.zeros(50, F), np.zeros(70, F)])
        if codec is not None:
            store.set_gradient_compression({"type": codec})

        @contextlib.contextmanager
        def fail(store: kv.KVStore = store) -> Iterator[None]:
            with monkeypatch.context() as patch, pytest.raises(error), fails(store, patch):
                yield

        found.append(
            (trained(store, push, fail if in_vain else None), state(store)["made"], state(store)["clock"])
        )
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("fails", "error"),
    [
        (memory_for_rows, MemoryError),
        (an_earlier_push, kv.UpdaterError),
        (a_message_that_is_too_large, kv.CapabilityError),
    ],
)
@pytest.mark.parametrize("verb", ["push", "async push"])
def test_rows_that_were_not_sent_do_not_count(
    create: Callable[..., kv.KVStore],
    monkeypatch: Patch,
    fails: Callable[..., Context],
    error: type[Exception],
    verb: str,
) -> None:
    store = create()
    store.init(["t", "u"], [kv.RowSparseArray.zeros((90, 3))] * 2)
    rows = kv.RowSparseArray(np.ones((40, 3), F), np.arange(40), (90, 3))

    def push() -> None:
        work = store.push(["t", "u"], [rows, [rows, rows]], async_op=verb == "async push")
        if work is not None:
            work.wait()

    push()
    before = state(store)
    with monkeypatch.context() as patch, fails(store, patch), pytest.raises(error):
        push()
    assert state(store) == before
    push()
    out = kv.RowSparseArray.zeros((90, 3))
    store.row_sparse_pull("u", out=out, row_ids=np.arange(2))
    assert (out.data == 2).all()
    assert state(store)["made"] == 2


@pytest.mark.parametrize("verb", ["push", "pushpull"])
def test_a_slice_that_no_message_holds_is_refused(
    create: Callable[..., kv.KVStore], monkeypatch: Patch, verb: str
) -> None:
    store = create()
    store.init("w", np.zeros(90, F))
    with monkeypatch.context() as patch:
        patch.setattr(WorkerSockets, "frame_bytes", 100)
        with pytest.raises(kv.CapabilityError, match=r"360 bytes of key 'w'.*smaller slice_bytes"):
            getattr(store, verb)("w", np.ones(90, F))
    value = np.ones(90, F)
    store.pushpull("w", value)
    assert (value == 1).all()


def test_rows_that_no_message_holds_are_refused_and_the_store_goes_on(
    create: Callable[..., kv.KVStore], monkeypatch: Patch
) -> None:
    store = create()
    store.init("t", kv.RowSparseArray.zeros((90, 3)))
    rows = kv.RowSparseArray(np.ones((90, 3), F), np.arange(90), (90, 3))
    with monkeypatch.context() as patch:
        patch.setattr(WorkerSockets, "frame_bytes", 1000)
        with pytest.raises(kv.CapabilityError, match=r"of key 't'.*push fewer rows"):
            store.push("t", [rows, rows])
    store.push("t", rows)
    out = kv.RowSparseArray.zeros((90, 3))
    store.row_sparse_pull("t", out=out, row_ids=np.arange(90))
    assert (out.data == 1).all()


# -------------------------------------------------------------------------------------------- quick pushes


def not_quick(*_: Any) -> Any:
    raise NotImplementedError("once in a while a call is none of the quick ones")


def until_quick(call: Callable[[], None]) -> None:
    raised, end = "", pace.deadline(20)
    while raised != "MemoryError":
        with pytest.raises((MemoryError, NotImplementedError)) as error:
            call()
        raised = error.type.__name__
        assert time.monotonic() < end


@pytest.mark.parametrize("verb", ["push", "pushpull"])
@pytest.mark.parametrize(
    ("codec", "place", "name"),
    [
        ("2bit", quick_calls.CallPlan, "packed"),
        ("2bit", compression.Feedback, "prepare"),
        (None, quick_calls.SharedPayloads, "carry_out"),
    ],
)
def test_a_quick_push_that_raises_does_not_count(
    quick: Quick,
    create: Callable[..., kv.KVStore],
    monkeypatch: Patch,
    codec: str | None,
    place: type,
    name: str,
    verb: str,
) -> None:
    store = create(same_host_shm=codec is None)
    sizes = (100_000, 70_000)
    store.init(KEYS, [np.zeros(size, F) for size in sizes])
    if codec is not None:
        store.set_gradient_compression({"type": codec, "threshold": 1.0})
    values = [np.ones(size, F) for size in sizes]
    more = {"out": [np.empty(size, F) for size in sizes]} if verb == "pushpull" else {}

    def call() -> None:
        getattr(store, verb)(KEYS, values, **more)

    quick.call(call, adopted=None)
    before = state(store)
    with monkeypatch.context() as patch:
        patch.setattr(place, name, refuse)
        patch.setattr(backend.DistBackend, "begin", not_quick)
        until_quick(call)
    assert state(store) == before
    call()
    assert state(store)["made"] == before["made"] + 1
    outs = [np.empty(size, F) for size in sizes]
    store.pull(KEYS, out=outs)
    assert all((out == 1).all() for out in outs)


def test_a_value_under_way_keeps_its_memory_from_pushes(create: Callable[..., kv.KVStore]) -> None:
    store = create(same_host_shm=True)
    ours: Any = store._backend
    pool, before = ours._client.pool, np.zeros(100_000, F)
    store.init("a", before)
    [written] = ours._values._write_requests(ours._keys.get("a"), np.full(100_000, 7, F))
    record = written.record
    lies = pool._segments[record.frame][record.offset : record.offset + record.nbytes].view(F)
    for _ in range(3):  # the server may read the value after a deadline, when the worker continues
        store.push("a", np.full(100_000, 5, F))
        assert (lies == 7).all()
    del written
    nbytes = pool.nbytes
    for _ in range(50):
        ours.assign([("a", [before])])
    assert pool.nbytes == nbytes


def test_memory_of_pushes_that_raise_is_used_again(
    create: Callable[..., kv.KVStore], monkeypatch: Patch
) -> None:
    store = create(same_host_shm=True)
    store.init("a", np.zeros(100_000, F))
    store.push("a", np.ones(100_000, F))
    ours: Any = store._backend
    for _ in range(5):
        ours._client._operations.failed = Failure("UpdaterError", "on demand")
        with pytest.raises(kv.UpdaterError):
            store.push("a", np.ones(100_000, F))
    store.push("a", np.full(100_000, 3, F))
    out = np.empty(100_000, F)
    store.pull("a", out=out)
    assert (out == 3).all()
    assert len(ours._memory._lent["a"]) <= 3
