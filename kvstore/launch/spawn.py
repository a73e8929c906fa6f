"""`kvstore.spawn`: workers that call a function of this process."""

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
from kvstore.settings.addresses import loopback_address
from kvstore.settings.descriptors import occupy_standard
from kvstore.settings.environment import changed_variables, process_variables
from kvstore.settings.torch_variables import MasterPort, outer_variables, torch_variables

from .causes import FailureCauses
from .child_process import ProcessRole, SupervisedProcess
from .process import describe_end, grace, is_stopped, new_job, tied_to, worker_variables
from .signals import deferred_signals

_LONGEST = 32_000  # bytes of a traceback: less than a pipe holds, so that a worker never blocks on it
_LOOK = 0.05  # seconds between two polls of a process that is about to end
_UNGUARDED = 79  # exit code of a worker whose script calls `spawn` while the worker imports it


class _SpawnedWorker(SupervisedProcess):
    """A process that calls `fn`, and the pipe on which it reports how `fn` has failed."""

    def __init__(
        self, rank: int, job: Mapping[str, str | None], fn: Callable[..., object], args: Sequence[Any]
    ) -> None:
        super().__init__(ProcessRole("worker", rank))
        context = multiprocessing.get_context("spawn")
        self._report, report = context.Pipe(duplex=False)
        self._process: SpawnProcess = context.Process(
            target=_call_function, args=(fn, tuple(args), report, os.getpid()), name=f"kvstore-worker-{rank}"
        )
        # It has the variables before it imports anything. SIGINT is blocked until `_call_function` runs,
        # so that it does not interrupt an import.
        resource_tracker.ensure_running()  # if `start` began it, that would unblock SIGINT
        with report, changed_variables(job), _without_sigint():
            self._process.start()

    @functools.cached_property
    def sentinel(self) -> int:
        """A descriptor for `multiprocessing.connection.wait` that is ready when the process has ended.

        The sentinel of `multiprocessing` is a pipe, which remains open while a fork of the process lives.
        """
        try:
            return os.pidfd_open(self._process.pid or 0)
        except OSError:  # before Linux 5.3
            return self._process.sentinel

    def wait_for_end(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        self._process.join()
        self.code = self._process.exitcode or 0
        with contextlib.suppress(EOFError, OSError):
            self.tail = self._report.recv_bytes().split(b"\n") if self._report.poll() else ()
        return self.code

    def is_stopped(self) -> bool:
        """Return whether the process is stopped, as after SIGSTOP."""
        return is_stopped(self._process.pid or 0)

    def end_error(self) -> WorkerError | ConfigError:
        """Return the error of the ended process."""
        if self.code == _UNGUARDED and not self.tail:
            return ConfigError(
                "the script calls kvstore.spawn at its top level, and each new process "
                'runs the script again: put the call under `if __name__ == "__main__":`'
            )
        words = b"\n".join(self.tail).decode(errors="ignore")  # a cut can be within a character
        text = f":\n{words}" if words else "; it told nothing, its stderr may say more"
        code, rank = self.code or 0, self.part.rank
        return WorkerError(f"rank {rank} {describe_end(code)}{text}", rank=rank, code=code)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self._process.exitcode is None:
            os.kill(self._process.pid or 0, number)

    def close(self) -> None:
        """Reap the ended process and close the pipe."""
        self._process.join()
        if self.sentinel != self._process.sentinel:
            os.close(self.sentinel)
        self._process.close()
        self._report.close()


def spawn(fn: Callable[..., object], n: int, args: Sequence[Any] = (), timeout: float | None = None) -> None:
    """Call `fn` in `n` workers; see `kvstore.spawn`."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # the script is being imported
        sys.exit(_UNGUARDED)
    n = _checked_count(fn, n, timeout)
    occupy_standard()
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    job, master = new_job(), MasterPort()
    workers: list[_SpawnedWorker] = []
    try:
        for rank in range(n):
            with deferred_signals():  # a worker outside the list would not be ended
                workers.append(_start_worker(rank, _worker_variables(job, rank, n, master.number), fn, args))
        _wait_for_all(workers, deadline, timeout)
    finally:
        _end_all(workers)
        master.close()


def _worker_variables(job: str, rank: int, size: int, port: int) -> dict[str, str | None]:
    """Return the variables in which a worker differs from this process; None removes one."""
    outer = dict.fromkeys(outer_variables(process_variables()))
    torch = torch_variables(rank, size, (rank, size), 0, (loopback_address(), port))
    return {**outer, **worker_variables(job, rank, size), **torch}


def _checked_count(fn: Callable[..., object], n: int, timeout: float | None) -> int:
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


def _start_worker(
    rank: int, job: Mapping[str, str | None], fn: Callable[..., object], args: Sequence[Any]
) -> _SpawnedWorker:
    try:
        return _SpawnedWorker(rank, job, fn, args)
    except (OSError, RuntimeError):
        raise  # the error of Python about processes is clear
    except Exception as error:
        raise ArgumentError(f"fn and args cannot be sent to another process: {error}") from error


def _wait_for_all(workers: list[_SpawnedWorker], deadline: float, timeout: float | None) -> None:
    """Wait for all workers; raise the error of the first that fails."""
    waiting = {worker.sentinel: worker for worker in workers}
    causes: FailureCauses[_SpawnedWorker] = FailureCauses()
    while waiting:
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        ready = connection.wait(list(waiting), _LOOK if causes.has_waiting else left)
        if not ready and time.monotonic() >= deadline:
            ranks = ", ".join(str(worker.part.rank) for worker in waiting.values())
            raise TimeoutError(
                f"not finished after {timeout:g} s: rank {ranks}; allow more time, or find out what they "
                f"wait for"
            )
        for worker in [waiting.pop(sentinel) for sentinel in ready if isinstance(sentinel, int)]:
            if worker.wait_for_end():
                causes.add_failure(worker, workers)
        for worker in causes.pop_causes():
            raise worker.end_error()


def _end_all(workers: list[_SpawnedWorker]) -> None:
    """End the workers that still run, and reap all."""
    try:
        _signal_all(workers, signal.SIGTERM)
    finally:  # also after a second Ctrl-C
        _signal_all(workers, signal.SIGKILL)
        for worker in workers:
            worker.close()


def _signal_all(workers: list[_SpawnedWorker], number: int) -> None:
    """Send a signal to the workers that run, and wait for their end for a short time."""
    for worker in workers:
        worker.send_signal(number)
    until = time.monotonic() + grace()
    waiting: list[Any] = [worker.sentinel for worker in workers]
    while waiting and (left := until - time.monotonic()) > 0:
        ready = connection.wait(waiting, left)
        waiting = [sentinel for sentinel in waiting if sentinel not in ready]


@contextlib.contextmanager
def _without_sigint() -> Iterator[None]:
    """Block SIGINT in this thread, and in a process that it starts inside."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _call_function(
    fn: Callable[..., object], args: tuple[Any, ...], report: connection.Connection, parent: int
) -> None:
    """Call `fn` in a worker, and report how it has failed."""
    tied_to(parent)()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        fn(*args)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # Ctrl-C reaches all processes; only the caller reports it
    except Exception:
        report.send_bytes(traceback.format_exc().encode(errors="replace")[-_LONGEST:])
        sys.exit(1)
