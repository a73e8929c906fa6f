"""``kvstore role``: one rank of mpirun or srun, and what it runs beside its program: servers, the scheduler.

A rank that runs nothing beside becomes its program. One that does stays until its servers have ended: they
are there for all ranks, and a launcher may kill what an ended rank has left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.errors import ConfigError
from kvstore.settings import launchers
from kvstore.settings.environment import process_variables
from kvstore.settings.launchers import Placement

from .causes import misses, patience
from .child_process import ChildProcess, ProcessRole, ask
from .local_host import LocalHost
from .orphan_reaper import OrphanReaper
from .output_relay import LAST_WORDS, OutputRelay
from .process import adopt_orphans, exit_code, grace, stopped, tied_to, told, unstartable
from .rendezvous import Rendezvous
from .service import variables_of
from .signals import ENDING

_LOOK = 0.05  # seconds between two looks at processes that are about to end
_BEAT = 1.0  # seconds between two looks at our parent: some launchers, if killed, leave their ranks running


@dataclass(frozen=True)
class Company:
    """What all ranks of a job agree on.

    Attributes
    ----------
    place : Placement
        Which rank this is.
    servers : int
        How many there are; ranks run them, spread over all.
    meeting : Rendezvous
        Where the scheduler is found.
    imports : tuple of str
        Modules that servers import.
    """

    place: Placement
    servers: int
    meeting: Rendezvous
    imports: tuple[str, ...] = ()

    def mine(self) -> list[ProcessRole]:
        """List the servers that this rank runs; the first rank has the scheduler, at the head of the list."""
        size, rank = self.place.size, self.place.rank
        servers = [ProcessRole("server", n) for n in range(self.servers) if n * size // self.servers == rank]
        return [ProcessRole("scheduler", 0), *servers] if rank == 0 else servers

    def environment(self, part: ProcessRole, base: Mapping[str, str], address: str) -> dict[str, str]:
        """Variables of a process that this rank runs."""
        found = variables_of(part, base, self.place.size, self.servers, address)
        return found | self.meeting.variables(part) | {"KVSTORE_SCHEDULER": address}

    def command(self, part: ProcessRole) -> list[str]:
        """Command line of the scheduler or of a server."""
        words = [sys.executable, "-m", "kvstore.launch", part.role]
        names = self.imports if part.role == "server" else ()
        return words + [word for name in names for word in ("--import", name)]


def placed() -> Placement:
    """Find the rank.

    Raises
    ------
    ConfigError
        No launcher has made one, or it was `kvstore run`, which starts servers itself.
    """
    place = launchers.detect()
    if place.launcher in ("none", "kvstore"):
        other = "no launcher has started this process" if place.launcher == "none" else "kvstore run has"
        raise ConfigError(
            f"kvstore role is for the ranks of mpirun, srun or torchrun, and {other}: start it as in "
            "`mpirun -n 4 kvstore role -s 1 train.py`, or use `kvstore run -n 4 -s 1 train.py`"
        )
    return place


def run(company: Company, command: Sequence[str]) -> int:
    """Be a rank, with `command` as its program. Call it from the main thread.

    Returns
    -------
    int
        Exit code of the program, or what a failed server makes of it.

    Raises
    ------
    ConfigError
        A program cannot be started.
    TimeoutError
        The first rank did not say where the scheduler is.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if company.mine():
        adopt_orphans()
        with contextlib.closing(OrphanReaper()) as reaper:
            return _Rank(company, command, reaper).run()
    part = ProcessRole("worker", company.place.rank)
    environment = company.environment(part, process_variables(), company.meeting.told())
    try:
        os.execvpe(command[0], list(command), environment)  # noqa: S606 - the user's own command, without a shell
    except OSError as error:
        raise unstartable(command, error) from error


class _Rank:
    """A rank that runs something beside its program."""

    def __init__(self, company: Company, command: Sequence[str], reaper: OrphanReaper) -> None:
        self._company, self._command = company, command
        self._worker: subprocess.Popen[bytes] | None = None
        self._services: list[ChildProcess] = []
        self._left: list[ChildProcess] = []  # of whose group there may be something left
        self._code: int | None = None  # of the rank
        self._signalled = False
        self._kill_at: float | None = None  # the worker
        self._parent = os.getppid()
        self._patience = patience()
        self._cleared: Callable[[], None] | None = None  # what we have made for all ranks
        self._relay = OutputRelay((signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, *ENDING), self._on_signal)
        self._local_host = LocalHost(self._relay, reaper, prefix=True)

    def run(self) -> int:
        with contextlib.closing(self._relay), contextlib.closing(self._local_host):
            try:
                self._begin()
                while self._left or self._works():
                    self._turn()
                self._write_out()
            finally:
                self._end_all(signal.SIGKILL)
                if self._cleared is not None:
                    self._cleared()
        return self._code or 0

    def _write_out(self) -> None:
        """Wait for the readers of our output, as long as they read; tell of what they have lost."""
        self._relay.write_out(self._turn, self._patience, lambda: self._signalled)
        if self._relay.reason and self._code is None:
            self._code = 1
            self._say(f"the output cannot be written: {self._relay.reason}")
            self._relay.write_out(self._turn, LAST_WORDS, lambda: True)

    # ------------------------------------------------------------------------------------------ starting

    def _begin(self) -> None:
        company = self._company
        if company.place.rank or company.meeting.folder is None:
            self._start_all(company.meeting.told())
            return
        self._cleared = company.meeting.prepare(company.place.size, company.servers)
        self._start(ProcessRole("scheduler", 0), company.meeting.scheduler, self._on_address)

    def _on_address(self, address: str) -> None:
        if address and self._code is None:
            self._company.meeting.tell(address)
            self._start_all(address)

    def _start_all(self, address: str) -> None:
        there = {child.part for child in self._services}
        for part in self._company.mine():
            if part not in there:
                self._start(part, address)
        environment = self._company.environment(
            ProcessRole("worker", self._company.place.rank), process_variables(), address
        )
        self._worker = _program(self._command, environment)

    def _start(self, part: ProcessRole, address: str, tell: Callable[[str], None] | None = None) -> None:
        environment = self._company.environment(part, process_variables(), address)
        told = tell or (lambda address: None) if part.role == "scheduler" else None
        child = self._local_host.start(part, self._company.command(part), environment, told=told)
        self._services.append(child)
        self._left.append(child)

    # ------------------------------------------------------------------------------------------- waiting

    def _works(self) -> bool:
        return self._worker is not None and self._worker.returncode is None

    def _turn(self) -> None:
        ending = self._code is not None or len(self._services) < len(self._left)
        self._relay.turn(_LOOK if ending else _BEAT, self._look)
        if os.getppid() != self._parent and self._code is None:
            self._end(1)

    def _look(self) -> None:
        for child in [one for one in self._services if one.ended() and not self._noticed_only(one)]:
            self._services.remove(child)
            early = self._worker is None
            if (child.code or early) and self._code is None:
                self._say(child.how)
                self._end(exit_code(child.code or 1))
        for child in [child for child in self._left if child.gone()]:
            self._left.remove(child)
            self._local_host.forget(child)
        self._look_at_worker()

    def _noticed_only(self, child: ChildProcess) -> bool:
        """Whether a service has failed because all workers had, and ours is still about to end."""
        worker = self._worker
        if worker is None or worker.returncode is not None or stopped(worker.pid):
            return False
        mine = ProcessRole("worker", self._company.place.rank)
        return misses(child.part, child.tail, mine) and child.since_end() < self._patience

    def _look_at_worker(self) -> None:
        worker = self._worker
        if worker is None or worker.returncode is not None:
            return
        if (code := worker.poll()) is None:
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                worker.kill()
        elif self._code is not None:  # we have ended it: then servers may go
            self._end_all(signal.SIGTERM)
        elif code:
            self._say(f"rank {self._company.place.rank} {told(code)}")
            self._end(exit_code(code))

    def _on_signal(self, number: int) -> None:
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            self._ask(number)
        elif number != signal.SIGCHLD:
            self._signalled = True
            self._end(128 + number, number)

    def _ask(self, number: int) -> None:
        """Have the program and what runs beside it write where they are, or their timelines."""
        for child in self._left:
            child.ask(number)
        if self._works() and self._worker is not None:
            ask(self._worker.pid, number)

    def _end(self, code: int, number: int = signal.SIGTERM) -> None:
        """End the program, and then what runs beside it; the rank exits with `code`."""
        self._code = self._code or code
        if self._works() and self._worker is not None:
            self._kill_at = self._kill_at or time.monotonic() + grace()
            self._worker.send_signal(number)
        else:
            self._end_all(signal.SIGTERM)

    def _end_all(self, number: int) -> None:
        for child in self._left:
            child.end(number)
        if self._works() and self._worker is not None:
            self._worker.send_signal(number)

    def _say(self, text: str) -> None:
        self._relay.err.write(f"kvstore role: {text}\n".encode())


def _program(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the program of a rank with all that the launcher has left open for it, in a group of its own.

    So a signal to the group of this process comes to it once, by way of us.
    """
    try:
        return subprocess.Popen(
            command, env=environment, close_fds=False, start_new_session=True, preexec_fn=tied_to(os.getpid())
        )
    except OSError as error:
        raise unstartable(command, error) from error
