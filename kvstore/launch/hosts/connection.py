"""One other host of a job: an ssh and what it brings, seen from `kvstore run`."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore.errors import ConfigError, ProtocolError
from kvstore.settings.environment import text_of
from kvstore.settings.keys import Keys

from ..child_process import TAIL, UNKILLABLE, ProcessRole
from ..output import Lines, Sink
from ..output_relay import OutputRelay
from ..process import HostLoss, grace, tied_to, told
from . import messages as m

#: Seconds without a word from the agent after which it is lost; it waits as long for ours.
PATIENCE = 60.0

_FIRST_WORD = 60.0  # seconds in which a host must answer
#: Seconds that agents have to end what is left: longer than their grace.
LEAVE = 4.0
_CHUNK = 1 << 16
_UNREACHED = 255  # ssh's exit code for troubles of its own


class RemoteProcess:
    """A process on another host, as far as its agent has told."""

    def __init__(
        self,
        connection: Connection,
        number: int,
        part: ProcessRole,
        mark: bytes,
        tell: Callable[[str], None] | None,
    ) -> None:
        self.connection, self.number, self.part = connection, number, part
        #: Exit code once it has ended; negative for a signal.
        self.code: int | None = None
        self.seconds = 0.0
        #: The last lines of its stderr.
        self.tail: collections.deque[bytes] = collections.deque(maxlen=TAIL)
        self._mark, self._tell = mark, tell
        self._gone = False
        self._kill_at: float | None = None

    @property
    def place(self) -> str:
        """Say where it runs."""
        return f" on {self.connection.name}"

    @property
    def how(self) -> str:
        """Say who it is and how it ended."""
        host = self.connection.name
        return f"{self.part.name} on {host} {told(self.code or 0)} after {self.seconds:.1f} s"

    def ended(self) -> bool:
        """Whether the process has ended."""
        return self.code is not None

    def stopped(self) -> bool:
        """Say that nothing is known of it."""
        return False

    def end(self, number: int, patience: float | None = None) -> None:
        """Have a signal sent to its group, which is killed if it is still there `patience` seconds later."""
        patience = grace() if patience is None else patience
        self._kill_at = self._kill_at or time.monotonic() + patience
        self.connection.send(m.EndProcess(self.number, number, patience))

    def ask(self, number: int) -> None:
        """Have it write something; see `ChildProcess.ask`."""
        self.connection.send(m.AskProcess(self.number, number))

    def gone(self) -> bool:
        """Whether nothing is left of the group, or nobody is left to say so."""
        late = self._kill_at is not None and time.monotonic() > self._kill_at + UNKILLABLE
        return self._gone or late or self.connection.lost is not None

    def hear(self, message: m.From) -> None:
        """Take in what the agent tells of it."""
        match message:
            case m.Output(_, stream, line):
                self.connection.pass_on(stream, self._mark + line + b"\n")
                if stream == 2:
                    self.tail.append(line)
            case m.Address(_, text) if self._tell is not None:
                self._tell(text)
            case m.Ended(_, code, seconds):
                self.code, self.seconds = code, seconds
            case m.Gone():
                self._gone = True


class Connection:
    """The way to one host.

    Parameters
    ----------
    name : str
        The host, for people.
    command : sequence of str
        What starts the agent there, and is its stdin and stdout here.
    folder : str
        Folder in which processes run there.
    relay : OutputRelay
        Where its words go.

    Raises
    ------
    ConfigError
        The command cannot be started.
    """

    def __init__(self, name: str, command: Sequence[str], folder: str, relay: OutputRelay) -> None:
        self.name, self._relay = name, relay
        #: Whether the agent has answered, and is in the folder.
        self.ready = False
        #: A free port of the host, which the agent holds.
        self.port = 0
        #: What ended the connection.
        self.lost: HostLoss | None = None
        self._started = self._heard = self._spoke = time.monotonic()
        self._process = _start(command)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._in.fileno(), False)
        self._reader = m.Reader(m.From, greeting=True)
        self._sink = Sink(self._in.fileno())
        self._err = Lines(self._process.stderr, relay.err, f"[{name}] ".encode(), keep=TAIL)
        self._by_number: dict[int, RemoteProcess] = {}
        self._uncredited = 0  # bytes passed on of which the agent does not know
        self._open = True
        relay.add(self._err)
        relay.feed(self._sink)
        relay.watch(self._out.fileno(), self._read)
        self.send(m.JobStart(os.fsencode(folder), PATIENCE, text_of("ports")))

    @property
    def group(self) -> int:
        """Id of the process that is the connection, and of its group."""
        return self._process.pid

    def start(
        self,
        number: int,
        part: ProcessRole,
        command: Sequence[str],
        environment: Mapping[str, str],
        mark: bytes,
        keys: Keys | None,
        tell: Callable[[str], None] | None,
    ) -> RemoteProcess:
        """Tell the agent to start a process; how it does is heard of later."""
        process = RemoteProcess(self, number, part, mark, tell)
        self._by_number[number] = process
        words = [os.fsencode(word) for word in command]
        variables = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
        secret = keys.to_json() if keys else b""
        self.send(m.StartProcess(number, part.role, part.rank, words, variables, secret, tell is not None))
        return process

    def forget(self, process: RemoteProcess) -> None:
        """Forget a process that is gone."""
        self._by_number.pop(process.number, None)

    def send(self, message: m.To) -> None:
        """Queue a message to the agent."""
        if self._open:
            self._sink.write(m.packed(message))
            self._sink.flush()
            self._spoke = time.monotonic()

    def pass_on(self, stream: int, data: bytes) -> None:
        """Pass a line on to our own stdout or stderr."""
        (self._relay.out if stream == 1 else self._relay.err).write(data)
        self._uncredited += len(data)

    def look(self) -> HostLoss | None:
        """Give a sign of life, ask for more output if there is room, and say what is lost."""
        now = time.monotonic()
        if self.lost is None:
            self._look_at_clock(now)
        if self._uncredited and not self._relay.full:
            self.send(m.Credit(self._uncredited))
            self._uncredited = 0
        if now > self._spoke + m.PING:
            self.send(m.KeepAlive())
        return self.lost

    def leave(self) -> None:
        """Say that nothing more will come: the agent ends what is left, and itself."""
        if self._open:
            self._open = False
            self._relay.starve(self._sink)
            self._sink.flush()
            with contextlib.suppress(OSError):
                self._in.close()

    def close(self, until: float) -> None:
        """Wait for the end of the connection, but not for long, and not where nothing can have started."""
        self.leave()
        while self.ready and self._process.poll() is None and time.monotonic() < until:
            self._drain()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group, signal.SIGKILL)
        self._process.wait()
        self._relay.forget(self._out.fileno())
        self._relay.drop(self._err)
        self._out.close()

    def _drain(self) -> None:
        """Read what nobody wants any more, so that the agent is not held up."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.01)
        os.set_blocking(self._out.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._out.fileno(), _CHUNK):
                pass

    def _look_at_clock(self, now: float) -> None:
        if not self.ready and now > self._started + _FIRST_WORD:
            self._lose(f"host {self.name} did not answer for {_FIRST_WORD:g} s")
        elif self.ready and now > self._heard + PATIENCE:
            self._lose(f"host {self.name} gave no sign of life for {PATIENCE:g} s")

    def _read(self) -> None:
        data = os.read(self._out.fileno(), _CHUNK)
        self._heard = time.monotonic()
        if not data:
            self._relay.forget(self._out.fileno())
            self._lose(self._end())
            return
        try:
            for message in self._reader.feed(data):
                self._hear(message)
        except ProtocolError as error:
            self._lose(f"host {self.name}: {error}")

    def _hear(self, message: Any) -> None:
        match message:
            case m.AgentHello(version):
                self._compare(version)
            case m.AgentReady(port):
                self.ready, self.port = True, port
            case m.AgentRefused(text):
                self._lose(f"host {self.name}: {text}")
            case m.KeepAlive():
                pass
            case _:
                if process := self._by_number.get(message.number):
                    process.hear(message)

    def _compare(self, version: str) -> None:
        ours = m.version()
        if version != ours:
            self._lose(
                f"host {self.name} has kvstore {version} and this machine {ours}: install the same version"
            )

    def _lose(self, why: str) -> None:
        if self.lost is None:
            while not self._err.ended and self._err.read():  # what it said last explains it
                pass
            self.lost = HostLoss(why, self._err.tail)
            self.leave()

    def _end(self) -> str:
        """Say how the connection ended."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"({os.path.basename(str(self._process.args[0]))} {told(code)})" if code else ""  # type: ignore[index]
        if self.ready:
            return f"the connection to host {self.name} ended {how}".rstrip()
        advice = (
            "can you log in there without a password?"
            if code == _UNREACHED
            else "is kvstore installed there, in the same Python (--python)?"
        )
        return f"host {self.name} could not be reached {how}: {advice}"


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=tied_to(os.getpid()),
        )
    except OSError as error:
        raise ConfigError(
            f"cannot start {command[0]!r} ({error.strerror}): install ssh, or name another command with "
            "--ssh-command (KVSTORE_SSH)"
        ) from error
