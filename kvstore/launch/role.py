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

from .child_process import ProcessRole, ProcessSpec, SupervisedProcess, ask_session
from .local_host import LocalHost
from .orphan_reaper import OrphanReaper
from .process import adopt_orphans, is_stopped, started, unstartable
from .rendezvous import Rendezvous
from .service import variables_of
from .supervisor import Stage, Supervisor

_BEAT = 1.0  # seconds between two looks at our parent: some launchers, if killed, leave their ranks running


@dataclass(frozen=True)
class RankProcesses:
    """The processes of one rank.

    The ranks run the `servers` of the job, spread evenly. Servers import the modules `imports`. All processes
    find the scheduler at `meeting`.
    """

    place: WorkerPlacement
    servers: int
    meeting: Rendezvous
    imports: tuple[str, ...] = ()

    @property
    def worker(self) -> ProcessRole:
        """The role of the program."""
        return ProcessRole("worker", self.place.rank)

    def services(self) -> list[ProcessRole]:
        """Return the servers that this rank runs; on the first rank the scheduler precedes them."""
        size, rank = self.place.size, self.place.rank
        servers = [ProcessRole("server", n) for n in range(self.servers) if n * size // self.servers == rank]
        return [ProcessRole("scheduler", 0), *servers] if rank == 0 else servers

    def environment(self, part: ProcessRole, base: Mapping[str, str], address: str) -> dict[str, str]:
        """Return the variables of a process of this rank."""
        found = variables_of(part, base, self.place.size, self.servers, address)
        return found | self.meeting.variables(part) | {"KVSTORE_SCHEDULER": address}

    def command(self, part: ProcessRole) -> list[str]:
        """Return the command line of the scheduler or of a server."""
        words = [sys.executable, "-m", "kvstore.launch", part.role]
        names = self.imports if part.role == "server" else ()
        return words + [word for name in names for word in ("--import", name)]


def placed() -> WorkerPlacement:
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
    if rank.services():
        adopt_orphans()
        with contextlib.closing(OrphanReaper()) as reaper:
            return _Rank(rank, command, reaper).run()
    environment = rank.environment(rank.worker, process_variables(), rank.meeting.wait_for_address())
    try:
        os.execvpe(command[0], list(command), environment)  # noqa: S606 - the user's own command, without a shell
    except OSError as error:
        raise unstartable(command, error) from error


class _Program(SupervisedProcess):
    """The program of a rank. It inherits all streams and descriptors that the launcher has opened for it.

    It has a session of its own: a signal to the group of this process reaches it once, from this process.
    What it leaves running is not ended.
    """

    def __init__(self, part: ProcessRole, command: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(part)
        self._process = started(command, env=environment, close_fds=False)

    def ended(self) -> bool:
        """Return whether the program has ended; kill it when its time is over."""
        if self.code is None and self._kill_at is not None and time.monotonic() > self._kill_at:
            self._process.kill()
        if self.code is None and (code := self._process.poll()) is not None:
            self.code, self.seconds = code, time.monotonic() - self._started
        return self.code is not None

    def is_stopped(self) -> bool:
        """Return whether the program is stopped."""
        return is_stopped(self._process.pid)

    def end(self, number: int, patience: float | None = None) -> None:
        """Send a signal to the program."""
        super().end(number, patience)
        self._process.send_signal(number)

    def ask(self, number: int) -> None:
        """Ask the program and its processes for their stacks or timelines."""
        ask_session(self._process.pid, number)

    def gone(self) -> bool:
        """Return whether the program has ended."""
        return self.code is not None


class _Rank(Supervisor):
    """A rank that runs servers or the scheduler besides its program."""

    command, kills_at_second_signal = "kvstore role", False

    def __init__(self, rank: RankProcesses, command: Sequence[str], reaper: OrphanReaper) -> None:
        super().__init__()
        self._rank, self._program = rank, command
        self._parent = os.getppid()
        self._clear: Callable[[], None] | None = None  # removes what this rank has created for all ranks
        self.hosts = LocalHost(self.relay, reaper, prefix=True)

    def run(self) -> int:
        try:
            return super().run()
        finally:
            if self._clear is not None:
                self._clear()

    def begin(self) -> None:
        rank = self._rank
        if rank.place.rank or rank.meeting.folder is None:
            self.stage = Stage.RUNNING
            self.start_all(rank.meeting.wait_for_address())
            return
        self._clear = rank.meeting.prepare(rank.place.size, rank.servers)
        self.open()
        self._start_service(ProcessRole("scheduler", 0), rank.meeting.scheduler)

    def start_all(self, address: str) -> None:
        if self._clear is not None:
            self._rank.meeting.write_address(address)
        started_parts = [process.part for process in self.running]
        for part in self._rank.services():
            if part not in started_parts:
                self._start_service(part, address)
        part = self._rank.worker
        environment = self._rank.environment(part, process_variables(), address)
        self.add(_Program(part, self._program, environment))

    def _start_service(self, part: ProcessRole, address: str) -> None:
        environment = self._rank.environment(part, process_variables(), address)
        report = self.on_address if part.role == "scheduler" else None
        spec = ProcessSpec(part, self._rank.command(part), environment, on_address=report)
        self.add(self.hosts.start(spec))

    def beat(self) -> float | None:
        return _BEAT

    def poll(self) -> None:
        super().poll()
        if os.getppid() != self._parent and not self.ending:
            self.fail("its launcher has ended")

    def fail(self, text: str) -> None:
        """Write the reason at once: the launcher may kill this process."""
        if self.left:
            self.say(text)
        super().fail(text)

    def check_output(self) -> None:
        """Fail only at the end: the program does not write through this process."""
        if not self.left:
            super().check_output()
