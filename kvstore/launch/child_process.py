"""One process of ``kvstore run``, at the head of a group of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.observe.signals import catches

from .output import Lines, Writes
from .process import grace, stopped, tied_to, told, unstartable

TAIL = 20  # lines of stderr that are told again at the end
UNKILLABLE = 5.0  # seconds after which a process that even SIGKILL does not end is given up


@dataclass(frozen=True)
class ProcessRole:
    """What a process is in its job: a worker, a server, or the scheduler."""

    role: str
    rank: int

    @property
    def name(self) -> str:
        """As sentences say it."""
        if self.role == "scheduler":
            return "the scheduler"
        return f"{'rank' if self.role == 'worker' else self.role} {self.rank}"

    @property
    def mark(self) -> bytes:
        """What its lines of output begin with."""
        names = {"worker": f"{self.rank}", "scheduler": "scheduler"}
        return f"[{names.get(self.role, f'{self.role} {self.rank}')}] ".encode()


class ChildProcess:
    """A started process, its two streams, and all that it starts in its group.

    Raises
    ------
    ConfigError
        The program cannot be started.
    """

    def __init__(
        self,
        part: ProcessRole,
        command: Sequence[str],
        environment: Mapping[str, str],
        sinks: tuple[Writes, Writes],
        mark: bytes = b"",
        descriptors: Sequence[int] = (),
    ) -> None:
        self.part = part
        #: Exit code once it has ended; negative for a signal.
        self.code: int | None = None
        self.seconds = 0.0
        self._started = time.monotonic()
        self._kill_at: float | None = None
        self._errors, self._mark = sinks[1], mark
        self._process = _start(command, environment, descriptors)
        self.out = Lines(self._process.stdout, sinks[0], mark)
        self.err = Lines(self._process.stderr, sinks[1], mark, keep=TAIL)

    @property
    def group(self) -> int:
        """Id of the process, and of its group."""
        return self._process.pid

    @property
    def place(self) -> str:
        """Say where it runs."""
        return f": process {self.group}"

    @property
    def how(self) -> str:
        """Say who it is and how it ended."""
        return f"{self.part.name} {told(self.code or 0)} after {self.seconds:.1f} s"

    @property
    def tail(self) -> Sequence[bytes]:
        """The last lines of its stderr."""
        return self.err.tail

    def ended(self) -> bool:
        """Whether the process has ended. What it left running is then asked to end too.

        Its last words are read before anybody asks for them.
        """
        if self.code is None and (code := self._process.poll()) is not None:
            self.code, self.seconds = code, time.monotonic() - self._started
            self.err.catch_up()
            self.end(signal.SIGTERM)
        return self.code is not None

    def stopped(self) -> bool:
        """Whether it is known to stand still, as after SIGSTOP."""
        return stopped(self.group)

    def since_end(self) -> float:
        """Seconds since it has ended."""
        return time.monotonic() - self._started - self.seconds

    def end(self, number: int, patience: float | None = None) -> None:
        """Send a signal to the group, which is killed if it is still there `patience` seconds later."""
        self._kill_at = self._kill_at or time.monotonic() + (grace() if patience is None else patience)
        self._signal(number)

    def ask(self, number: int) -> None:
        """Have the process, and what it has started, write where they are, or their timelines.

        `number` is SIGUSR2 (see `kvstore.observe.stacks`) or SIGUSR1 (see `kvstore.observe.timeline`). Only
        those are asked that have a handler for the signal: it would end the others.
        """
        if not ask(self.group, number) and self.code is None:
            why = "it has no store yet, or is no program of Python"
            if number == signal.SIGUSR1:
                text = f"process {self.group} writes no timeline: KVSTORE_TIMELINE is not set, {why}\n"
            else:
                text = f"process {self.group} writes no stacks: {why}\n"
            self._errors.write(self._mark + text.encode())

    def gone(self) -> bool:
        """Whether nothing is left of the group; kills it when its time is over.

        Until `ended` has said so the process is there: who forgets it before would never learn how it ended.
        """
        over = time.monotonic() - self._kill_at if self._kill_at else -1.0
        if over >= 0:
            self._signal(signal.SIGKILL)
        self._reap_adopted()
        # Processes that cannot die, or that no parent reaps, are not worth waiting for.
        return over > UNKILLABLE or (self.code is not None and not self._signal(0))

    def _signal(self, number: int) -> bool:
        """Signal the group and return whether there was anybody."""
        try:
            os.killpg(self.group, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _reap_adopted(self) -> None:
        """Reap what the process started and left to us."""
        try:
            while self.code is not None and os.waitpid(-self.group, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def ask(leader: int, number: int) -> bool:
    """Do as `ChildProcess.ask` for the processes of a session, and return whether any of them can."""
    able = [pid for pid in _session(leader) if catches(pid, number)]
    for pid in able:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
    return bool(able)


def _session(leader: int) -> list[int]:
    """List the processes of a session."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if os.getsid(pid) == leader:
                found.append(pid)
    return found


def _start(
    command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=tied_to(os.getpid()),
            pass_fds=tuple(descriptors),
        )
    except OSError as error:
        raise unstartable(command, error) from error
