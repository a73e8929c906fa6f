"""``kvstore run``: the processes of a job on this host, or on several.

A job with servers starts with the scheduler. When it has reported its address, servers and workers are
started. The job ends when all workers have ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.observe.log import start as start_log
from kvstore.settings.environment import process_variables
from kvstore.settings.torch_variables import outer_variables, torch_variables

from .child_process import ProcessRole, ProcessSpec, SupervisedProcess
from .hosts.remote_hosts import Hosts, RemoteHosts
from .local_host import LocalHost
from .orphan_reaper import OrphanReaper
from .output_relay import OutputRelay
from .process import DESERTED, adopt_orphans, new_job, signal_name, worker_variables
from .service import Service, ServiceProcesses
from .supervisor import Stage, Supervisor

log = logging.getLogger("kvstore.launch")

_BEAT = 1.0  # seconds between two looks at the connections to other hosts
_LEAVE = 2.0  # seconds in which servers and scheduler end by themselves after the last worker


class _RelayedLog:
    """The stream of our log, whose lines are written between those of the processes."""

    def __init__(self, relay: OutputRelay) -> None:
        self._relay = relay

    def write(self, text: str) -> None:
        """Queue a line."""
        self._relay.err.write(text.encode(errors="replace"))

    def flush(self) -> None:
        """Do nothing: the relay writes."""


def command_of(
    program: str, arguments: Sequence[str], module: bool = False, python: str | None = None
) -> list[str]:
    """Return the command line of a worker: Python runs modules and ``.py`` files.

    `python` is that of other hosts, which look for the script themselves. ConfigError is raised if the script
    does not exist.
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
    """Run `command` in `workers` processes, wait for all of them, and return the exit code of the job.

    It is 0, the code of the process that has failed first, or 128 and the signal. `restarts` failed workers
    are started again. With `prefix` each line of output begins with the name of its process. The processes
    run on `hosts`; None: on this host. ConfigError is raised if a program cannot be started, or `service` or
    `hosts` are wrong. Call it from the main thread.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None if the parent has closed it
            stream.flush()
    adopt_orphans()
    with contextlib.closing(OrphanReaper()) as reaper, contextlib.ExitStack() as stack:
        if service is not None and service.scheduler_restarts and not service.journal:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-journal-"))
            reaper.remove_folder(folder)
            service = dataclasses.replace(service, journal=folder)
        return _JobSupervisor(command, workers, restarts, prefix, reaper, service, hosts).run()


class _JobSupervisor(Supervisor):
    command, leave = "kvstore run", _LEAVE

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        restarts: int,
        prefix: bool,
        reaper: OrphanReaper,
        service: Service | None,
        hosts: Hosts | None,
    ) -> None:
        self._name, self._program, self._size = new_job(), command, workers
        self._layout = hosts.layout if hosts else None
        self._variables = hosts.variables if hosts else process_variables()
        self._services: ServiceProcesses | None = None
        self._most_restarts = {"worker": restarts}
        if service is not None:
            address = self._layout.address if self._layout else None
            self._services = ServiceProcesses(service, workers, self._name, address)
            self._most_restarts |= {"server": service.restarts, "scheduler": service.scheduler_restarts}
        super().__init__()  # after the checks: it handles signals from now on
        self._restarts: dict[ProcessRole, int] = {}
        self._scheduler: SupervisedProcess | None = None
        self._tail: Sequence[bytes] = ()  # the last lines of a lost connection
        if hosts is None:
            self.hosts = LocalHost(self.relay, reaper, prefix)
        else:
            self.hosts = RemoteHosts(hosts, self.relay, reaper, prefix)
        start_log("launcher", _RelayedLog(self.relay))

    # -------------------------------------------------------------------------------------------- starting

    def start_first(self) -> None:
        if not self.hosts.ready:
            return
        if self._services is None:
            self.stage = Stage.RUNNING
            self.start_all("")
        else:
            self.await_address()
            self._start_part(ProcessRole("scheduler", 0))

    def start_all(self, address: str) -> None:
        if self._services is not None:
            self._services.address = address
            for rank in range(self._services.service.servers):
                self._start_part(ProcessRole("server", rank))
        for rank in range(self._size):
            self._start_part(ProcessRole("worker", rank))

    def _start_part(self, part: ProcessRole) -> None:
        services, report = self._services, self.on_address if part.role == "scheduler" else None
        keys = services.keys_for(part) if services else None
        command = services.command_for(part) if services and part.role != "worker" else self._program
        process = self.hosts.start_process(ProcessSpec(part, command, self._variables_of(part), keys, report))
        log.info("%s started%s", part.name, process.place)
        self.add_process(process)
        if part.role == "scheduler":
            self._scheduler = process

    def _variables_of(self, part: ProcessRole) -> dict[str, str]:
        chosen = {"PYTHONUNBUFFERED": "1", **self._variables}
        for name in outer_variables(chosen):
            del chosen[name]
        if self._services:
            chosen = self._services.variables_for(part, chosen)
        restart = self._restarts.get(part, 0)
        if part.role != "worker":
            return chosen | {"KVSTORE_RESTART": str(restart)}
        rank, layout = part.rank, self._layout
        local = layout.local(rank) if layout else None
        host = layout.host(part) if layout else 0
        place = worker_variables(self._name, rank, self._size, restart, local)
        torch = torch_variables(rank, self._size, local or (rank, self._size), host, self.hosts.master)
        return chosen | place | torch

    # --------------------------------------------------------------------------------------------- waiting

    def loop_timeout(self) -> float | None:
        return _BEAT if self.hosts.remote or not self.left else super().loop_timeout()

    def poll_processes(self) -> None:
        super().poll_processes()
        loss = self.hosts.check_connections()
        if self.is_ending:
            return
        if loss is not None and loss.lost and not self.asked:
            self._tail = loss.tail
            self.fail_job(loss.lost)
        elif self.stage is Stage.REACHING:
            self.start_first()

    def possible_causes(self, running: list[SupervisedProcess]) -> list[SupervisedProcess]:
        """Exclude restarted processes: they may be looking for those that are gone."""
        return [process for process in running if not self._restarts.get(process.part)]

    def on_end(self, process: SupervisedProcess) -> None:
        log.info("%s ended with code %d after %.1f s", process.part.name, process.code, process.seconds)

    def on_failure(self, process: SupervisedProcess) -> None:
        """Start the process again, or end the job."""
        role, most = process.part.role, self._most_restarts.get(process.part.role, 0)
        done = sum(count for part, count in self._restarts.items() if part.role == role)
        # A scheduler that has not yet told all servers that the job is over is needed even then.
        needed = role == "scheduler" or (self.leaving is None and not self.causes.deserted)
        if done < most and needed and self.stage is Stage.RUNNING:
            self._restarts[process.part] = self._restarts.get(process.part, 0) + 1
            self.write_message(f"{process.end_sentence}; restarting it ({done + 1} of {most})")
            self._start_part(process.part)
        else:
            super().on_failure(process)

    def check_output(self) -> None:
        super().check_output()
        if self.relay.broken and not self.relay.reason and not self.signal:
            self.on_signal(signal.SIGPIPE)

    # ---------------------------------------------------------------------------------------------- ending

    def report_end(self) -> None:
        """Write at the very end, where a user sees it, what has ended the job."""
        if self.failure:
            lines = self.failed.tail if self.failed else self._tail
            how = "; its stderr ended with:" if lines else ", with an empty stderr" if self.failed else ""
            self.write_message(self.failure + how)
            for line in lines:
                self.relay.err.write(line + b"\n")
        elif self.signal is None and self._scheduler is not None and self._scheduler.code == DESERTED:
            self.write_message(
                "no worker has created a store on the servers, so they were not used: create 'dist_sync' (or "
                "another store on servers) in the program, or omit -s"
            )
        elif self.signal:
            self.write_message(f"all workers are ended, because of {signal_name(self.signal)}")
