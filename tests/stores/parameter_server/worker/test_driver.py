"""The thread that serves the sockets of a store: one thread, also after an exception in it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pace
import pytest
from quick_counter import Quick

import kvstore as kv
from kvstore.stores.parameter_server.protocol import events
from kvstore.stores.parameter_server.protocol.messages import Batch, Failure, PayloadLocation
from kvstore.stores.parameter_server.worker.client import WorkerClient
from kvstore.stores.parameter_server.worker.pushes import PushOperations
from kvstore.stores.parameter_server.worker.quick_calls import QuickCall
from kvstore.stores.parameter_server.worker.replies import FillOuts
from kvstore.stores.parameter_server.worker.state_machine.request_table import RequestTable

F = np.float32
LOCK: Any = type(threading.RLock())


class Alarm(Exception):
    """The exception of a program's signal handler."""


class Interrupting(LOCK):  # type: ignore[misc]
    """Ctrl-C arrives at the end of the `after`th call that acquires the lock, or releases it."""

    after = -1

    def _count(self) -> None:
        self.after -= 1
        if self.after == 0:
            raise KeyboardInterrupt

    def acquire(self, *args: Any, **options: Any) -> bool:
        taken: bool = super().acquire(*args, **options)
        self._count()
        return taken

    def release(self) -> None:
        super().release()
        self._count()


@contextmanager
def handled(number: int, handler: Callable[..., Any]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


#: Creates a store of which no call is quick; and its driver.
Usual = Callable[..., tuple[kv.KVStore, Any]]


@pytest.fixture
def usual(create: Callable[..., kv.KVStore], monkeypatch: pytest.MonkeyPatch) -> Usual:
    def make(*arguments: Any, **options: Any) -> tuple[kv.KVStore, Any]:
        store = create(*arguments, **options)
        driver: Any = store._backend._client.driver  # type: ignore[attr-defined]
        monkeypatch.setattr(driver, "begin", lambda _: False)
        return store, driver

    return make


def test_an_interrupt_leaves_the_sockets_free(create: Callable[..., kv.KVStore]) -> None:
    store = create(timeout=pace.seconds(10))
    driver: Any = store._backend._client.driver  # type: ignore[attr-defined]
    store.init("a", np.ones(1000, F))
    out, interrupted, after = np.zeros(1000, F), 0, 0
    driver._lock = lock = Interrupting()
    while interrupted == after:  # until a whole call has fewer steps
        after += 1
        lock.after = after
        try:
            store.pull("a", out=out)
        except KeyboardInterrupt:
            interrupted += 1
        lock.after = -1
        assert not driver.holds_sockets()
        out[:] = 0
        store.pull("a", out=out)
        assert (out == 1).all()
    assert interrupted >= 2


def test_the_serving_thread_does_not_sleep_while_another_wants_the_sockets(
    create: Callable[..., kv.KVStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver: Any = create()._backend._client.driver  # type: ignore[attr-defined]
    slept: list[float] = []
    monkeypatch.setattr(driver, "_handle", slept.append)
    driver.serve(lambda: False)
    driver._waiters.append(None)  # a thread that has woken the sockets before the wait
    driver.serve(lambda: False)
    driver._waiters.clear()
    assert slept[0] > 0 and slept[1:] == [0.0]


def test_a_resting_thread_leaves_the_sockets_to_callers(
    create: Callable[..., kv.KVStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = create()
    driver: Any = store._backend._client.driver  # type: ignore[attr-defined]
    store.init("a", np.zeros(10, F))
    over, adopted = threading.Event(), []
    adopt = QuickCall.adopt
    monkeypatch.setattr(QuickCall, "adopt", lambda *given: adopted.append(given) or adopt(*given))

    def rest() -> None:
        while not over.is_set():
            driver.rest(over.is_set)

    thread = threading.Thread(target=rest)
    thread.start()
    for number in range(300):
        store.pushpull("a", np.full(10, number, F), out=(out := np.empty(10, F)))
        assert (out == number).all()
    over.set()
    driver.wake()
    thread.join(pace.seconds(20))
    assert not thread.is_alive()
    assert len(adopted) < 100  # some, at looks at the clock


def test_a_resting_thread_is_notified_of_the_close(create: Callable[..., kv.KVStore]) -> None:
    store = create()
    driver: Any = store._backend._client.driver  # type: ignore[attr-defined]
    store.close()
    with pytest.raises(kv.ClosedError):
        driver.rest(lambda: False)


class Waits:
    """Waits of several threads, each until it is let go."""

    def __init__(self, driver: Any, count: int) -> None:
        self._let_go = [threading.Event() for _ in range(count)]
        self._threads = [
            threading.Thread(target=driver.wait, args=(one.is_set, "a word")) for one in self._let_go
        ]
        end = pace.deadline(20)
        for number, thread in enumerate(self._threads, 1):
            thread.start()
            while len(driver._waits._all) < number:
                assert thread.is_alive() and time.monotonic() < end
                time.sleep(0.001)

    def end(self, number: int) -> None:
        """Let one go, which ends then."""
        self._let_go[number].set()
        self._threads[number].join(pace.seconds(20))
        assert not self._threads[number].is_alive()


def test_threads_that_wait_do_not_wake_each_other(
    create: Callable[..., kv.KVStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver: Any = create()._backend._client.driver  # type: ignore[attr-defined]
    woken: list[float] = []
    wake = driver._sockets.wake
    monkeypatch.setattr(driver._sockets, "wake", lambda: (woken.append(time.monotonic()), wake()))
    waits = Waits(driver, 3)
    time.sleep(0.5)
    assert len(woken) < 20  # a thread that is late for a turn may be taken for one that is gone
    for number in (1, 0, 2):  # a sleeping thread, the thread at the sockets, and the next one
        waits.end(number)
    assert driver._waits._all == []


def test_what_a_thread_hears_ends_the_wait_of_another(create: Callable[..., kv.KVStore]) -> None:
    """The reply to a pull arrives at the thread that serves the sockets, and at once."""
    store = create()
    driver: Any = store._backend._client.driver  # type: ignore[attr-defined]
    store.init("a", np.zeros(100_000, F))
    waits = Waits(driver, 1)
    begin, out = time.monotonic(), np.ones(100_000, F)
    for _ in range(50):
        store.pull("a", out=out)
    assert (out == 0).all()
    assert time.monotonic() - begin < pace.seconds(50 * 0.05)  # half a look at the clock
    waits.end(0)


def test_a_wait_whose_end_was_interrupted_leads_no_thread(create: Callable[..., kv.KVStore]) -> None:
    store = create()
    driver: Any = store._backend._client.driver  # type: ignore[attr-defined]
    store.init("a", np.zeros(4, F))
    gone = driver._waits.begin_wait()
    gone.thread, gone.at_sockets = 0, time.monotonic() - 1
    waits = Waits(driver, 2)
    waits.end(1)
    out = np.ones(4, F)
    store.pull("a", out=out)
    assert (out == 0).all()
    waits.end(0)
    driver._waits.end_wait(gone)


def test_a_push_that_is_begun_by_half_says_so_from_then_on(
    quick: Quick, create: Callable[..., kv.KVStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = create()
    store.init("a", np.zeros(1000, F))
    out = np.zeros(1000, F)
    quick.call(lambda: store.pushpull("a", np.ones(1000, F), out=out))

    def interrupted(*_: Any) -> Any:
        signal.raise_signal(signal.SIGINT)

    end = pace.deadline(20)
    with monkeypatch.context() as patched:
        patched.setattr(PushOperations, "count_push", interrupted)
        with pytest.raises(KeyboardInterrupt):
            while time.monotonic() < end:
                store.pushpull("a", np.ones(1000, F), out=out)
    for _ in range(2):
        with pytest.raises(kv.KVStoreError, match="interrupted while it began a pushpull, and has left"):
            store.pull("a", out=out)


HALF = "was interrupted while it counted its requests, and has left the job"


def once(patch: pytest.MonkeyPatch, where: Any, name: str, calls: int = 1, after: bool = False) -> list[Any]:
    """Raise Ctrl-C in a method: at its `calls`th call by the main thread, or at the end of that."""
    came: list[Any] = []
    method = getattr(where, name)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return method(*arguments, **options)
        came.append(None)
        found = method(*arguments, **options) if after else None
        if len(came) == calls:
            signal.raise_signal(signal.SIGINT)
        return found if after else method(*arguments, **options)

    patch.setattr(where, name, interrupted)
    return came


def test_an_interrupt_while_requests_are_counted_ends_this_worker(
    usual: Usual, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = usual(slice_bytes=4096)
    store.init("a", np.zeros(10_000, F))
    with monkeypatch.context() as patched:
        once(patched, RequestTable, "add", calls=2)
        with pytest.raises(KeyboardInterrupt):
            store.push("a", np.ones(10_000, F))
    for _ in range(2):
        with pytest.raises(kv.KVStoreError, match=HALF):
            store.pull("a", out=np.zeros(10_000, F))


def test_an_interrupt_while_a_quick_call_becomes_a_usual_one_ends_this_worker(
    quick: Quick, create: Callable[..., kv.KVStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = create()
    store.init("a", np.zeros(1000, F))
    quick.call(lambda: store.pushpull("a", np.ones(1000, F)))
    monkeypatch.setattr(QuickCall, "wait", lambda *_: time.sleep(0.001) or [])
    monkeypatch.setattr(type(store._backend._client.driver), "_patience", lambda *_: 0.0)  # type: ignore[attr-defined]
    once(monkeypatch, QuickCall, "adopt")
    end = pace.deadline(20)
    with pytest.raises(KeyboardInterrupt):
        while time.monotonic() < end:
            store.pushpull("a", np.ones(1000, F))
    with pytest.raises(kv.KVStoreError, match=HALF):
        store.pull("a", out=np.zeros(1000, F))


@pytest.mark.parametrize("way", ["quick", "usual"])
def test_a_caller_interrupted_while_it_sends_gets_nothing_later(
    quick: Quick, create: Callable[..., kv.KVStore], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    store = create()
    driver: Any = store._backend._client.driver  # type: ignore[attr-defined]
    store.init("a", np.zeros(1000, F))
    out, found = np.zeros(1000, F), np.zeros(1000, F)
    quick.call(lambda: store.pushpull("a", np.ones(1000, F), out=out))
    before = out.copy()
    with monkeypatch.context() as patched:
        if way == "usual":
            patched.setattr(driver, "begin", lambda _: False)
            came = once(patched, driver._sockets, "send")
        else:
            came = once(patched, QuickCall, "_send", after=True)
        end = pace.deadline(20)
        with pytest.raises(KeyboardInterrupt):
            while time.monotonic() < end:
                store.pull("a", out=out)
    assert came
    out[:] = -1
    store.pull("a", out=found)
    assert (found == before).all() and (out == -1).all()


@pytest.mark.parametrize(
    ("verb", "size"),
    [("pull", 1000), ("pushpull", 1000), ("pull", 2_000_000), ("pushpull", 2_000_000), ("push", 2_000_000)],
)
def test_a_caller_interrupted_before_it_waits_gives_the_call_up(
    quick: Quick, create: Callable[..., kv.KVStore], monkeypatch: pytest.MonkeyPatch, verb: str, size: int
) -> None:
    store = create()
    store.init("a", np.zeros(size, F))
    value, out, found = np.ones(size, F), np.zeros(size, F), np.zeros(size, F)
    quick.call(lambda: store.pushpull("a", value, out=out))
    calls: dict[str, Callable[[], Any]] = {
        "pull": lambda: store.pull("a", out=out),
        "pushpull": lambda: store.pushpull("a", value, out=out),
        "push": lambda: store.push("a", value),
    }
    before, end = float(out[0]), pace.deadline(20)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        once(patched, WorkerClient, "finish_call")
        while time.monotonic() < end:
            calls[verb]()
    value[:], out[:] = 12345, -77
    try:
        store.pull("a", out=found)
    except kv.KVStoreError as error:
        assert verb != "pull" and f"gave up in a {verb} (key 'a', round " in str(error)
    else:
        assert found[0] >= before and (found == found[0]).all() and 12345 not in found
    assert (out == -77).all()


def test_an_interrupt_in_another_call_costs_an_operation_nothing(
    usual: Usual, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = usual()
    store.init("a", np.ones(1000, F))
    came = once(monkeypatch, FillOuts, "__call__")
    end = pace.deadline(60)
    while not came:  # the main thread receives the value, not the thread that waits for it
        assert time.monotonic() < end
        out = np.zeros(1000, F)
        work = store.pull("a", out=out, async_op=True)
        assert work is not None
        with contextlib.suppress(KeyboardInterrupt):
            store.barrier()
        work.wait()
        assert (out == 1).all()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, Alarm])
def test_an_answer_that_an_interrupt_has_lost_is_asked_for_at_once(
    usual: Usual, monkeypatch: pytest.MonkeyPatch, interrupt: type[BaseException]
) -> None:
    """It was read from the sockets, and has not reached the machine; the next push of the key waits."""
    store, driver = usual(timeout=pace.seconds(30))
    store.init("a", np.zeros(1000, F))
    for link in driver._machine._servers.all():
        link.requests.resend = 1000
    receive, lost = driver._sockets.receive, []

    def interrupted(timeout: float) -> Iterator[Any]:
        for peer, message in receive(timeout):
            if isinstance(message, Batch):
                lost.append(message)
                raise interrupt
            yield peer, message

    value, out = np.ones(1000, F), np.zeros(1000, F)
    with monkeypatch.context() as patched, pytest.raises(interrupt):
        patched.setattr(driver._sockets, "receive", interrupted)
        store.pushpull("a", value, out=out)
    store.pushpull("a", value, out=out)
    assert lost and (out == 1).all()


def test_an_error_in_another_call_is_the_operations(usual: Usual, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = usual()
    store.init("a", np.ones(1000, F))
    take, came = FillOuts.__call__, []

    def fails(self: FillOuts, *arguments: Any) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return take(self, *arguments)
        came.append(None)
        raise MemoryError("none is left")

    monkeypatch.setattr(FillOuts, "__call__", fails)
    end = pace.deadline(60)
    while not came:
        assert time.monotonic() < end
        work = store.pull("a", out=np.zeros(1000, F), async_op=True)
        assert work is not None
        with contextlib.suppress(MemoryError):
            store.barrier()
        told = pytest.raises(kv.KVStoreError, match="could not be written: MemoryError: none is left")
        with told if came else contextlib.nullcontext():
            work.wait()


def test_a_fork_reads_nothing_of_its_parents_connections(
    quick: Quick, create: Callable[..., kv.KVStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = create()
    store.init("a", np.zeros(1000, F))
    quick.call(lambda: store.push("a", np.ones(1000, F)))
    driver: Any = store._backend._client.driver  # type: ignore[attr-defined]
    end = pace.deadline(20)
    while driver._quick is None:  # a push without a waiter, and without a reply yet
        assert time.monotonic() < end
        store.push("a", np.ones(1000, F))
    read: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(QuickCall, "wait", lambda *_: read.append(None) or [])
        patched.setattr(os, "getpid", lambda: -1)
        with pytest.raises(kv.KVStoreError, match="fork of a worker"):
            store.barrier()
    assert not read
    store.barrier()


def test_what_has_failed_is_told_after_another_value_was_asked_for_again(
    usual: Usual, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, driver = usual()
    store.init("a", np.ones(1000, F))
    taken, out = [], np.zeros(1000, F)
    take, step = FillOuts.__call__, driver._machine.step

    def changed_once(self: FillOuts, *arguments: Any) -> bool:
        taken.append(arguments)
        return len(taken) > 1 and take(self, *arguments)

    def failed_once(*arguments: Any) -> list[Any]:
        failure = None if taken else Failure("UpdaterError", "of another part")
        done = {events.OperationDone: lambda one: one._replace(error=one.error or failure)}
        return [done.get(type(one), lambda one: one)(one) for one in step(*arguments)]

    monkeypatch.setattr(FillOuts, "__call__", changed_once)
    monkeypatch.setattr(driver._machine, "step", failed_once)
    with pytest.raises(kv.UpdaterError, match="of another part"):
        store.pull("a", out=out)
    assert len(taken) == 2
    assert (out == 1).all()


def test_a_value_that_is_asked_for_again_is_that_of_its_round(
    usual: Usual, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pushes that were called during it are sent after it."""
    store, _ = usual()
    store.init("a", np.zeros(1000, F))
    taken, take = [], FillOuts.__call__

    def changed_at_first(self: FillOuts, *arguments: Any) -> bool:
        taken.append(self)
        return len(taken) % 2 == 0 and take(self, *arguments)

    monkeypatch.setattr(FillOuts, "__call__", changed_at_first)
    outs = [np.zeros(1000, F) for _ in range(6)]
    works = [
        store.pushpull("a", np.full(1000, n, F), out=out, async_op=True) for n, out in enumerate(outs, 1)
    ]
    for work in works:
        work.wait()
    assert [float(out[0]) for out in outs] == [1, 2, 3, 4, 5, 6]
    assert len(taken) == 12


@pytest.mark.parametrize("verb", ["pull", "pushpull"])
def test_a_value_that_is_asked_for_again_has_no_later_push_without_rounds(
    usual: Usual, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    store, _ = usual(kind="dist_async", same_host_shm=True)
    n = 20_000
    store.init("a", np.zeros(n, F))
    places, take = [], FillOuts.__call__

    def changed_at_first(self: FillOuts, *arguments: Any) -> bool:
        places.append(arguments[1].place)
        return len(places) % 2 == 0 and take(self, *arguments)

    monkeypatch.setattr(FillOuts, "__call__", changed_at_first)
    outs = [np.zeros(n, F) for _ in range(6)]
    for number, out in enumerate(outs):
        if verb == "pull":
            store.pull("a", out=out, async_op=True)
        else:
            store.pushpull("a", np.full(n, 2 * number, F), out=out, async_op=True)
        store.push("a", np.full(n, 2 * number + 1, F), async_op=True)
    store.wait()
    wanted = [0, 1, 3, 5, 7, 9] if verb == "pull" else [0, 2, 4, 6, 8, 10]
    assert [float(out[0]) for out in outs] == wanted
    assert all((out == out[0]).all() for out in outs)
    assert places == [PayloadLocation.SHARED, PayloadLocation.FRAME] * 6
    store.pull("a", out=outs[0])
    assert (outs[0] == 11).all()


@pytest.mark.parametrize("verb", ["pull", "push", "keys"])
def test_a_signal_handler_is_refused_at_once(
    create: Callable[..., kv.KVStore], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    store = create()
    client: Any = store._backend._client  # type: ignore[attr-defined]
    driver = client.driver
    store.init("a", np.ones(3, F))
    refused: list[str] = []
    calls: dict[str, Callable[[], Any]] = {
        "pull": lambda: store.pull("a", out=np.zeros(3, F)),
        "push": lambda: store.push("a", np.ones(3, F)),
        "keys": lambda: client.num_lost(60),
    }

    def call_the_store(*_: Any) -> None:
        with pytest.raises(kv.KVStoreError, match="inside a call of this store already") as error:
            calls[verb]()
        refused.append(str(error.value))

    tick = driver._tick

    def interrupted() -> bool:
        if not refused:
            signal.raise_signal(signal.SIGUSR1)
        return bool(tick())

    monkeypatch.setattr(driver, "_tick", interrupted)
    with handled(signal.SIGUSR1, call_the_store):
        store.barrier()
    assert refused and "set a flag" in refused[0]
    out = np.zeros(3, F)
    store.pushpull("a", np.full(3, 2, F), out=out)
    assert (out == 2).all()
