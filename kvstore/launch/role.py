"""``kvstore role``: one rank of mpirun or srun, and the servers or the scheduler that it runs besides.

A rank that runs only its program is replaced by it (exec). A rank with servers stays until they have ended:
they are there for all ranks, and a launcher may kill the children of an ended rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.errors import ConfigError
from kvstore.settings import launchers
from kvstore.settings.environment import process_variables
from kvstore.settings.launchers import WorkerPlacement

from .child_process import LocalProcess, ProcessRole, ProcessSpec, ask_session
from .local_host import LocalHost
from .orphan_reaper import OrphanReaper
from .process import adopt_orphans, started, unstartable
from .rendezvous import Rendezvous
from .service import COMMAND, service_command, variables_of
from .supervisor import Stage, Supervisor

_BEAT = 1.0  # seconds between two looks at our parent: some launchers, if killed, leave their ranks running


@dataclass(frozen=True)
class RankProcesses:
    """The processes of one rank; the `servers` of the job are spread evenly over the ranks.

    Servers import the modules `imports`. All processes find the scheduler at `meeting`.
    """

    place: WorkerPlacement
    servers: int
    meeting: Rendezvous
    imports: tuple[str, ...] = ()

    def service_roles(self) -> list[ProcessRole]:
        """Return the servers that this rank runs; on the first rank the scheduler precedes them."""
        size, rank = self.place.size, self.place.rank
        servers = [ProcessRole("server", n) for n in range(self.servers) if n * size // self.servers == rank]
        return [ProcessRole("scheduler", 0), *servers] if rank == 0 else servers

    def variables_for(self, part: ProcessRole, address: str) -> dict[str, str]:
        """Return the variables of a process of this rank; `address` is that of the scheduler."""
        found = variables_of(part, process_variables(), self.place.size, self.servers, address)
        return found | self.meeting.variables(part) | {"KVSTORE_SCHEDULER": address}


def launched_place() -> WorkerPlacement:
    """Return the rank of this process; raise ConfigError if no launcher of ranks has started it."""
    place = launchers.detect_placement()
    if place.launcher in ("none", "kvstore"):
        other = "no launcher has started this process" if place.launcher == "none" else "kvstore run has"
        raise ConfigError(
            f"kvstore role is for the ranks of mpirun, srun or torchrun, and {other}: start it as in "
            "`mpirun -n 4 kvstore role -s 1 train.py`, or use `kvstore run -n 4 -s 1 train.py`"
        )
    return place


def run(rank: RankProcesses, command: Sequence[str]) -> int:
    """Run `command` as the program of a rank; return its exit code, or that of a failed server.

    Call it from the main thread. ConfigError is raised if a program cannot be started, and TimeoutError if
    the first rank has not reported the address of the scheduler.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if rank.service_roles():
        adopt_orphans()
        with contextlib.closing(OrphanReaper()) as reaper:
            return _RankSupervisor(rank, command, reaper).run()
    part, address = ProcessRole("worker", rank.place.rank), rank.meeting.wait_for_address()
    environment = rank.variables_for(part, address)
    try:
        os.execvpe(command[0], list(command), environment)  # noqa: S606 - the user's own command, without a shell
    except OSError as error:
        raise unstartable(command, error) from error


class _RankProgram(LocalProcess):
    """The program of a rank. It inherits all streams and descriptors that the launcher has opened for it.

    It has a session of its own: a signal to the group of this process reaches it once, from this process.
    What it leaves running is not ended.
    """

    def __init__(self, part: ProcessRole, command: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(part, started(command, env=environment, close_fds=False))

    def has_ended(self) -> bool:
        """Return whether the program has ended; kill it when its time is over."""
        if self.code is None and self._kill_at is not None and time.monotonic() > self._kill_at:
            self._process.kill()
        return super().has_ended()

    def end_with(self, number: int, patience: float | None = None) -> None:
        """Send a signal to the program."""
        super().end_with(number, patience)
        self._process.send_signal(number)

    def ask_for_report(self, number: int) -> None:
        """Ask the program and its processes for their stacks or timelines."""
        ask_session(self.group, number)

    def is_gone(self) -> bool:
        """Return whether the program has ended."""
        return self.code is not None


class _RankSupervisor(Supervisor):
    """A rank that runs servers or the scheduler besides its program."""

    command, kills_at_second_signal = "kvstore role", False

    def __init__(self, rank: RankProcesses, command: Sequence[str], reaper: OrphanReaper) -> None:
        super().__init__()
        self._rank, self._program = rank, command
        self._parent = os.getppid()
        self._clear: Callable[[], None] | None = None  # removes the folder of the rendezvous
        self.hosts = LocalHost(self.relay, reaper, prefix=True)

    def run(self) -> int:
        try:
            return super().run()
        finally:
            if self._clear is not None:
                self._clear()

    def start_first(self) -> None:
        rank = self._rank
        if rank.place.rank or rank.meeting.folder is None:
            self.stage = Stage.RUNNING
            self.start_all(rank.meeting.wait_for_address())
            return
        self._clear = rank.meeting.prepare(rank.place.size, rank.servers)
        self.await_address()
        self._start_service(ProcessRole("scheduler", 0), rank.meeting.scheduler)

    def start_all(self, address: str) -> None:
        if self._clear is not None:
            self._rank.meeting.write_address(address)
        started_parts = [process.part for process in self.running]
        for part in self._rank.service_roles():
            if part not in started_parts:
                self._start_service(part, address)
        part = ProcessRole("worker", self._rank.place.rank)
        self.add_process(_RankProgram(part, self._program, self._rank.variables_for(part, address)))

    def _start_service(self, part: ProcessRole, address: str) -> None:
        environment = self._rank.variables_for(part, address)
        report = self.on_address if part.role == "scheduler" else None
        command = service_command(COMMAND, part, self._rank.imports)
        self.add_process(self.hosts.start_process(ProcessSpec(part, command, environment, on_address=report)))

    def loop_timeout(self) -> float | None:
        return _BEAT

    def poll_processes(self) -> None:
        super().poll_processes()
        if os.getppid() != self._parent and not self.is_ending:
            self.fail_job("its launcher has ended")

    def fail_job(self, text: str) -> None:
        """Write the reason at once: the launcher may kill this process."""
        if self.left:
            self.write_message(text)
        super().fail_job(text)

    def check_output(self) -> None:
        """Fail only at the end: the program does not write through this process."""
        if not self.left:
            super().check_output()
