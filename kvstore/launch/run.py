"""``kvstore run``: start the workers of one machine, pass their output on, and leave nothing behind.

One thread and one selector: it sleeps until a worker writes, a reader of our output is ready, or a signal
comes. Ends of workers are signals too (SIGCHLD).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import ConfigError

from .keeper import Keeper
from .process import adopt_orphans, new_job, signal_name, told, variables
from .relay import Relay
from .worker import Worker

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LAST_WORDS = 0.5  # seconds that the readers of our output have after a signal
_LAST_WORDS = 0.5  # seconds that the readers of our output have after a signal
_LOOK = 0.05  # seconds between two looks at groups that are about to end


def command_of(program: str, arguments: Sequence[str], module: bool = False) -> list[str]:
    """Make the command line of a worker: modules and ``.py`` files run in this Python, the rest as it is.

    Raises
    ------
    ConfigError
        The script is not there.
    """
    if module:
        return [sys.executable, "-m", program, *arguments]
    if not program.endswith(".py"):
        return [program, *arguments]
    if not Path(program).is_file():
        raise ConfigError(f"there is no file {program!r} in {Path.cwd()}; give the path of the script")
    return [sys.executable, program, *arguments]


def run(command: Sequence[str], workers: int, restarts: int = 0, prefix: bool = True) -> int:
    """Run `command` in `workers` processes and wait for all of them. Call it from the main thread.

    Parameters
    ----------
    command : sequence of str
        Program and arguments.
    workers : int
        Number of processes.
    restarts : int
        How many failed workers are started again, in all, before a failure ends the job.
    prefix : bool
        Mark each line of output with the rank it comes from.

    Returns
    -------
    int
        What the command should exit with: 0, the code of the worker that failed first, or 128 and the signal.

    Raises
    ------
    ConfigError
        The program cannot be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    adopt_orphans()
    with contextlib.closing(Keeper()) as keeper:
        return _Job(command, workers, restarts, prefix, keeper).run()


class _Job:
    def __init__(
        self, command: Sequence[str], workers: int, restarts: int, prefix: bool, keeper: Keeper
    ) -> None:
        self._command, self._prefix, self._keeper = command, prefix, keeper
        self._name, self._size = new_job(), workers
        self._most_restarts, self._restarts = restarts, [0] * workers
        self._running: list[Worker] = []
        self._left: list[Worker] = []  # of whose group there may be something left
        self._failed: Worker | None = None
        self._signal: int | None = None
        self._relay = Relay((signal.SIGCHLD, *_ENDING), self._on_signal)

    def run(self) -> int:
        with contextlib.closing(self._relay):
            try:
                for rank in range(self._size):
                    self._start(rank)
                while self._left:
                    self._turn()
                self._report()
                self._write_out()
            finally:
                self._end(signal.SIGKILL)
        return self._exit_code()

    def _start(self, rank: int) -> None:
        chosen = {"PYTHONUNBUFFERED": "1", **os.environ}
        job = variables(self._name, rank, self._size, self._restarts[rank])
        sinks = self._relay.out, self._relay.err
        worker = Worker(rank, self._command, {**chosen, **job}, sinks, self._prefix)
        self._keeper.add(worker.group)
        self._running.append(worker)
        self._left.append(worker)
        self._relay.add(worker.out)
        self._relay.add(worker.err)

    def _turn(self) -> None:
        ending = self._signal or self._failed or len(self._running) < len(self._left)
        # The workers come first: a flood of output must not hide which of them died first.
        self._relay.turn(_LOOK if ending else None, self._look_after_workers)
        if self._relay.broken and not self._signal:
            self._on_signal(signal.SIGPIPE)

    def _look_after_workers(self) -> None:
        ended = [worker for worker in self._running if worker.ended()]
        # Of those that ended together, one that a signal killed did not end because of the others.
        for worker in sorted(ended, key=lambda worker: (worker.code or 0) >= 0):
            self._running.remove(worker)
            if worker.code and not (self._failed or self._signal):
                self._on_failure(worker)
        for worker in [worker for worker in self._left if worker.gone()]:
            self._left.remove(worker)
            self._keeper.forget(worker.group)
            self._relay.drop(worker.out)
            self._relay.drop(worker.err)

    def _on_failure(self, worker: Worker) -> None:
        done = sum(self._restarts)
        if done < self._most_restarts:
            self._restarts[worker.rank] += 1
            self._say(f"{_what(worker)}; starting it again ({done + 1} of {self._most_restarts})")
            self._start(worker.rank)
        else:
            self._failed = worker
            self._end(signal.SIGTERM)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return  # it was only to wake us up
        again = self._signal is not None
        self._signal = number
        self._end(signal.SIGKILL if again else signal.SIGTERM if number == signal.SIGPIPE else number)

    def _end(self, number: int) -> None:
        for worker in self._left:
            worker.end(number)

    def _report(self) -> None:
        """Say at the very end, where it is seen, what ended the job."""
        if self._failed:
            lines = self._failed.err.tail
            self._say(
                _what(self._failed) + ("; its stderr ended with:" if lines else ", with an empty stderr")
            )
            for line in lines:
                self._relay.err.write(line + b"\n")
        elif self._signal:
            self._say(f"all workers are ended, because of {signal_name(self._signal)}")

    def _write_out(self) -> None:
        """Wait for the readers of our output, but not for long after a signal."""
        until = None
        while not self._relay.empty and (until is None or time.monotonic() < until):
            self._turn()
            if self._signal and until is None:
                until = time.monotonic() + _LAST_WORDS

    def _say(self, text: str) -> None:
        self._relay.err.write(f"kvstore run: {text}\n".encode())

    def _exit_code(self) -> int:
        if self._failed is None:
            return 128 + self._signal if self._signal else 0
        code = self._failed.code or 0
        return code if code >= 0 else 128 - code


def _what(worker: Worker) -> str:
    return f"rank {worker.rank} {told(worker.code or 0)} after {worker.seconds:.1f} s"
