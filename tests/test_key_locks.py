"""KeyLocks of keys: who comes first goes first, and nobody waits for a key that nobody is busy with."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pace
import pytest

from kvstore import key_locks as module
from kvstore.errors import TimeoutError
from kvstore.key_locks import KeyLocks, LockWaiter

LONG = 60.0


class Threads:
    """Threads that take turns of one store."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.lock = threading.RLock()
        self.key_locks = KeyLocks(self.lock)
        self._pool = pool

    @contextmanager
    def turn(self, keys: Sequence[str], timeout: float = LONG) -> Iterator[None]:
        with self.lock:
            self.key_locks.acquire(keys, timeout)
        try:
            yield
        finally:
            self.key_locks.release(keys)

    def start(self, run: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._pool.submit(run, *arguments)

    def start_waiting(
        self, keys: Sequence[str], timeout: float = LONG, then: Callable[[], object] = list
    ) -> Future[None]:
        """Have another thread wait for a turn, and leave it at once."""

        def take() -> None:
            with self.turn(keys, timeout):
                then()

        before = len(self.key_locks.waiters)
        started = self.start(take)
        end = pace.deadline(20)
        while len(self.key_locks.waiters) == before and not started.done():
            assert time.monotonic() < end
            time.sleep(0.001)
        return started


@pytest.fixture
def threads() -> Iterator[Threads]:
    with ThreadPoolExecutor(8) as pool:
        yield Threads(pool)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand back as long as they must: on a busy machine others may not run for a while."""
    monkeypatch.setattr(module, "_RESERVED_SHARE", LONG)


@pytest.mark.usefixtures("patient")
def test_a_thread_that_calls_in_a_loop_leaves_others_their_turn(threads: Threads) -> None:
    with threads.turn(["a"]):
        threads.start_waiting(["a"])
    with threads.turn(["a"]):
        assert not threads.key_locks.waiters


@pytest.mark.usefixtures("patient")
def test_a_thread_that_wants_several_keys_has_its_turn_among_the_others(threads: Threads) -> None:
    """Threads whose operations overlap: at no time are all keys free by chance."""
    names = [f"k{one}" for one in range(8)]
    stop, calls = threading.Event(), [0, 0, 0]

    def loop(me: int) -> None:
        draw = random.Random(me)
        while not stop.is_set():
            with threads.turn([draw.choice(names)]):
                calls[me] += 1
                time.sleep(0.002)

    loops = [threads.start(loop, one) for one in range(3)]
    try:
        for _ in range(20):
            with threads.turn(names, pace.seconds(20)):
                pass
    finally:
        stop.set()
    for one in loops:
        one.result()
    assert min(calls) > 0


@pytest.mark.usefixtures("patient")
def test_turns_are_in_the_order_of_the_calls(threads: Threads) -> None:
    order: list[int] = []

    with threads.turn(["a"]):
        started = [threads.start_waiting(["a"], then=partial(order.append, number)) for number in range(6)]
    for one in started:
        one.result()
    assert order == list(range(6))


def test_a_thread_that_has_waited_long_is_still_behind_those_before_it(threads: Threads) -> None:
    order: list[int] = []
    with threads.turn(["a"]):
        started = [threads.start_waiting(["a"], then=partial(order.append, number)) for number in range(6)]
        time.sleep(2 * module._RESERVED_SHARE)
    for one in started:
        one.result()
    assert order == list(range(6))


def test_other_keys_are_not_waited_for(threads: Threads) -> None:
    with threads.turn(["a"]):
        other = threads.start_waiting(["a"])
        with threads.turn(["b"]):
            assert not other.done()


def test_a_free_key_of_a_thread_that_waits_for_another_is_had_before_long(threads: Threads) -> None:
    """It may be what the operation under way waits for, by way of another process."""
    with threads.turn(["a"]):
        other = threads.start_waiting(["a", "b"])
        with threads.turn(["b"]):
            assert not other.done()
    other.result()


def test_a_thread_on_a_free_key_stands_back_now_and_then(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a thread that waits long for another key, and this one, others do not wait in each operation."""
    free = threads.key_locks._free
    waits: list[float] = []
    with threads.turn(["a"]):
        other = threads.start_waiting(["a", "b"])
        monkeypatch.setattr(
            free, "wait", lambda seconds, wait=free.wait: waits.append(seconds) or wait(seconds)
        )
        for _ in range(1000):
            with threads.turn(["b"]):
                assert not other.done()
        monkeypatch.undo()
    other.result()
    assert 0 < len(waits) < 500


@pytest.mark.usefixtures("patient")
def test_no_thread_stands_back_for_one_that_has_given_up(threads: Threads) -> None:
    with threads.turn(["a"]):
        late = threads.start_waiting(["a", "b"], 0.05)
        with pytest.raises(TimeoutError, match=r"has been busy with key 'a' for 0.05 s"):
            late.result()
        assert not threads.key_locks.waiters
        with threads.turn(["b"]):
            pass


def test_a_wait_for_all_keys_is_behind_the_earlier_waits(threads: Threads) -> None:
    def wait() -> None:
        with threads.lock:
            threads.key_locks.wait_until_free(LONG)

    with threads.turn(["a"]):
        other = threads.start_waiting(["a"])
        everybody = threads.start(wait)
        assert not everybody.done()
    everybody.result()
    other.result()
    assert not threads.key_locks.holders
    assert not threads.key_locks.waiters


def test_what_ctrl_c_has_left_does_not_keep_its_thread_out(threads: Threads) -> None:
    threads.key_locks.holders["a"] = threading.get_ident()
    with threads.turn(["a"], 5.0):
        pass
    assert not threads.key_locks.holders


def test_an_end_without_a_notification_is_seen(threads: Threads) -> None:
    """Ctrl-C can arrive between the two; a call during this waits its turn, and is not delayed."""
    with threads.turn(["a"]):
        others = [threads.start_waiting(["a"]) for _ in range(3)]
        del threads.key_locks.holders["a"]
        with threads.turn(["a"]):
            assert not threads.key_locks.waiters
    for other in others:
        other.result()


def test_nobody_stands_back_for_longer_than_the_timeout(threads: Threads) -> None:
    """For one that never goes, say."""
    threads.key_locks.waiters[LockWaiter(frozenset(["a"]))] = None
    with threads.turn(["a"], 0.05):
        pass


def test_only_a_thread_that_wants_a_key_is_notified_of_it(threads: Threads) -> None:
    with threads.turn(["a"]):
        other = threads.start_waiting(["a"])
        assert threads.key_locks.has_waiter(["b", "a"])
        assert not threads.key_locks.has_waiter(["b"])
    other.result()
