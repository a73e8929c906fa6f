"""``kvstore run``: start the processes of a job, pass their output on, leave nothing behind.

One thread and one selector: it sleeps until a process writes, a reader of our output is ready, or a signal
comes. Ends of processes are signals too (SIGCHLD), or messages of another host.

A job with servers starts with the scheduler. When that has said where it is, servers and workers follow. The
job is what its workers are: it ends when they have ended, and servers and scheduler go last, so that workers
which are asked to end still have whom to take leave of.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from enum import Enum, auto
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.observe.log import start as start_log
from kvstore.settings.torch_variables import outer_variables, torch_variables
from kvstore.waiting import WaitClock

from .causes import Causes, patience
from .child_process import ChildProcess, ProcessRole
from .hosts.connection import RemoteProcess
from .hosts.remote_hosts import Hosts, RemoteHosts
from .local_host import LocalHost
from .orphan_reaper import OrphanReaper
from .output_relay import LAST_WORDS, OutputRelay
from .process import DESERTED, adopt_orphans, exit_code, new_job, signal_name, variables
from .service import Cast, Service
from .signals import ASKING, ENDING

log = logging.getLogger("kvstore.launch")

_LOOK = 0.05  # seconds between two looks at groups that are about to end
_FIRST_WORD = 60.0  # seconds after which a scheduler must have said where it is
_BEAT = 1.0  # seconds between two looks at the way to other hosts
_LEAVE = 2.0  # seconds in which servers and scheduler end by themselves after the last worker
_SERVICE_GRACE = 3.0  # seconds between asking them to end and killing them


Running = ChildProcess | RemoteProcess


class _RelayedLog:
    """Our own lines, on their way between those of the processes."""

    def __init__(self, relay: OutputRelay) -> None:
        self._relay = relay

    def write(self, text: str) -> None:
        """Queue a line."""
        self._relay.err.write(text.encode(errors="replace"))

    def flush(self) -> None:
        """Leave that to the relay."""


class _Stage(Enum):
    """How far a job has come."""

    REACHING = auto()  # its hosts
    OPENING = auto()  # the scheduler
    RUNNING = auto()


def command_of(
    program: str, arguments: Sequence[str], module: bool = False, python: str | None = None
) -> list[str]:
    """Make the command line of a worker: modules and ``.py`` files run in Python, the rest as it is.

    `python` is that of other hosts, which look for the script themselves.

    Raises
    ------
    ConfigError
        The script is not there.
    """
    if module:
        return [python or sys.executable, "-m", program, *arguments]
    if not program.endswith(".py"):
        return [program, *arguments]
    if python is None and not Path(program).is_file():
        raise ConfigError(f"there is no file {program!r} in {Path.cwd()}; give the path of the script")
    return [python or sys.executable, program, *arguments]


def run(
    command: Sequence[str],
    workers: int,
    restarts: int = 0,
    prefix: bool = True,
    service: Service | None = None,
    hosts: Hosts | None = None,
) -> int:
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
        Mark each line of output with the process it comes from.
    service : Service, optional
        Servers and a scheduler for the job.
    hosts : Hosts, optional
        Where its processes run; on this machine where None.

    Returns
    -------
    int
        What the command should exit with: 0, the code of the process that failed first, or 128 and the
        signal.

    Raises
    ------
    ConfigError
        A program cannot be started, or servers or hosts cannot be as `service` and `hosts` say.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by whoever started this process
            stream.flush()
    name = new_job()
    layout = hosts.layout if hosts else None
    adopt_orphans()
    with contextlib.closing(OrphanReaper()) as reaper, contextlib.ExitStack() as stack:
        if service is not None and service.scheduler_restarts and not service.journal:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-journal-"))
            reaper.remove(folder)
            service = dataclasses.replace(service, journal=folder)
        cast = Cast(service, workers, name, layout.address if layout else None) if service else None
        return _Job(name, command, workers, restarts, prefix, reaper, cast, hosts).run()


class _Job:
    def __init__(
        self,
        name: str,
        command: Sequence[str],
        workers: int,
        restarts: int,
        prefix: bool,
        reaper: OrphanReaper,
        cast: Cast | None,
        hosts: Hosts | None,
    ) -> None:
        self._command, self._cast = command, cast
        self._name, self._size = name, workers
        self._most_restarts = {"worker": restarts}
        if cast is not None:
            most = {"server": cast.service.restarts, "scheduler": cast.service.scheduler_restarts}
            self._most_restarts |= most
        self._restarts: dict[ProcessRole, int] = {}
        self._running: list[Running] = []
        self._left: list[Running] = []  # of which there may be something left
        self._scheduler: Running | None = None
        self._causes: Causes[Running] = Causes()
        self._failure: str | None = None
        self._failed: Running | None = None
        self._tail: Sequence[bytes] | None = None  # last words of what failed and was no process of the job
        self._signal: int | None = None
        self._leaving: float | None = None  # when the last worker was gone
        self._asked = False  # servers and scheduler, to end
        self._stage = _Stage.REACHING
        self._first_word = 0.0  # when the scheduler must have said where it is
        self._relay = OutputRelay((signal.SIGCHLD, *ASKING, *ENDING), self._on_signal)
        self._remote = hosts is not None
        self._hosts: LocalHost | RemoteHosts = (
            RemoteHosts(hosts, self._relay, reaper, prefix)
            if hosts
            else LocalHost(self._relay, reaper, prefix)
        )

    def run(self) -> int:
        with contextlib.closing(self._relay):
            try:
                start_log("launcher", _RelayedLog(self._relay))
                self._begin()
                while self._left or not (self._ending or self._stage is _Stage.RUNNING):
                    self._turn()
                self._tell_the_end()
                self._write_out()
            finally:
                self._end(self._left, signal.SIGKILL)
                self._hosts.close()
        return self._exit_code()

    # ------------------------------------------------------------------------------------------ starting

    def _begin(self) -> None:
        """Start the first processes, as soon as there is a way to their hosts."""
        if self._stage is not _Stage.REACHING or self._ending or not self._hosts.ready:
            return
        if self._cast is None:
            self._stage = _Stage.RUNNING
            self._start_workers()
            return
        self._stage = _Stage.OPENING
        self._first_word = time.monotonic() + _FIRST_WORD
        self._start(ProcessRole("scheduler", 0))

    def _on_address(self, address: str) -> None:
        if not address:  # it closed the pipe, or ended: then we are told of that too
            self._first_word = min(self._first_word, time.monotonic() + LAST_WORDS)
            return
        if self._cast is None or self._ending or self._stage is _Stage.RUNNING:  # or it was started again
            return
        self._stage = _Stage.RUNNING
        self._cast.address = address
        for rank in range(self._cast.service.servers):
            self._start(ProcessRole("server", rank))
        self._start_workers()

    def _start_workers(self) -> None:
        for rank in range(self._size):
            self._start(ProcessRole("worker", rank))

    def _start(self, part: ProcessRole) -> None:
        keys = self._cast.keys(part) if self._cast else None
        command = self._command if part.role == "worker" or not self._cast else self._cast.command(part)
        told = self._on_address if part.role == "scheduler" else None
        process = self._hosts.start(part, command, self._environment(part), keys, told)
        log.info("%s started%s", part.name, process.place)
        self._running.append(process)
        self._left.append(process)
        if part.role == "scheduler":
            self._scheduler = process

    def _environment(self, part: ProcessRole) -> dict[str, str]:
        chosen = {"PYTHONUNBUFFERED": "1", **self._hosts.variables}
        for name in outer_variables(chosen):
            del chosen[name]
        if self._cast:
            chosen = self._cast.environment(part, chosen)
        restart = self._restarts.get(part, 0)
        if part.role == "worker":
            return chosen | self._place(part.rank, restart)
        return chosen | {"KVSTORE_RESTART": str(restart)}

    def _place(self, rank: int, restart: int) -> dict[str, str]:
        """Make the variables that tell a worker its place, for kvstore and for PyTorch."""
        local = self._hosts.local(rank)
        ours = variables(self._name, rank, self._size, restart, local)
        host, master = self._hosts.host(rank), self._hosts.master
        return ours | torch_variables(rank, self._size, local or (rank, self._size), host, master)

    # ------------------------------------------------------------------------------------------- waiting

    @property
    def _ending(self) -> bool:
        return bool(self._signal or self._failure)

    def _turn(self) -> None:
        waiting = len(self._running) < len(self._left) or self._causes.waiting
        if self._ending or waiting or self._leaving is not None:
            timeout: float | None = _LOOK
        elif self._remote or not self._left:
            timeout = _BEAT
        else:
            opening = self._stage is _Stage.OPENING
            timeout = max(0.0, self._first_word - time.monotonic()) if opening else None
        # The processes come first: a flood of output must not hide which of them died first.
        self._relay.turn(timeout, self._look_after_processes)
        if self._remote:  # what happens there is told in the course of a turn
            self._look_after_processes()
        if self._relay.reason:
            if not self._ending:
                self._fail(f"all workers are ended: their output cannot be written: {self._relay.reason}")
        elif self._relay.broken and not self._signal:
            self._on_signal(signal.SIGPIPE)

    def _look_after_processes(self) -> None:
        too_early = self._stage is not _Stage.RUNNING  # a scheduler, before there is anybody else
        running, self._running = self._running, []
        ended: list[Running] = []
        for process in running:
            (ended if process.ended() else self._running).append(process)
        # On one that was started again nothing is laid: it may be looking for those that are gone.
        there = [process for process in running if not self._restarts.get(process.part)]
        for process in ended:
            log.info("%s ended with code %d after %.1f s", process.part.name, process.code, process.seconds)
            if process.code or too_early:
                self._causes.add(process, there)
        for process in self._causes.take():
            if not (self._ending or self._asked):
                self._on_failure(process)
        for process in [process for process in self._left if process.gone()]:
            self._left.remove(process)
            self._hosts.forget(process)
        self._look_after_hosts()
        self._look_after_service()

    def _look_after_hosts(self) -> None:
        """Begin when there is a way to all hosts; end where there is none any more."""
        loss = self._hosts.look()
        if self._ending:
            return
        if loss is not None and not self._asked:
            self._tail = loss.tail
            self._fail(loss.text)
        elif self._stage is _Stage.REACHING:
            self._begin()
        elif self._stage is _Stage.OPENING and time.monotonic() > self._first_word:
            self._fail("the scheduler did not say where it is")

    def _look_after_service(self) -> None:
        """Let servers and scheduler go when no worker is left."""
        if self._cast is None:
            return
        if self._stage is not _Stage.RUNNING and not self._ending:
            return
        if any(process.part.role == "worker" for process in self._left):
            return
        now = time.monotonic()
        self._leaving = self._leaving or now
        if not self._asked and (self._ending or now > self._leaving + _LEAVE):
            self._asked = True
            for process in self._left:
                process.end(signal.SIGTERM, _SERVICE_GRACE)

    # -------------------------------------------------------------------------------------------- ending

    def _on_failure(self, process: Running) -> None:
        role, most = process.part.role, self._most_restarts.get(process.part.role, 0)
        done = sum(count for part, count in self._restarts.items() if part.role == role)
        # A scheduler that has not told all servers that the job is over does so yet.
        wanted = role == "scheduler" or (self._leaving is None and not self._causes.deserted)
        if done < most and wanted and self._stage is _Stage.RUNNING:
            self._restarts[process.part] = self._restarts.get(process.part, 0) + 1
            self._say(f"{process.how}; restarting it ({done + 1} of {most})")
            self._start(process.part)
        else:
            self._failed = process
            self._fail(process.how)

    def _fail(self, text: str) -> None:
        self._failure = text
        self._end(self._workers_or_all(), signal.SIGTERM)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return  # it was only to wake us up
        if number in ASKING:
            for process in self._left:
                process.ask(ASKING[signal.Signals(number)])
            return
        again = self._signal is not None
        self._signal = number
        if again:
            self._end(self._left, signal.SIGKILL)
            return
        for process in self._workers_or_all():  # a scheduler that still imports would answer SIGINT at length
            passed_on = process.part.role == "worker" and number != signal.SIGPIPE
            process.end(number if passed_on else signal.SIGTERM)

    def _workers_or_all(self) -> list[Running]:
        """Those to be ended first: the workers, where there are any."""
        return [process for process in self._left if process.part.role == "worker"] or self._left

    def _end(self, processes: Sequence[Running], number: int) -> None:
        for process in processes:
            process.end(number)

    def _tell_the_end(self) -> None:
        """Say at the very end, where it is seen, what ended the job."""
        if self._failure:
            lines = self._failed.tail if self._failed else self._tail or ()
            how = "; its stderr ended with:" if lines else ", with an empty stderr" if self._failed else ""
            self._say(self._failure + how)
            for line in lines:
                self._relay.err.write(line + b"\n")
        elif self._signal is None and self._scheduler is not None and self._scheduler.code == DESERTED:
            self._say(
                "no worker has created a store on the servers, so they were not used: create 'dist_sync' (or "
                "another store on servers) in the program, or omit -s"
            )
        elif self._signal:
            self._say(f"all workers are ended, because of {signal_name(self._signal)}")

    def _write_out(self) -> None:
        """Wait for the readers of our output, as long as they read; tell of what they have lost."""
        before, clock = self._failure, WaitClock(patience())

        def turn() -> None:
            clock.read()
            if clock.tells():
                self._say("all processes have ended; it waits for the reader of their output")
            self._turn()

        self._relay.write_out(turn, patience(), lambda: self._signal)
        if self._failure and not before:
            self._say(self._failure)
            self._relay.write_out(self._turn, LAST_WORDS, lambda: self._signal)

    def _say(self, text: str) -> None:
        self._relay.err.write(f"kvstore run: {text}\n".encode())

    def _exit_code(self) -> int:
        if self._failure is None:
            return 128 + self._signal if self._signal else 0
        return exit_code((self._failed.code if self._failed else None) or 1)
