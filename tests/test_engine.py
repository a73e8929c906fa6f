"""Asynchronous operations: order, priorities, errors, deadlines, threads, forks, the end of the process."""

from __future__ import annotations

import contextlib
import dis
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore as kv
from kvstore.engine import AsyncEngine, Work, ended_at
from kvstore.key_locks import LockWaiter

Body = Callable[..., subprocess.CompletedProcess[str]]
PATIENCE = 60.0  # seconds until a test that hangs gives up; nothing waits that long otherwise


class Gate:
    """A task that holds the engine's thread until it is opened."""

    def __init__(self) -> None:
        self.entered, self._open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self._open.wait(PATIENCE)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    made = AsyncEngine(timeout=PATIENCE)
    yield made
    made.close()


@pytest.fixture
def gate(engine: AsyncEngine) -> Iterator[Gate]:
    """The engine's thread is busy until the gate opens."""
    made = Gate()
    engine.submit(["gate"], made, 0, "gate")
    assert made.entered.wait(PATIENCE)
    yield made
    made.open()


def submit(engine: AsyncEngine, log: list[Any], name: Any, keys: Any, priority: int = 0) -> Work:
    return engine.submit(keys, lambda: log.append(name), priority, str(name))


# ----------------------------------------------------------------------------------------------------- order


def test_the_highest_priority_runs_first_and_among_equals_the_oldest(engine: AsyncEngine, gate: Gate) -> None:
    log: list[Any] = []
    for number, priority in enumerate([0, 5, -3, 5, 0, 7]):
        submit(engine, log, number, [number], priority)
    gate.open()
    engine.wait_all()
    assert log == [5, 1, 3, 0, 4, 2]


def test_one_key_s_operations_run_in_call_order_whatever_their_priority(
    engine: AsyncEngine, gate: Gate
) -> None:
    log: list[Any] = []
    for number in range(20):
        submit(engine, log, number, ["k"], priority=number)
    gate.open()
    engine.wait_all()
    assert log == list(range(20))


def test_an_urgent_operation_does_not_overtake_what_its_keys_wait_for(
    engine: AsyncEngine, gate: Gate
) -> None:
    log: list[Any] = []
    submit(engine, log, "a", ["a"], -9)
    submit(engine, log, "ab", ["a", "b"], 9)
    submit(engine, log, "c", ["c"], 0)
    submit(engine, log, "b", ["b"], 99)
    gate.open()
    engine.wait_all()
    assert log == ["c", "a", "ab", "b"]


@given(st.lists(st.tuples(st.sets(st.integers(0, 4), max_size=3), st.integers(-3, 3)), max_size=25))
def test_any_set_of_operations_keeps_the_order_of_each_key(plan: list[tuple[set[int], int]]) -> None:
    engine, log, gate = AsyncEngine(timeout=PATIENCE), [], Gate()
    engine.submit(["gate"], gate, 0, "gate")
    works = [submit(engine, log, i, keys, priority) for i, (keys, priority) in enumerate(plan)]
    gate.open()
    engine.close()
    assert sorted(log) == list(range(len(plan)))
    assert all(work.done() for work in works)
    for key in range(5):
        touching = [i for i in log if key in plan[i][0]]
        assert touching == sorted(touching)


def test_waiting_for_some_keys_waits_for_no_others(engine: AsyncEngine) -> None:
    log: list[Any] = []
    submit(engine, log, "a", ["a"]).wait()
    hold = Gate()
    engine.submit(["b"], hold, 0, "b")
    engine.wait_for(["a", "never seen"])
    assert log == ["a"]
    hold.open()
    engine.wait_for(["b"])


# ---------------------------------------------------------------------------------------------------- errors


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    "error", [ValueError("no"), kv.UpdaterError("no"), KeyboardInterrupt(), SystemExit(3)]
)
def test_an_error_reaches_wait_each_time(engine: AsyncEngine, error: BaseException) -> None:
    work = engine.submit(["a"], failing(error), 0, "fail")
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            work.wait()
        assert caught.value is error
    assert work.done()
    assert work.exception() is error


def test_a_failure_does_not_stop_what_follows(engine: AsyncEngine) -> None:
    log: list[Any] = []
    work = engine.submit(["a"], failing(ValueError("no")), 0, "fail")
    submit(engine, log, "after", ["a"]).wait()
    engine.wait_all()
    assert log == ["after"]
    assert isinstance(work.exception(), ValueError)


def test_a_failure_without_a_waiter_is_logged_at_once(
    engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    gc.disable()  # the message must not depend on a collection of cycles
    try:
        engine.submit(["a"], failing(ValueError("such bad luck")), 0, "push of 'a'")
        engine.wait_all()
        engine.submit(["b"], lambda: None, 0, "next").wait()
    finally:
        gc.enable()
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert record.getMessage() == "push of 'a' failed and nobody waited for it: such bad luck"


@pytest.mark.parametrize("look", [Work.exception, Work.wait])
def test_a_failure_that_a_caller_has_seen_is_not(
    engine: AsyncEngine, caplog: pytest.LogCaptureFixture, look: Callable[[Work], Any]
) -> None:
    work = engine.submit(["a"], failing(ValueError("no")), 0, "fail")
    engine.wait_all()
    with contextlib.suppress(ValueError):
        look(work)
    del work
    gc.collect()
    assert caplog.records == []


def test_a_finished_operation_lets_its_arrays_go(engine: AsyncEngine) -> None:
    class Value:
        pass

    value = Value()
    gone = weakref.ref(value)
    work = engine.submit(["a"], lambda held=value: None, 0, "use")  # type: ignore[misc]
    del value
    work.wait()
    engine.submit(["b"], lambda: None, 0, "next").wait()
    assert gone() is None


# ---------------------------------------------------------------------- operations that wait for other ones


@pytest.fixture
def held() -> Iterator[tuple[AsyncEngine, Gate]]:
    """The thread of an engine whose operations can run at the same time is held until the gate opens."""
    engine, gate = AsyncEngine(timeout=PATIENCE, concurrent=True), Gate()
    work = engine.submit(["gate"], gate, 0, "gate")
    assert gate.entered.wait(PATIENCE)
    yield engine, gate
    gate.open()
    engine.close()
    work.wait()  # raises if the gate was not opened in time


Wait = Callable[[AsyncEngine, Work], None]
WAITS: list[Wait] = [
    lambda engine, work: work.wait(),
    lambda engine, work: engine.wait_for(["c"]),
]


@pytest.mark.parametrize("wait", WAITS)
def test_other_keys_do_not_hold_up_awaited_work(held: tuple[AsyncEngine, Gate], wait: Wait) -> None:
    engine, log = held[0], []
    unwanted = submit(engine, log, "d", ["d"], 9)
    submit(engine, log, "a", ["a"], -9)
    submit(engine, log, "ab", ["a", "b"])
    submit(engine, log, "b", ["b"])
    work = submit(engine, log, "bc", ["b", "c"], -1)
    later = submit(engine, log, "c", ["c"])
    wait(engine, later)
    assert log == ["a", "ab", "b", "bc", "c"]
    assert work.done()
    assert not unwanted.done()


def test_waits_for_many_operations_take_steps_that_grow_with_their_number(
    held: tuple[AsyncEngine, Gate],
) -> None:
    """Each wait went through all operations that were under way: n squared steps."""
    engine, lines, count = held[0], 0, 200
    hold = Gate()
    engine.submit(["k"], hold, 0, "k")
    works = [engine.submit(["k"], lambda: None, 0, "k") for _ in range(count)]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += 1
        return trace

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        for work in reversed(works):
            assert work._hasten is not None
            work._hasten()
    finally:
        sys.settrace(before)
    assert count < lines < 60 * count
    hold.open()
    engine.wait_for(["k"])


def test_two_that_are_held_up_run_once_each(held: tuple[AsyncEngine, Gate]) -> None:
    engine, log = held[0], []
    hold, first = Gate(), engine.submit(["x"], lambda: None, 0, "x")
    second = engine.submit(["a"], hold, 0, "a")
    third = submit(engine, log, "a", ["a"])
    for _ in range(3):
        with pytest.raises(kv.TimeoutError, match=r"a is not complete after 0.001 s.*wait again"):
            third.wait(timeout=0.001)
    assert hold.entered.wait(PATIENCE)
    first.wait()
    waiting = [threading.Thread(target=third.wait) for _ in range(4)]
    for thread in waiting:
        thread.start()
    hold.open()
    second.wait()
    for thread in waiting:
        thread.join()
    held[1].open()
    engine.wait_all()
    assert log == ["a"]


def test_a_thread_that_comes_late_runs_nothing(
    held: tuple[AsyncEngine, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, log, late = held[0], [], []
    work = submit(engine, log, "a", ["a"])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: late.append(self))
        with pytest.raises(kv.TimeoutError):
            work.wait(0.02)
    held[1].open()
    work.wait()
    for thread in late:
        thread.start()
        thread.join()
    assert len(late) == 1
    assert log == ["a"]


def test_a_close_that_is_cut_off_forgets_nothing_that_is_queued(
    held: tuple[AsyncEngine, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, hold, ran = held[0], Gate(), threading.Event()
    work = engine.submit(["a"], hold, 0, "a")
    with pytest.raises(kv.TimeoutError):
        work.wait(0.02)
    assert hold.entered.wait(PATIENCE)
    engine.submit(["a"], ran.set, 0, "after")
    with monkeypatch.context() as patch:
        patch.setattr(engine, "wait_all", failing(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    held[1].open()
    engine.wait_for(["gate"])
    time.sleep(0.01)  # the engine's thread has nothing to do, and must not end
    hold.open()
    assert ran.wait(PATIENCE)


def test_an_operation_that_was_held_up_tells_its_error(
    held: tuple[AsyncEngine, Gate], caplog: pytest.LogCaptureFixture
) -> None:
    engine = held[0]
    for keys in (["a"], ["b"]):
        engine.submit(keys, failing(ValueError("such bad luck")), 0, f"push of {keys}")
    with pytest.raises(ValueError, match="such bad luck"):
        engine.submit(["a"], failing(ValueError("such bad luck")), 0, "push").wait()
    engine.wait_for(["b"])
    held[1].open()
    engine.close()  # the threads have ended
    assert [record.getMessage()[:13] for record in caplog.records] == ["push of ['a']", "push of ['b']"]


def test_close_leaves_no_thread_that_ran_what_was_held_up() -> None:
    before = threading.enumerate()
    engine, gate = AsyncEngine(timeout=PATIENCE, concurrent=True), Gate()
    work = engine.submit(["gate"], gate, 0, "gate")
    assert gate.entered.wait(PATIENCE)
    engine.submit(["a"], lambda: None, 0, "a").wait()
    gate.open()
    engine.close()
    work.wait()
    assert threading.enumerate() == before


def test_where_no_thread_can_be_started_it_waits_its_turn(
    held: tuple[AsyncEngine, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gate = held
    work = engine.submit(["a"], lambda: None, 0, "a")

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(kv.TimeoutError):
            work.wait(0.02)
    gate.open()
    work.wait()


# ------------------------------------------------------------------------------- by the thread that waits


def test_postponed_work_is_done_by_the_waiting_thread(engine: AsyncEngine) -> None:
    log: list[int] = []
    work = engine.finish_in_wait(lambda: log.append(threading.get_ident()), "rest")
    assert not work.done()
    assert not log
    work.wait()
    work.wait()
    assert log == [threading.get_ident()]
    assert work.done()
    assert ended_at(work) > 0


def test_an_error_of_what_is_postponed_reaches_wait_each_time(engine: AsyncEngine) -> None:
    work = engine.finish_in_wait(partial(_raise, ValueError("as it is")), "rest")
    for _ in range(2):
        with pytest.raises(ValueError, match="as it is"):
            work.wait()
    assert isinstance(work.exception(), ValueError)
    engine.wait_all()


def test_after_ctrl_c_the_next_wait_goes_on(engine: AsyncEngine) -> None:
    errors = [KeyboardInterrupt(), SystemExit(1)]

    def rest() -> None:
        if errors:
            raise errors.pop(0)

    work = engine.finish_in_wait(rest, "rest")
    for kind in (KeyboardInterrupt, SystemExit):
        with pytest.raises(kind):
            work.wait()
        assert not work.done()
    work.wait()
    assert work.done()


@pytest.mark.parametrize("end", [AsyncEngine.wait_all, AsyncEngine.close])
def test_work_without_a_waiter_is_done_at_the_end(
    engine: AsyncEngine, end: Callable[[AsyncEngine], None]
) -> None:
    log: list[int] = []
    for number in range(3):
        engine.finish_in_wait(partial(log.append, number), "rest")
    end(engine)
    assert sorted(log) == [0, 1, 2]


def test_a_postponed_operation_that_is_over_lets_its_arrays_go(engine: AsyncEngine) -> None:
    array = np.ones(3)
    seen = weakref.ref(array)
    work = engine.finish_in_wait(partial(np.add, array, array, array), "rest")
    work.wait()
    del array
    gc.collect()
    assert seen() is None
    assert work.done()


def _raise(error: BaseException) -> None:
    raise error


# ------------------------------------------------------------------------------------- handlers of signals


class HandlerError(Exception):
    """The exception of a signal handler."""


class Interrupt:
    """Raises at one of the steps at which CPython handles signals: begins, ends of calls, loops."""

    FILES = ("engine.py", "key_locks.py", "threading.py", "contextlib.py")
    #: Instructions that jump back: of Python 3.12 on, of 3.11 too, of 3.10.
    LOOPS = ("JUMP_BACKWARD", "POP_JUMP_BACKWARD", "JUMP_ABSOLUTE")

    def __init__(self, step: int) -> None:
        self._left = step
        self._last: dict[int, str] = {}  # instruction of each frame

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.endswith(self.FILES) or code.co_name == "__del__":
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event not in ("call", "opcode"):
            return self
        before = self._last.get(id(frame), "")
        name = dis.opname[code.co_code[max(frame.f_lasti, 0)]]
        self._last[id(frame)] = name
        # Python 3.10 handles a signal inside the frame of a resumed generator, but a trace that raises on its
        # "call" ends that frame without its `finally`: the step is the instruction after.
        begins = event == "call" and name != "YIELD_VALUE"
        after = event == "opcode" and before.startswith(("CALL", "YIELD_VALUE"))
        if begins or after or (event == "opcode" and name.startswith(self.LOOPS)):
            self._left -= 1
            if self._left < 0:
                raise HandlerError
        return self

    def reaches(self, call: Callable[[], Any]) -> bool:
        """Call; return whether there was such a step."""
        sys.settrace(self)
        try:
            call()
        except HandlerError:
            return True
        finally:
            sys.settrace(None)
        return False


def in_own_thread(test: Callable[..., None]) -> Callable[..., None]:
    """Have a test in a thread that ends: it keeps an exception if a trace has raised in its handler."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(test, *arguments, **named).result()

    return run


def submit_and_wait(engine: AsyncEngine, gate: Gate) -> None:
    engine.submit(["a"], lambda: time.sleep(0.002), 0, "a").wait()


def postpone_and_wait(engine: AsyncEngine, gate: Gate) -> None:
    engine.finish_in_wait(lambda: None, "a").wait()


def announce_and_submit(engine: AsyncEngine, gate: Gate) -> None:
    with engine.thread_started("b"):
        engine.submit(["b"], lambda: None, 0, "b")


def wait_for_all(engine: AsyncEngine, gate: Gate) -> None:
    engine.submit(["a"], lambda: time.sleep(0.002), 0, "a")
    engine.wait_for(["a"])
    engine.wait_all()


def run_beside(engine: AsyncEngine, gate: Gate) -> None:
    engine.submit(["gate"], gate, 0, "gate")
    engine.submit(["a"], lambda: None, 0, "a").wait()


def close(engine: AsyncEngine, gate: Gate) -> None:
    engine.submit(["a"], lambda: None, 0, "a")
    engine.close()


SOMEBODY = LockWaiter(frozenset(["b"]))


def take_turns(engine: AsyncEngine, gate: Gate) -> None:
    engine.key_locks.waiters[SOMEBODY] = None
    try:
        with engine.exclusive:
            engine.key_locks.acquire(["a"], 1.0)
    finally:
        engine.key_locks.release(["a"])


@pytest.mark.parametrize(
    "call",
    [submit_and_wait, postpone_and_wait, announce_and_submit, wait_for_all, run_beside, close, take_turns],
)
@in_own_thread
def test_an_interrupt_at_any_step_leaves_an_engine_that_works(
    call: Callable[[AsyncEngine, Gate], None],
) -> None:
    reached, step = True, 0
    while reached:
        engine, gate = AsyncEngine(timeout=PATIENCE, concurrent=True), Gate()
        reached = Interrupt(step).reaches(partial(call, engine, gate))
        gate.open()
        for lock in (engine._lock, engine.exclusive):
            assert not lock._is_owned(), step  # type: ignore[attr-defined]
        with contextlib.suppress(kv.ClosedError):
            engine.submit(["a"], lambda: None, 0, "next").wait(5)
        engine.wait_all()
        assert not engine._starting
        assert set(engine.key_locks.waiters) <= {SOMEBODY}
        engine.close()
        step += 1
    assert step > 5


@in_own_thread
def test_a_store_goes_on_after_an_interrupt_at_any_step() -> None:
    with kv.create(timeout=PATIENCE) as store:
        store.init("a", np.zeros(3))

        def push() -> None:
            work = store.push("a", np.ones(3), async_op=True)
            assert work is not None
            work.wait(5)

        step = 0
        while Interrupt(step).reaches(push):
            push()
            step += 1


# ------------------------------------------------------------------------------------------------- deadlines


def test_a_wait_ends_at_its_deadline_and_may_be_repeated(engine: AsyncEngine, gate: Gate) -> None:
    work = engine.submit(["gate"], lambda: None, 0, "push of 'w'")
    for _ in range(2):
        with pytest.raises(kv.TimeoutError, match=r"push of 'w' is not complete after 0.01 s.*wait again"):
            work.wait(timeout=0.01)
    with pytest.raises(TimeoutError):
        work.wait(timeout=0)
    assert not work.done()
    assert work.exception() is None
    assert "pending" in repr(work)
    gate.open()
    work.wait()
    assert "done" in repr(work)


@pytest.mark.parametrize("step", ["_push_ready", "_enqueue_task"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_ctrl_c_as_an_operation_is_queued_leaves_none(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, step: str, before: bool
) -> None:
    log: list[Any] = []
    real = getattr(engine, step)

    def interrupted(*arguments: Any) -> None:
        if not before:
            real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            submit(engine, log, "lost", {1, 2})
    assert not engine.busy
    submit(engine, log, "next", {2, 3}).wait(10)
    assert log == ["next"]


def test_the_store_s_deadline_holds_where_none_is_given() -> None:
    engine, gate = AsyncEngine(timeout=0.02), Gate()
    work = engine.submit(["a"], gate, 0, "push of 'a'")
    for wait in (work.wait, engine.wait_all, lambda: engine.wait_for(["a"])):
        with pytest.raises(kv.TimeoutError, match=r"push of 'a' is not complete after 0.02 s"):
            wait()
    gate.open()
    work.wait(PATIENCE)
    engine.close()


def test_a_long_wait_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, engine: AsyncEngine, gate: Gate
) -> None:
    monkeypatch.setattr("kvstore.waiting.NOTICE_AFTER", 0.01)
    work = engine.submit(["gate"], lambda: None, 0, "pull of 'w'")
    with pytest.raises(kv.TimeoutError):
        work.wait(0.05)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "waiting for pull of 'w'" in record.getMessage()
    threading.Timer(0.05, gate.open).start()
    work.wait(float("inf"))


# ----------------------------------------------------------------------------------------------------- close


def test_close_waits_for_everything_and_then_refuses(engine: AsyncEngine) -> None:
    log: list[Any] = []
    hold = Gate()
    engine.submit(["a"], hold, 0, "hold")
    for number in range(5):
        submit(engine, log, number, ["a"])
    threading.Timer(0.02, hold.open).start()
    engine.close()
    assert log == list(range(5))
    with pytest.raises(kv.ClosedError, match="push of 'a'"):
        engine.submit(["a"], lambda: None, 0, "push of 'a'")
    engine.close()


def test_no_thread_before_the_first_operation_nor_after_close() -> None:
    before = threading.enumerate()
    engine = AsyncEngine(timeout=PATIENCE)
    assert threading.enumerate() == before
    engine.submit(["a"], lambda: None, 0, "a").wait()
    engine.close()
    assert threading.enumerate() == before


def test_an_engine_that_is_never_closed_is_given_back() -> None:
    engine = AsyncEngine(timeout=PATIENCE)
    engine.submit(["a"], lambda: None, 0, "a").wait()
    [thread] = [t for t in threading.enumerate() if t.name == "kvstore-engine"]
    gone = weakref.ref(engine)
    del engine
    thread.join(PATIENCE)  # idle threads end by themselves
    gc.collect()
    assert gone() is None


def test_an_idle_engine_starts_again() -> None:
    engine = AsyncEngine(timeout=PATIENCE)
    for _ in range(2):
        engine.submit(["a"], lambda: None, 0, "a").wait()
        thread = engine._thread
        if thread is not None:
            thread.join(PATIENCE)
        assert engine._thread is None
    engine.close()


def test_closing_from_inside_an_operation() -> None:
    engine = AsyncEngine(timeout=PATIENCE)
    engine.submit(["a"], engine.close, 0, "close").wait()
    with pytest.raises(kv.ClosedError):
        engine.submit(["a"], lambda: None, 0, "more")


# ----------------------------------------------------------------------------------- the same through a store


@pytest.fixture
def calm() -> Iterator[kv.KVStore]:
    """A store whose updater adds, and waits in the meantime where the key has a gate."""
    with kv.create(timeout=PATIENCE) as store:
        store.init(["a", "b", "c", "gate"], [np.zeros(3) for _ in range(4)])
        yield store


def hold(store: kv.KVStore, log: list[Any] | None = None) -> Gate:
    """Keep the store busy with a push of "gate"; later pushes add up."""
    gate = Gate()

    def add(key: Any, merged: Any, stored: Any) -> None:
        if key == "gate":
            gate()
        if log is not None:
            log.append((key, merged[0]))
        stored += merged

    store.set_updater(add)
    store.push("gate", np.ones(3), async_op=True)
    assert gate.entered.wait(PATIENCE)
    return gate


def test_a_later_call_waits_for_earlier_asynchronous_ones_of_its_keys(calm: kv.KVStore) -> None:
    gate = hold(calm)
    for _ in range(4):
        calm.push("a", np.ones(3), async_op=True, priority=-5)
    threading.Timer(0.02, gate.open).start()
    out = np.zeros(3)
    calm.pull("a", out=out)
    assert (out == 4).all()


def test_priorities_decide_between_keys(calm: kv.KVStore) -> None:
    log: list[Any] = []
    gate = hold(calm, log)
    for key, priority in (("a", -1), ("b", 5), ("c", 0)):
        calm.push(key, np.ones(3), priority=priority, async_op=True)
    calm.push("b", 2 * np.ones(3), priority=9, async_op=True)
    gate.open()
    calm.wait()
    assert [entry for entry in log if entry[0] != "gate"] == [("b", 1), ("b", 2), ("c", 1), ("a", 1)]


def test_asynchronous_operations_use_the_lists_of_the_call(calm: kv.KVStore) -> None:
    gate = hold(calm)
    values, outs, both = [np.ones(3), np.ones(3)], [np.zeros(3)], [np.full(3, 5.0)]
    kept = [*outs, *both]
    calm.push("a", values, async_op=True)
    calm.pull("a", out=outs, async_op=True)
    calm.pushpull("b", both, async_op=True)
    calm.pushpull("c", values, out=outs, async_op=True)
    for used in (values, outs, both):
        used.clear()
    gate.open()
    calm.wait()
    assert kept[1][0] == 5
    assert kept[0][0] == 2
    assert calm.view("a")[0] == 2


def test_an_unwaited_failure_of_a_store_is_logged(calm: kv.KVStore, caplog: pytest.LogCaptureFixture) -> None:
    calm.push(["a", "x"], [np.ones(3), np.ones(3)], async_op=True)
    calm.wait()
    calm.pull("a", out=np.zeros(3), async_op=True)
    calm.wait()
    assert any("push of 2 keys failed" in r.getMessage() and "'x'" in r.getMessage() for r in caplog.records)


def test_an_updater_s_error_reaches_wait(calm: kv.KVStore) -> None:
    calm.set_updater(lambda key, merged, stored: stored / merged.fill(0) or 1 // 0)
    work = calm.pushpull("a", np.ones(3), async_op=True)
    assert work is not None
    with pytest.raises(kv.UpdaterError, match="'a'"):
        work.wait()


def test_settings_change_behind_what_is_under_way(calm: kv.KVStore) -> None:
    gate = hold(calm)
    work = calm.push("a", np.ones(3), async_op=True)
    threading.Timer(0.02, gate.open).start()
    calm.set_optimizer(kv.optimizer.SGD(learning_rate=1))
    assert work is not None
    assert work.done()
    calm.push("a", np.ones(3))
    assert (calm.view("a") == 0).all()


def test_close_finishes_what_is_under_way() -> None:
    store = kv.create(timeout=PATIENCE)
    store.init(["a", "gate"], [np.zeros(3), np.zeros(3)])
    gate = hold(store)
    out = np.zeros(3)
    works = [store.push("a", np.ones(3), async_op=True), store.pull("a", out=out, async_op=True)]
    threading.Timer(0.02, gate.open).start()
    store.close()
    assert all(work is not None and work.done() for work in works)
    assert (out == 1).all()


def test_a_deadline_of_a_store() -> None:
    store = kv.create(timeout=0.05)
    store.init(["a", "gate"], [np.zeros(3), np.zeros(3)])
    gate = hold(store)
    work = store.push("a", np.ones(3), async_op=True)
    assert work is not None
    for wait in (work.wait, store.wait, store.keys, lambda: store.pull("a", out=np.zeros(3))):
        with pytest.raises(kv.TimeoutError):
            wait()
    gate.open()
    work.wait(PATIENCE)
    store.close()


def test_no_call_waits_for_ever_for_another_thread() -> None:
    store = kv.create(timeout=0.05)
    store.init(["a", "gate"], [np.zeros(3), np.zeros(3)])
    gate = Gate()
    store.set_updater(lambda key, merged, stored: gate())
    thread = threading.Thread(target=store.push, args=("gate", np.ones(3)))
    thread.start()
    assert gate.entered.wait(PATIENCE)
    calls = (store.keys, store.close, lambda: store.push("a", np.ones(3)), lambda: store.view("a"))
    for call in calls:
        with pytest.raises(kv.TimeoutError, match="another thread"):
            call()
    gate.open()
    thread.join()
    store.close()


@pytest.mark.parametrize("async_op", [False, True])
def test_calls_of_many_threads_add_up(async_op: bool) -> None:
    threads, rounds, n = 8, 30, 50_000
    with kv.create(timeout=PATIENCE) as store:
        store.init(["a", "b"], [np.zeros(n), np.zeros(n)])
        store.set_updater(lambda key, merged, stored: np.add(stored, merged, out=stored))
        start, failures = threading.Barrier(threads), []

        def work(number: int) -> None:
            try:
                start.wait()
                for _ in range(rounds):
                    handle = store.push(["a", "b"], [np.ones(n), [np.ones(n)] * 2], async_op=async_op)
                    if handle is not None:
                        handle.wait()
                    out = np.zeros(n)
                    store.pull("a", out=out)
                    assert out.min() == out.max()  # never half of an update
            except BaseException as error:
                failures.append(error)

        team = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()
        assert failures == []
        assert (store.view("a") == threads * rounds).all()
        assert (store.view("b") == 2 * threads * rounds).all()
        assert store.statistics().pushes == threads * rounds


def test_stores_of_many_threads_do_not_disturb_each_other() -> None:
    failures = []

    def work(number: int) -> None:
        try:
            with kv.create() as store:
                store.init("a", np.zeros(100_000, np.float32))
                for step in range(20):
                    values = [np.full(100_000, number + step, np.float32)] * 3
                    out = np.zeros(100_000, np.float32)
                    store.pushpull("a", values, out=out)
                    assert (out == 3 * (number + step)).all()
        except BaseException as error:
            failures.append(error)

    team = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_an_updater_may_call_its_own_store(outer: bool, inner: bool) -> None:
    """Also where operations of the other key wait: no operation waits for another until the deadline."""
    with kv.create(timeout=PATIENCE) as store:
        store.init(["a", "b", "c"], [np.zeros(3) for _ in range(3)])
        seen = []

        def updater(key: Any, merged: Any, stored: Any) -> None:
            if key == "a":
                queued.append(store.push("c", np.ones(3), async_op=True))
                work = store.push("b", merged, async_op=inner)
                if work is not None:
                    work.wait()
                out = np.zeros(3)
                store.pull("b", out=out)
                seen.append(out[0])
                store.wait()
                assert "b" in store.keys()  # noqa: SIM118 - a store is no dict
            stored += merged

        queued: list[Any] = []
        store.set_updater(updater)
        for _ in range(3):
            work = store.push("a", np.ones(3), async_op=outer)
            if work is not None:
                work.wait()
        store.wait()
        assert seen == [1, 2, 3]
        assert all(work.done() for work in queued)
        assert [store.view(key)[0] for key in "abc"] == [3, 3, 3]


def test_an_inner_error_is_the_updater_s() -> None:
    with kv.create(timeout=PATIENCE) as store:
        store.init("a", np.zeros(3))
        store.set_updater(lambda key, merged, stored: store.pull("x", out=merged))
        with pytest.raises(kv.UpdaterError, match="KeyNotFoundError on key 'a'"):
            store.push("a", np.ones(3))


# ------------------------------------------------------------------------------------------------- processes


def test_a_process_ends_after_its_pending_work(body: Body, tmp_path: Path) -> None:
    body("exit_with_work_pending", str(tmp_path / "log"))
    assert (tmp_path / "log").read_text().split() == ["1", "2", "3"]


def test_a_failure_is_logged_at_the_end_of_the_process_too(body: Body) -> None:
    ended = body("exit_with_failed_work")
    assert "push of 'nobody' failed and nobody waited for it" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "name",
    [
        "fork_with_helpers",
        "fork_while_another_thread_sums",
        "fork_while_memory_is_cut",
        "fork_with_work_under_way",
    ],
)
def test_children_of_fork_go_on(body: Body, name: str) -> None:
    body(name)


def test_close_leaves_no_thread_and_no_file(body: Body) -> None:
    body("close_leaves_nothing")
