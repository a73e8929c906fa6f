"""Operations in the background: in call order for each key, in order of priority between keys.

An operation waits only for earlier operations on its keys. Of the operations that are ready, the one with the
highest priority runs first; among equal priorities, the oldest. One thread runs all operations, because the
kernels use all cores by themselves. But an operation that waits for other processes must not delay an
operation whose result a thread of this process waits for: the other processes may need exactly that operation
to continue. A second thread then runs it.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import heapq
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from . import waiting
from .errors import ArgumentError, ClosedError, KVStoreError, TimeoutError
from .key_locks import KeyLocks
from .observe.timeline import threads
from .observe.timeline.marks import NO_MARKS, Marks

if TYPE_CHECKING:
    from logging import Logger

_HASTE_AFTER = 0.01  # seconds of a wait after which another thread is worth its start


class InterruptibleEvent:
    """An event whose `wait` can be interrupted by Ctrl-C at any instruction.

    `threading.Event` acquires its lock in Python code; an exception of a signal handler there would leave the
    lock acquired.
    """

    def __init__(self) -> None:
        self._set = False
        self._lock = threading.Lock()  # acquired until `set`
        self._lock.acquire()

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._set

    def set(self) -> None:
        """Wake all waiting threads."""
        self._set = True
        try:  # noqa: SIM105 - a context manager is a step of its own
            self._lock.release()
        except RuntimeError:
            pass

    def clear(self) -> None:
        """Reset the event.

        Call this from the engine's thread only: a caller's thread can be interrupted by Ctrl-C.
        """
        self._set = False
        self._lock.acquire(blocking=False)

    def wait(self, timeout: float) -> bool:
        """Wait for so many seconds at most; return whether it is set."""
        try:
            self._lock.acquire(timeout=max(0.0, timeout))
        finally:
            if self._set:  # wakes the next waiting thread
                try:  # noqa: SIM105 - as above
                    self._lock.release()
                except RuntimeError:
                    pass
        return self._set


class Work:
    """Handle of an operation that was started with ``async_op=True``.

    The buffers of the operation belong to the store until `wait` returns or `done` returns True.
    """

    def __init__(self, what: str, timeout: float, marks: Marks = NO_MARKS) -> None:
        self._what = what
        self._marks = marks
        self._timeout = timeout
        self._finished = InterruptibleEvent()
        #: Lets the operation run even if the engine's thread is busy.
        self._hasten: Callable[[], None] | None = None
        #: The part of the operation that the waiting thread runs.
        self._last_part: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._ended = 0
        self._seen = False

    def wait(self, timeout: float | None = None) -> None:
        """Block until the operation is complete.

        Parameters
        ----------
        timeout : float, optional
            Seconds. If None, the timeout of the store.

        Raises
        ------
        TimeoutError
            The operation is not complete yet. It continues, and `wait` can be called again.
        ArgumentError
            `timeout` is not a number, or is negative.
        Exception
            The error of the operation itself.
        """
        limit = self._timeout if timeout is None else _checked_seconds(timeout)
        if not self._wait_with_notice(limit):
            raise TimeoutError(f"{self._what} is not complete after {limit:g} s; it continues, wait again")
        self._seen = True
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Return whether the operation is complete, with or without an error. Never blocks."""
        return self._finished.is_set()

    def exception(self) -> BaseException | None:
        """Return the error of the operation, or None (also before it is complete). Never blocks."""
        self._seen = self._seen or self._finished.is_set()
        return self._error

    def _wait_with_notice(self, limit: float) -> bool:
        if self._finished.is_set():
            return True
        begin = self._marks.begin()
        try:
            return self._wait_on(limit)
        finally:
            self._marks.wait(begin)

    def _wait_on(self, limit: float) -> bool:
        if (rest := self._last_part) is not None:
            self._run_last_part(rest)
            return True
        finished = self._finished
        if finished.wait(min(limit, _HASTE_AFTER)) or finished.is_set():
            return True
        if limit and (hasten := self._hasten) is not None:
            hasten()
        if finished.wait(min(limit, waiting.NOTICE_AFTER) - _HASTE_AFTER) or finished.is_set():
            return True
        if limit <= waiting.NOTICE_AFTER:
            return False
        _engine_log().warning(
            "waiting for %s since %g s, deadline %g s", self._what, waiting.NOTICE_AFTER, limit
        )
        return finished.wait(limit - waiting.NOTICE_AFTER) or finished.is_set()

    def _run_last_part(self, rest: Callable[[], None]) -> None:
        """Run the remaining part of the operation.

        After Ctrl-C, which the caller gets, the next wait runs it again.
        """
        error = _error_of(rest)
        if error is not None and not isinstance(error, Exception):
            raise error
        self._finish_work(error)

    def _finish_work(self, error: BaseException | None) -> None:
        self._error = error
        self._ended = time.monotonic_ns()
        self._finished.set()
        self._hasten = self._last_part = None  # last: Ctrl-C before `set` must leave the rest

    def _fail_in_child(self) -> None:
        """In the child of a fork: fail the operation, because only the parent runs it."""
        self._finished = InterruptibleEvent()
        self._seen = True
        self._finish_work(
            KVStoreError(f"{self._what} was started before this process was forked; its parent runs it")
        )

    def __del__(self) -> None:
        error = getattr(self, "_error", None)
        if error is not None and not self._seen and not sys.is_finalizing():  # no module can be imported then
            _engine_log().error("%s failed and nobody waited for it: %s", self._what, error)

    def __repr__(self) -> str:
        return f"<Work {self._what}: {'done' if self.done() else 'pending'}>"


def ended_at(work: Work) -> int:
    """Return when an operation has ended, in ns of the monotonic clock; 0 if it has not."""
    return work._ended


class _EngineTask:
    __slots__ = ("before", "entry", "followers", "keys", "priority", "run", "urgent", "work")

    def __init__(self, keys: frozenset[Hashable], run: Callable[[], Any], priority: int, work: Work) -> None:
        self.keys, self.run, self.priority, self.work = keys, run, priority, work
        self.followers: list[_EngineTask] = []
        #: Unfinished tasks on its keys: the last of each key.
        self.before: set[_EngineTask] = set()
        #: Its entry in the heap of ready tasks.
        self.entry: _Entry | None = None
        #: Whether it runs even if the engine's thread is busy.
        self.urgent = False


#: Entry in the heap of ready tasks: negative priority, number, and the task until a thread claims it.
_Entry = tuple[int, int, list[_EngineTask]]


class AsyncEngine:
    """Runs tasks on its own thread, which exists only while there are tasks.

    Parameters
    ----------
    timeout : float
        Seconds; the limit of waits that have none of their own.
    marks : Marks, optional
        Records the waits.
    concurrent : bool
        Whether tasks on different keys can run concurrently, because they wait for other processes.
    """

    #: Held by each thread that reads or changes values of the store.
    exclusive: threading.RLock
    #: Locks of keys: held by operations that wait for other processes without `exclusive`.
    key_locks: KeyLocks

    def __init__(self, timeout: float, marks: Marks = NO_MARKS, concurrent: bool = False) -> None:
        self.timeout = timeout
        self._marks = marks
        self._concurrent = concurrent
        self._closed = False
        self._reset_queue()
        _engines.add(self)

    def _reset_queue(self) -> None:
        """Start with an empty queue; also in the child of a fork, because the tasks belong to the parent."""
        self.exclusive = threading.RLock()
        # No `Condition`: it is entered in Python code, where Ctrl-C can leave its lock acquired.
        self._lock = threading.RLock()
        self._called = InterruptibleEvent()  # wakes the engine's thread
        self._last: dict[Hashable, _EngineTask] = {}
        self._ready: list[_Entry] = []
        self._pending: dict[_EngineTask, int] = {}  # tasks, with the numbers of their calls
        self._calls = 0
        self._postponed: list[Work] = []  # in call order; some may be complete
        self._most_postponed = 16  # length of the list at which complete ones are dropped
        self._sequence = 0
        self._thread: threading.Thread | None = None
        self._threads: set[threading.Thread] = set()  # the engine's thread, and threads of urgent tasks
        self._starting: set[object] = set()
        #: Threads in a part of an operation that needs no lock.
        self.unlocked_threads: set[int] = set()
        self.key_locks = KeyLocks(self.exclusive)
        #: True while any task is unfinished; read without the lock by callers that only want to skip a wait.
        self.busy = False

    @contextlib.contextmanager
    def thread_started(self, what: str) -> Iterator[None]:
        """Check that a task can be submitted, and start the thread, before the body makes a final change.

        Raises
        ------
        ClosedError, KVStoreError
            The engine is closed, or its thread cannot be started. Raised before the body runs.
        """
        me = object()
        try:
            with self._lock:
                self._check_open(what)
                self._ensure_thread(what)
                self._starting.add(me)
            yield
        finally:
            self._starting.discard(me)

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise ClosedError(f"{what}: the store is closed")

    def submit(self, keys: Iterable[Hashable], run: Callable[[], Any], priority: int, what: str) -> Work:
        """Queue `run` behind the unfinished tasks of `keys` and return its handle."""
        work = Work(what, self.timeout, self._marks)
        task = _EngineTask(frozenset(keys), run, priority, work)
        if self._concurrent:
            work._hasten = partial(self._run_early, task)
        with self._lock:
            self._check_open(what)
            self._ensure_thread(what)
            try:
                self._enqueue_task(task)
            except BaseException:  # Ctrl-C: a task that is registered and never runs would block its keys
                self._unqueue_task(task)
                raise
        return work

    def finish_in_wait(self, run: Callable[[], Any], what: str) -> Work:
        """Return the handle of an operation; the thread that waits for it runs the last part.

        `run` can be called again after Ctrl-C, and by several threads. A wait lasts as long as `run`, even if
        its timeout is shorter. `wait_all` runs the operations without a waiting thread.
        """
        work = Work(what, self.timeout, self._marks)
        work._last_part = partial(self.run_unlocked, run)
        with self._lock:
            self._postponed.append(work)
            if len(self._postponed) > self._most_postponed:
                self._postponed = [one for one in self._postponed if not one.done()]
                self._most_postponed = 2 * len(self._postponed) + 16
        return work

    def _enqueue_task(self, task: _EngineTask) -> None:
        """Queue a task behind the earlier tasks on its keys; the lock is held."""
        task.before = {t for t in map(self._last.get, task.keys) if t is not None}
        for earlier in task.before:
            earlier.followers.append(task)
        self._last.update(dict.fromkeys(task.keys, task))
        self._calls += 1
        self._pending[task] = self._calls
        self.busy = True
        if not task.before:
            self._push_ready(task)

    def _unqueue_task(self, task: _EngineTask) -> None:
        """Undo `_enqueue_task` for a task, under the same lock."""
        self._claim_task(task)
        self._pending.pop(task, None)
        for earlier in self._pending:
            earlier.followers = [one for one in earlier.followers if one is not task]
        self._last = {key: one for one in self._pending for key in one.keys}
        self.busy = bool(self._pending)

    def in_operation(self) -> bool:
        """Return whether the caller is part of a running operation: an updater that calls its own store.

        Such a caller must not wait for other operations, because they wait for this one.
        """
        return self.in_own_operation() or threading.current_thread() in self._threads

    def in_own_operation(self) -> bool:
        """Return whether the caller's thread is in an operation, with or without the lock."""
        lock: Any = self.exclusive
        return bool(lock._is_owned()) or threading.get_ident() in self.unlocked_threads

    def run_unlocked(self, run: Callable[..., Any], *arguments: Any) -> Any:
        """Run a part of an operation that needs no lock, and may call an updater."""
        me = threading.get_ident()
        if me in self.unlocked_threads:
            return run(*arguments)
        try:
            self.unlocked_threads.add(me)
            return run(*arguments)
        finally:
            self.unlocked_threads.discard(me)

    def run_now(self, run: Callable[[], Any], what: str) -> Work:
        """Run an operation at once, before all queued ones; for calls from inside an operation."""
        work = Work(what, self.timeout, self._marks)
        work._finish_work(_error_of(run))
        return work

    def wait_for(self, keys: Iterable[Hashable]) -> None:
        """Block until all tasks so far on `keys` are complete.

        Errors of the tasks are raised by their handles only.
        """
        if self.in_operation():
            return
        with self._lock:
            pending = [self._last[key].work for key in keys if key in self._last]
        self._wait_all(pending)

    def wait_all(self) -> None:
        """Block until every task submitted so far is complete."""
        if self.in_operation():
            return
        with self._lock:
            pending = list({id(task): task.work for task in self._last.values()}.values())
            pending += self._postponed
        self._wait_all(pending)

    def close(self) -> None:
        """Complete the submitted tasks, then refuse new ones."""
        try:
            self.wait_all()
        finally:
            with self._lock:
                self._closed = True
                self._called.set()
                running = [thread for thread in self._threads if thread.is_alive()]
        if threading.current_thread() not in running:
            for thread in running:
                thread.join(self.timeout)

    def _wait_all(self, pending: list[Work]) -> None:
        deadline = time.monotonic() + self.timeout
        for work in pending:
            if not work._wait_with_notice(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"{work._what} is not complete after {self.timeout:g} s")

    def _push_ready(self, task: _EngineTask) -> None:
        self._sequence += 1
        task.entry = -task.priority, self._sequence, [task]
        heapq.heappush(self._ready, task.entry)
        self._called.set()
        if task.urgent:
            self._run_in_own_thread(task)

    def _run_early(self, task: _EngineTask) -> None:
        """Run a task, and the tasks that it waits for, even if the engine's thread is busy."""
        with self._lock:
            found = {task} & self._pending.keys()
            left = list(found)
            while left:
                new = {one for one in left.pop().before if not one.urgent} - found
                found |= new
                left += new
            # From the oldest on: after Ctrl-C, no task that is not urgent precedes an urgent one.
            for one in sorted(found, key=self._pending.__getitem__):
                if one.entry is not None:
                    self._run_in_own_thread(one)
                one.urgent = True

    def _run_in_own_thread(self, task: _EngineTask) -> None:
        """Start a thread for a ready task.

        The thread claims the task, so that Ctrl-C can end this call at any step.
        """
        with contextlib.suppress(KVStoreError):  # the engine's thread runs the task
            self._start_thread(partial(self._run_urgent, task), task.work._what)

    def _ensure_thread(self, what: str) -> None:
        if self._thread is None:
            self._start_thread(self._run_tasks, what)

    def _start_thread(self, target: Callable[[], None], what: str) -> None:
        """Start a thread from another thread, because a signal must not interrupt `Thread.start`."""
        thread = threading.Thread(target=target, name=threads.ENGINE, daemon=True)
        errors: list[BaseException] = []
        started = InterruptibleEvent()
        try:
            _thread.start_new_thread(self._run_start, (thread, target == self._run_tasks, errors, started))
        except RuntimeError as error:
            errors.append(error)
            started.set()
        started.wait(threading.TIMEOUT_MAX)
        if errors:
            cause = errors.pop()
            raise KVStoreError(
                f"{what}: no background thread can be started ({cause}); "
                "free some threads, or call without async_op"
            ) from cause

    def _run_start(
        self, thread: threading.Thread, own: bool, errors: list[BaseException], started: InterruptibleEvent
    ) -> None:
        self._threads = {thread, *(one for one in self._threads if one.is_alive())}
        if own:
            self._thread = thread
        try:
            thread.start()
        except BaseException as error:
            if own:
                self._thread = None
            errors.append(error)
        finally:
            started.set()

    def _run_tasks(self) -> None:
        try:
            threads.remember()
            while (task := self._next_task()) is not None:
                if not self._run_task(task):
                    return
                del task  # an idle thread must not keep references to the caller's arrays
        finally:
            self._end_thread()

    def _end_thread(self) -> None:
        """Let the next task start another thread."""
        with self._lock:
            if self._thread is threading.current_thread():
                self._thread = None

    def _run_urgent(self, task: _EngineTask) -> None:
        threads.remember()
        if self._claim_task(task):
            self._run_task(task)
        del task

    def _claim_task(self, task: _EngineTask) -> bool:
        """Claim a ready task; return False if another thread has claimed it."""
        with self._lock:
            entry, task.entry = task.entry, None
            if entry is not None:
                entry[2].clear()  # its heap entry stays: a search among many entries would be slow
            return entry is not None

    def _run_task(self, task: _EngineTask) -> bool:
        """Run a task.

        Return False in the child of a fork that the task has made, because the task is the parent's.
        """
        error = _error_of(task.run)
        mine = task in self._pending
        if mine:
            self._complete_task(task, error)
        del task, error  # the error refers to this frame, which would delay the warning about a lost handle
        return mine

    def _next_task(self) -> _EngineTask | None:
        """Return the next ready task; None ends the thread (closed, or idle for a second)."""
        idle = False
        while True:
            with self._lock:
                while self._ready:
                    for task in heapq.heappop(self._ready)[2]:
                        self._claim_task(task)
                        return task
                if not self._pending and (self._closed or (idle and not self._starting)):
                    self._end_thread()
                    return None
                self._called.clear()
            idle = not self._called.wait(1.0)

    def _complete_task(self, task: _EngineTask, error: BaseException | None) -> None:
        with self._lock:
            for key in task.keys:
                if self._last.get(key) is task:
                    del self._last[key]
            for follower in task.followers:
                follower.before.discard(task)
                if not follower.before:
                    self._push_ready(follower)
            self._pending.pop(task, None)
            self.busy = bool(self._pending)
        task.work._finish_work(error)


def _error_of(run: Callable[[], Any]) -> BaseException | None:
    try:
        run()
    except BaseException as error:
        # This frame would refer to the error that refers to this frame, which would delay the warning about a
        # lost handle.
        assert error.__traceback__ is not None
        return error.with_traceback(error.__traceback__.tb_next)
    return None


_engines: weakref.WeakSet[AsyncEngine] = weakref.WeakSet()


def _reset_in_child() -> None:
    for engine in list(_engines):
        lost = [*(task.work for task in engine._pending), *engine._postponed]
        engine._reset_queue()
        for work in lost:
            work._fail_in_child()


def wait_for_all_stores() -> None:
    """Wait until no operation of any store is running."""
    for engine in list(_engines):
        with contextlib.suppress(TimeoutError):  # the wait has been logged already
            engine.wait_all()


os.register_at_fork(after_in_child=_reset_in_child)
atexit.register(wait_for_all_stores)


def _engine_log() -> Logger:
    import logging  # imported late: it is a tenth of the time of `import kvstore`

    return logging.getLogger("kvstore.engine")


def _checked_seconds(timeout: Any) -> float:
    if not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ArgumentError(f"timeout must be a number of seconds from 0 on, not {timeout!r}")
    return float(min(timeout, threading.TIMEOUT_MAX))
