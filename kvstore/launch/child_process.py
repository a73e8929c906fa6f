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

from .output import LineReader, Write
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
    def output_prefix(self) -> bytes:
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
    def end_sentence(self) -> str:
        """A sentence about its end."""
        return f"{self.part.name}{self._host} {describe_end(self.code or 0)} after {self.seconds:.1f} s"

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        return self.code is not None

    def is_stopped(self) -> bool:
        """Return whether the launcher knows that the process is stopped, as after SIGSTOP."""
        return False

    def end_with(self, number: int, patience: float | None = None) -> None:
        """Send a signal to its process group, and SIGKILL `patience` seconds later to what is left of it."""
        self._kill_at = self._kill_at or time.monotonic() + (grace() if patience is None else patience)

    def ask_for_report(self, number: int) -> None:
        """Ask the process for its stacks or its timeline, with this signal."""
        raise NotImplementedError

    def is_gone(self) -> bool:
        """Return whether nothing is left of its process group."""
        raise NotImplementedError


class LocalProcess(SupervisedProcess):
    """A process of this host."""

    def __init__(self, part: ProcessRole, process: subprocess.Popen[bytes]) -> None:
        super().__init__(part)
        self._process = process
        #: Id of the process, and of its group.
        self.group = process.pid
        self.place = f": process {self.group}"

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        if self.code is None and (code := self._process.poll()) is not None:
            self.code, self.seconds = code, time.monotonic() - self._started
        return self.code is not None

    def is_stopped(self) -> bool:
        """Return whether the process is stopped."""
        return is_stopped(self.group)


class ChildProcess(LocalProcess):
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
        pipe = subprocess.PIPE
        streams = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe}
        process = started(command, env=environment, pass_fds=tuple(descriptors), **streams)
        super().__init__(part, process)
        self._write_error, self._mark = writes[1], mark
        self.out = LineReader(process.stdout, writes[0], mark)
        self.err = LineReader(process.stderr, writes[1], mark, keep=TAIL)
        self.tail = self.err.tail

    def has_ended(self) -> bool:
        """Return whether the process has ended; its stderr is then read, and the rest of its group ended."""
        running = self.code is None
        if super().has_ended() and running:
            self.err.catch_up()
            self.end_with(signal.SIGTERM)
        return self.code is not None

    def end_with(self, number: int, patience: float | None = None) -> None:
        """Send a signal to the group, and SIGKILL `patience` seconds later."""
        super().end_with(number, patience)
        self._signal_group(number)

    def ask_for_report(self, number: int) -> None:
        """Ask the processes of the session for their stacks (SIGUSR2) or timelines (SIGUSR1).

        Only those with a handler get the signal (`kvstore.observe.stacks`, `kvstore.observe.timeline`): it
        would end the others.
        """
        if not ask_session(self.group, number) and self.code is None:
            what = "timeline: KVSTORE_TIMELINE is not set," if number == signal.SIGUSR1 else "stacks:"
            why = "it has no store yet, or is no program of Python"
            self._write_error(self._mark + f"process {self.group} writes no {what} {why}\n".encode())

    def is_gone(self) -> bool:
        """Return whether nothing is left of the group; send SIGKILL when its time is over.

        A process is not gone before `has_ended` has read its exit code.
        """
        over = time.monotonic() - self._kill_at if self._kill_at else -1.0
        if over >= 0:
            self._signal_group(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # the group has orphans, which this process reaps
            while self.code is not None and os.waitpid(-self.group, os.WNOHANG)[0]:
                pass
        return over > UNKILLABLE or (self.code is not None and not self._signal_group(0))

    def _signal_group(self, number: int) -> bool:
        """Signal the group; return whether it has a process."""
        try:
            os.killpg(self.group, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def ask_session(leader: int, number: int) -> bool:
    """Send a signal to the processes of a session that have a handler for it; return whether any has."""
    asked = False
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if os.getsid(pid) == leader and catches(pid, number):
                asked = True
                os.kill(pid, number)
    return asked
