"""One process of a job: its state, on any host, and the child processes of this host."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.observe.signals import catches
from kvstore.settings.keys import JobKeys

from .output import Lines, Write
from .process import describe_end, grace, is_stopped, started

TAIL = 20  # lines of stderr that the launcher prints again at the end
UNKILLABLE = 5.0  # seconds after SIGKILL after which the launcher does not wait for a process any more


@dataclass(frozen=True)
class ProcessRole:
    """The role of a process in its job (worker, server or scheduler), and its rank."""

    role: str
    rank: int

    @property
    def name(self) -> str:
        """Name in messages."""
        if self.role == "scheduler":
            return "the scheduler"
        return f"{'rank' if self.role == 'worker' else self.role} {self.rank}"

    @property
    def mark(self) -> bytes:
        """Prefix of its lines of output."""
        names = {"worker": f"{self.rank}", "scheduler": "scheduler"}
        return f"[{names.get(self.role, f'{self.role} {self.rank}')}] ".encode()


@dataclass(frozen=True)
class ProcessSpec:
    """A process to start; `on_address` is called with the address that it reports, empty if there is none."""

    part: ProcessRole
    command: Sequence[str]
    environment: Mapping[str, str]
    keys: JobKeys | None = None
    on_address: Callable[[str], None] | None = None


class SupervisedProcess:
    """The state of a process of a job; `host` is the name of its host, empty for this host."""

    def __init__(self, part: ProcessRole, host: str = "") -> None:
        self.part = part
        self._host = f" on {host}" if host else ""
        #: Its host or its id, for log lines.
        self.place = self._host
        #: Exit code after its end; negative for a signal.
        self.code: int | None = None
        self.seconds = 0.0
        #: The last lines of its stderr, when it has ended.
        self.tail: Sequence[bytes] = ()
        self._started = time.monotonic()
        self._kill_at: float | None = None

    @property
    def how(self) -> str:
        """A sentence about its end."""
        return f"{self.part.name}{self._host} {describe_end(self.code or 0)} after {self.seconds:.1f} s"

    def ended(self) -> bool:
        """Return whether the process has ended."""
        return self.code is not None

    def is_stopped(self) -> bool:
        """Return whether the launcher knows that the process is stopped, as after SIGSTOP."""
        return False

    def end(self, number: int, patience: float | None = None) -> None:
        """Send a signal to its process group, and SIGKILL `patience` seconds later to what is left of it."""
        self._kill_at = self._kill_at or time.monotonic() + (grace() if patience is None else patience)

    def ask(self, number: int) -> None:
        """Ask the process for its stacks or its timeline, with this signal."""
        raise NotImplementedError

    def gone(self) -> bool:
        """Return whether nothing is left of its process group."""
        raise NotImplementedError


class ChildProcess(SupervisedProcess):
    """A process of this host, its two streams, and its process group.

    `writes` get the lines of stdout and stderr, with the prefix `mark`. The process inherits `descriptors`.
    ConfigError is raised if the program cannot be started.
    """

    def __init__(
        self,
        part: ProcessRole,
        command: Sequence[str],
        environment: Mapping[str, str],
        writes: tuple[Write, Write],
        mark: bytes = b"",
        descriptors: Sequence[int] = (),
    ) -> None:
        super().__init__(part)
        self._write_error, self._mark = writes[1], mark
        pipe = subprocess.PIPE
        streams = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe}
        self._process = started(command, env=environment, pass_fds=tuple(descriptors), **streams)
        self.out = Lines(self._process.stdout, writes[0], mark)
        self.err = Lines(self._process.stderr, writes[1], mark, keep=TAIL)
        self.tail, self.place = self.err.tail, f": process {self.group}"

    @property
    def group(self) -> int:
        """Id of the process, and of its group."""
        return self._process.pid

    def ended(self) -> bool:
        """Return whether the process has ended; its stderr is then read, and the rest of its group ended."""
        if self.code is None and (code := self._process.poll()) is not None:
            self.code, self.seconds = code, time.monotonic() - self._started
            self.err.catch_up()
            self.end(signal.SIGTERM)
        return self.code is not None

    def is_stopped(self) -> bool:
        """Return whether the process is stopped."""
        return is_stopped(self.group)

    def end(self, number: int, patience: float | None = None) -> None:
        """Send a signal to the group, and SIGKILL `patience` seconds later."""
        super().end(number, patience)
        self._signal(number)

    def ask(self, number: int) -> None:
        """Ask the processes of the session for their stacks (SIGUSR2) or timelines (SIGUSR1).

        Only those with a handler get the signal (`kvstore.observe.stacks`, `kvstore.observe.timeline`): it
        would end the others.
        """
        if not ask_session(self.group, number) and self.code is None:
            why = "it has no store yet, or is no program of Python"
            if number == signal.SIGUSR1:
                text = f"process {self.group} writes no timeline: KVSTORE_TIMELINE is not set, {why}\n"
            else:
                text = f"process {self.group} writes no stacks: {why}\n"
            self._write_error(self._mark + text.encode())

    def gone(self) -> bool:
        """Return whether nothing is left of the group; send SIGKILL when its time is over.

        A process is not gone before `ended` has read its exit code.
        """
        over = time.monotonic() - self._kill_at if self._kill_at else -1.0
        if over >= 0:
            self._signal(signal.SIGKILL)
        self._reap_adopted()
        return over > UNKILLABLE or (self.code is not None and not self._signal(0))

    def _signal(self, number: int) -> bool:
        """Signal the group; return whether it has a process."""
        try:
            os.killpg(self.group, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _reap_adopted(self) -> None:
        """Reap processes of the group whose parent has ended."""
        with contextlib.suppress(ChildProcessError):
            while self.code is not None and os.waitpid(-self.group, os.WNOHANG)[0]:
                pass


def ask_session(leader: int, number: int) -> bool:
    """Send a signal to the processes of a session that have a handler for it; return whether any has."""
    able = [pid for pid in _session(leader) if catches(pid, number)]
    for pid in able:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
    return bool(able)


def _session(leader: int) -> list[int]:
    """Return the processes of a session."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if os.getsid(pid) == leader:
                found.append(pid)
    return found
