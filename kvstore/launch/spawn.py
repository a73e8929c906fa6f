"""Workers from within Python: `kvstore.spawn`."""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import operator
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any

from kvstore.errors import ArgumentError, ConfigError, TimeoutError, WorkerError
from kvstore.settings.addresses import loopback
from kvstore.settings.descriptors import occupy_standard
from kvstore.settings.environment import changed_variables, process_variables
from kvstore.settings.torch_variables import MasterPort, outer_variables, torch_variables

from .causes import Causes
from .child_process import ProcessRole
from .process import grace, new_job, stopped, tied_to, told, variables
from .signals import deferred

_LONGEST = 32_000  # bytes of a traceback: less than a pipe holds, so that a worker never waits to tell
_LOOK = 0.05  # seconds between two looks at a process that is about to end
_UNGUARDED = 79  # exit code of a worker whose script calls `spawn` while the worker imports it


class _Worker:
    """A process and the pipe on which it tells how `fn` failed."""

    def __init__(
        self, rank: int, job: Mapping[str, str | None], fn: Callable[..., object], args: Sequence[Any]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank = rank
        #: Exit code once its end was seen; negative for a signal.
        self.code: int | None = None
        self._told, telling = context.Pipe(duplex=False)
        self._process: SpawnProcess = context.Process(
            target=_body, args=(fn, tuple(args), telling, os.getpid()), name=f"kvstore-worker-{rank}"
        )
        # It has the variables before it imports anything. Ctrl-C reaches it when `_body` can tell what to
        # make of it, and not in the middle of an import.
        resource_tracker.ensure_running()  # where `start` began it, that would let Ctrl-C in again
        with telling, changed_variables(job), _without_ctrl_c():
            self._process.start()

    @functools.cached_property
    def sentinel(self) -> int:
        """What `multiprocessing.connection.wait` takes; ready when the process has ended.

        Its own sentinel is a pipe, which is open as long as anything lives that it has forked.
        """
        try:
            return os.pidfd_open(self._process.pid or 0)
        except OSError:  # before Linux 5.3
            return self._process.sentinel

    @property
    def part(self) -> ProcessRole:
        """Say what it is in its job."""
        return ProcessRole("worker", self.rank)

    @functools.cached_property
    def tail(self) -> list[bytes]:
        """What the ended process told, in lines."""
        try:
            return self._told.recv_bytes().split(b"\n") if self._told.poll() else []
        except (EOFError, OSError):
            return []

    def end(self) -> int:
        """Take note of the end of the process; return its exit code."""
        self._process.join()
        self.code = self._process.exitcode or 0
        return self.code

    def stopped(self) -> bool:
        """Whether it stands still, as after SIGSTOP."""
        return stopped(self._process.pid or 0)

    def error(self) -> WorkerError | ConfigError:
        """Put what the ended process told into an error."""
        if self.code == _UNGUARDED and not self.tail:
            return ConfigError(
                "the script calls kvstore.spawn at its top level, and each new process "
                'runs the script again: put the call under `if __name__ == "__main__":`'
            )
        words = b"\n".join(self.tail).decode(errors="ignore")  # a cut can go through a character
        text = f":\n{words}" if words else "; it told nothing, its stderr may say more"
        code = self.code or 0
        return WorkerError(f"rank {self.rank} {told(code)}{text}", rank=self.rank, code=code)

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self._process.exitcode is None:
            os.kill(self._process.pid or 0, number)

    def close(self) -> None:
        """Reap the ended process and close the pipe."""
        self._process.join()
        if self.sentinel != self._process.sentinel:
            os.close(self.sentinel)
        self._process.close()
        self._told.close()


def spawn(fn: Callable[..., object], n: int, args: Sequence[Any] = (), timeout: float | None = None) -> None:
    """Do what `kvstore.spawn` says, which is this function."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # it imports the script; see `error`
        sys.exit(_UNGUARDED)
    n = _checked(fn, n, timeout)
    occupy_standard()
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    job, master = new_job(), MasterPort()
    workers: list[_Worker] = []
    try:
        for rank in range(n):
            with deferred():  # one that nobody knows of would not be ended
                workers.append(_started(rank, _variables(job, rank, n, master.number), fn, args))
        _wait(workers, deadline, timeout)
    finally:
        _end(workers)
        master.close()


def _variables(job: str, rank: int, size: int, port: int) -> dict[str, str | None]:
    """Make the variables that a worker has and this process has not; None: the worker does not have it."""
    place = variables(job, rank, size) | torch_variables(rank, size, (rank, size), 0, (loopback(), port))
    return {**dict.fromkeys(outer_variables(process_variables())), **place}


def _checked(fn: Callable[..., object], n: int, timeout: float | None) -> int:
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise ArgumentError(f"n must be an int, not {n!r}")
    if n < 1:
        raise ConfigError(f"n must be at least 1, got {n}")
    if timeout is not None and not timeout > 0:
        raise ConfigError(f"timeout must be a positive number of seconds or None, got {timeout}")
    if not callable(fn):
        raise ArgumentError(f"fn must be a function, not {fn!r}")
    if "<" in getattr(fn, "__qualname__", ""):  # <lambda>, <locals>
        raise ArgumentError(
            f"fn must be defined at module level, so that other processes can import it; {fn!r} is not"
        )
    _check_importable(fn)
    return operator.index(n)


def _check_importable(fn: Callable[..., object]) -> None:
    """Raise ArgumentError if `fn` is of a session without a file, such as a notebook or ``python -c``."""
    main = sys.modules["__main__"]
    is_of_main = getattr(fn, "__module__", None) == "__main__"
    if is_of_main and getattr(main, "__spec__", None) is None and not hasattr(main, "__file__"):
        raise ArgumentError(
            f"{fn!r} is defined in a session and not in a file, so other processes cannot import it: write "
            "it to a module (in a notebook with %%writefile), and import it from there"
        )


def _started(
    rank: int, job: Mapping[str, str | None], fn: Callable[..., object], args: Sequence[Any]
) -> _Worker:
    try:
        return _Worker(rank, job, fn, args)
    except (OSError, RuntimeError):
        raise  # about processes, and well told by Python
    except Exception as error:
        raise ArgumentError(f"fn and args cannot be sent to another process: {error}") from error


def _wait(workers: list[_Worker], deadline: float, timeout: float | None) -> None:
    """Wait for all workers; raise for the first that fails."""
    waiting = {worker.sentinel: worker for worker in workers}
    causes: Causes[_Worker] = Causes()
    while waiting:
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        ready = connection.wait(list(waiting), _LOOK if causes.waiting else left)
        if not ready and time.monotonic() >= deadline:
            ranks = ", ".join(str(worker.rank) for worker in waiting.values())
            raise TimeoutError(
                f"not finished after {timeout:g} s: rank {ranks}; allow more time, or find out what they "
                f"wait for"
            )
        for worker in [waiting.pop(sentinel) for sentinel in ready if isinstance(sentinel, int)]:
            if worker.end():
                causes.add(worker, workers)
        for worker in causes.take():
            raise worker.error()


def _end(workers: list[_Worker]) -> None:
    """End those that still run, and reap all."""
    try:
        _signal(workers, signal.SIGTERM)
    finally:  # also where a second Ctrl-C cuts the patience short
        _signal(workers, signal.SIGKILL)
        for worker in workers:
            worker.close()


def _signal(workers: list[_Worker], number: int) -> None:
    """Send a signal to those that run, and wait a little for their end."""
    for worker in workers:
        worker.signal(number)
    until = time.monotonic() + grace()
    waiting: list[Any] = [worker.sentinel for worker in workers]
    while waiting and (left := until - time.monotonic()) > 0:
        ready = connection.wait(waiting, left)
        waiting = [sentinel for sentinel in waiting if sentinel not in ready]


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Block SIGINT in this thread, and in a process that it starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _body(
    fn: Callable[..., object], args: tuple[Any, ...], telling: connection.Connection, parent: int
) -> None:
    """Call `fn` in a worker, and tell how it failed."""
    tied_to(parent)()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        fn(*args)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # Ctrl-C reaches all; the caller tells of it once
    except Exception:
        telling.send_bytes(traceback.format_exc().encode(errors="replace")[-_LONGEST:])
        sys.exit(1)
