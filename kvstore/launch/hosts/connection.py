"""The connection of `kvstore run` to another host of the job: an ssh, and the agent behind it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence

from kvstore import __version__
from kvstore.errors import ConfigError, ProtocolError
from kvstore.settings.environment import text_of

from ..child_process import TAIL, UNKILLABLE, ProcessSpec, SupervisedProcess
from ..output import CHUNK, LineReader, OutputSink
from ..output_relay import OutputRelay
from ..process import describe_end, grace, started
from . import messages as m

#: Seconds without a message after which the host is lost; the agent waits as long for this side.
PATIENCE = 60.0

_FIRST_ANSWER = 60.0  # seconds in which a host must answer
_MOST_GREETING = 1 << 16  # bytes that a login shell may print
_UNREACHED = 255  # exit code of ssh for its own failures


class RemoteProcess(SupervisedProcess):
    """A process on another host, as the messages of its agent describe it."""

    def __init__(self, connection: HostConnection, number: int, spec: ProcessSpec) -> None:
        super().__init__(spec.part, connection.name)
        self.connection, self.number, self._on_address = connection, number, spec.on_address
        self._gone = False

    def end_with(self, number: int, patience: float | None = None) -> None:
        """Have the agent send a signal to the group, and SIGKILL `patience` seconds later."""
        super().end_with(number, patience)
        self.connection.send(m.SignalProcess(self.number, number, grace() if patience is None else patience))

    def ask_for_report(self, number: int) -> None:
        """Have the agent ask the process; see `ChildProcess.ask_for_report`."""
        self.connection.send(m.SignalProcess(self.number, number, None))

    def is_gone(self) -> bool:
        """Return whether nothing is left of the group, or the agent cannot report it any more."""
        late = self._kill_at is not None and time.monotonic() > self._kill_at + UNKILLABLE
        return self._gone or late or self.connection.lost is not None

    def apply_message(self, message: m.FromAgent) -> None:
        """Update the state from a message of the agent."""
        match message:
            case m.ReportedAddress(_, text) if self._on_address is not None:
                self._on_address(text)
            case m.ProcessEnded(_, code, seconds, tail):
                self.code, self.seconds, self.tail = code, seconds, tail
            case m.GroupGone():
                self._gone = True


class HostConnection:
    """The connection to one host.

    `command` starts the agent there; its stdin and stdout are those of the agent. Processes run in `folder`.
    With `prefix` lines of output begin with the name of their process. ConfigError is raised if the command
    cannot be started.
    """

    def __init__(
        self, name: str, command: Sequence[str], folder: str, relay: OutputRelay, prefix: bool
    ) -> None:
        self.name, self._relay = name, relay
        #: Whether the agent has answered, and is in the folder.
        self.ready = False
        #: A port of the host that the agent has reserved.
        self.port = 0
        #: Why the connection has ended.
        self.lost: str | None = None
        self._opened = self._received = self._sent = time.monotonic()
        self._process = _start_ssh(command)
        assert self._process.stdin is not None
        self._in = self._process.stdin
        self._out = LineReader(self._process.stdout, self._receive_line, b"", longest=_MOST_GREETING)
        os.set_blocking(self._in.fileno(), False)
        self._sink = OutputSink(self._in.fileno())
        self._err = LineReader(self._process.stderr, relay.err.write, f"[{name}] ".encode(), keep=TAIL)
        self._by_number: dict[int, RemoteProcess] = {}
        self._greeted, self._greeting_size = False, 0
        self._written = 0  # bytes of output that the agent does not know to be written
        self._open = True
        #: Id of the ssh process and of its group; the last lines of its stderr.
        self.group, self.tail = self._process.pid, self._err.tail
        relay.add_stream(self._err)
        relay.add_sink(self._sink)
        relay.watch_descriptor(self._out.stream.fileno(), self._read_messages)
        self.send(m.JobStart(os.fsencode(folder), PATIENCE, text_of("ports"), prefix))

    def start_process(self, number: int, spec: ProcessSpec) -> RemoteProcess:
        """Have the agent start a process."""
        process = self._by_number[number] = RemoteProcess(self, number, spec)
        words = [os.fsencode(word) for word in spec.command]
        variables = [(os.fsencode(name), os.fsencode(value)) for name, value in spec.environment.items()]
        secret, reports = spec.keys.to_json() if spec.keys else b"", spec.on_address is not None
        self.send(m.StartProcess(number, spec.part.role, spec.part.rank, words, variables, secret, reports))
        return process

    def forget_process(self, process: RemoteProcess) -> None:
        """Forget a process that is gone."""
        self._by_number.pop(process.number, None)

    def send(self, message: m.ToAgent) -> None:
        """Queue a message to the agent."""
        if self._open:
            self._sink.write(m.encode_message(message))
            self._sink.flush()
            self._sent = time.monotonic()

    def check_liveness(self) -> None:
        """Send what is due, and check whether the host is lost.

        While the readers of our output are behind, the agent is not told of written bytes: it then sends no
        more output, but still the ends of processes.
        """
        now = time.monotonic()
        if not self.ready and now > self._opened + _FIRST_ANSWER:
            self._mark_lost(f"host {self.name} did not answer for {_FIRST_ANSWER:g} s")
        elif self.ready and now > self._received + PATIENCE:
            self._mark_lost(f"host {self.name} gave no sign of life for {PATIENCE:g} s")
        written = 0 if self._relay.is_full else self._written
        if written or now > self._sent + m.PING:
            self._written -= written
            self.send(m.KeepAlive(written))

    def close_input(self) -> None:
        """Close the pipe to the agent: it ends what is left, and itself."""
        if self._open:
            self._open = False
            self._relay.drop_sink(self._sink)
            self._sink.flush()
            with contextlib.suppress(OSError):
                self._in.close()

    def close(self, until: float) -> None:
        """Wait for the end of ssh, until a time at most; not if the agent has started nothing."""
        self.close_input()
        self._relay.stop_watching(self._out.stream.fileno())
        while self.ready and self._process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.01)
            with contextlib.suppress(BlockingIOError):  # a full pipe would block the agent
                while os.read(self._out.stream.fileno(), CHUNK):
                    pass
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group, signal.SIGKILL)
        self._process.wait()
        self._relay.drop_stream(self._err)
        self._out.stream.close()

    def _read_messages(self) -> None:
        self._out.read()
        self._received = time.monotonic()
        if self._out.ended:
            self._relay.stop_watching(self._out.stream.fileno())
            self._mark_lost(self._describe_end())

    def _receive_line(self, line: bytes) -> None:
        """Handle a line of the agent, or one that precedes its greeting."""
        try:
            if self._greeted:
                self._handle_message(m.decode_message(m.FROM_AGENT, line))
            elif self.lost is None:
                self._read_greeting(line)
        except ProtocolError as error:
            self._mark_lost(f"host {self.name}: {error}")

    def _read_greeting(self, line: bytes) -> None:
        self._greeting_size += len(line)
        if line == m.agent_greeting(__version__)[1:]:
            self._greeted, self._out.longest = True, m.LONGEST
        elif line.startswith(m.agent_greeting("")[1:-1]):
            theirs = line.split()[-1].decode(errors="replace")
            self._mark_lost(
                f"host {self.name} has kvstore {theirs} and this machine {__version__}: install the same "
                "version"
            )
        elif self._greeting_size > _MOST_GREETING:
            raise ProtocolError("its answer is not that of kvstore's agent")

    def _handle_message(self, message: m.FromAgent) -> None:
        match message:
            case m.AgentReady(port):
                self.ready, self.port = True, port
            case m.AgentRefused(text):
                self._mark_lost(f"host {self.name}: {text}")
            case m.OutputLine(stream, line):
                (self._relay.out if stream == 1 else self._relay.err).write(line + b"\n")
                self._written += len(line) + 1
            case m.KeepAlive():
                pass
            case _:
                if process := self._by_number.get(message.number):
                    process.apply_message(message)

    def _mark_lost(self, why: str) -> None:
        if self.lost is None:
            while not self._err.ended and self._err.read():  # its last lines explain the loss
                pass
            self.lost = why
            self.close_input()

    def _describe_end(self) -> str:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = 0
        program = os.path.basename(str(self._process.args[0]))  # type: ignore[index]
        how = f"({program} {describe_end(code)})" if code else ""
        if self.ready:
            return f"the connection to host {self.name} ended {how}".rstrip()
        advice = (
            "can you log in there without a password?"
            if code == _UNREACHED
            else "is kvstore installed there, in the same Python (--python)?"
        )
        return f"host {self.name} could not be reached {how}: {advice}"


def _start_ssh(command: Sequence[str]) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    try:
        return started(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
    except ConfigError as error:
        reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else error
        raise ConfigError(
            f"cannot start {command[0]!r} ({reason}): install ssh, or name another command with "
            "--ssh-command (KVSTORE_SSH)"
        ) from error
