"""The agent of `kvstore run --hosts`: it runs on another host, behind ssh, and makes no decisions.

It starts the processes that it is told to start, and sends their output and their ends. When its stdin ends
or is silent for too long, it ends all of them, and itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time

from kvstore import __version__
from kvstore.errors import KVStoreError, ProtocolError
from kvstore.settings.environment import process_variables
from kvstore.settings.keys import JobKeys

from ..child_process import ChildProcess, ProcessRole, ProcessSpec
from ..local_host import LocalHost
from ..orphan_reaper import OrphanReaper
from ..output import LineReader, OutputSink
from ..output_relay import OutputRelay
from ..process import GRACE, adopt_orphans
from ..signals import ENDING
from . import messages as m

_LOOK = 0.05  # seconds between two polls of groups that are about to end
_FULL = 1 << 20  # bytes of output that may be sent and not yet written by `kvstore run`
_JOB_ONLY = ("KVSTORE_", "DMLC_")  # variables that only the job may set


class _MessageSink(OutputSink):
    """Stdout of the agent, with messages; it is full, too, while much output was sent and not yet written."""

    def __init__(self) -> None:
        super().__init__(1)
        self._unwritten = 0

    @property
    def is_full(self) -> bool:
        return super().is_full or self._unwritten > _FULL

    def send(self, message: m.FromAgent) -> None:
        """Queue a message to `kvstore run`."""
        self.write(m.encode_message(message))

    def send_output(self, stream: int, line: bytes) -> None:
        """Queue a line of output, without its newline, which `kvstore run` writes and counts."""
        line = line.removesuffix(b"\n")
        self._unwritten += len(line) + 1
        self.send(m.OutputLine(stream, line))

    def subtract_written(self, size: int) -> None:
        """Subtract what `kvstore run` has written."""
        self._unwritten -= size


class RemoteAgent:
    """The processes of a job on one host."""

    def __init__(self, reaper: OrphanReaper) -> None:
        self._channel = _MessageSink()
        self._relay = OutputRelay((signal.SIGCHLD, *ENDING), self._on_signal, self._channel)
        send = self._channel.send_output
        writes = functools.partial(send, 1), functools.partial(send, 2)
        self._local_host = LocalHost(self._relay, reaper, False, writes)
        self._input = LineReader(sys.stdin.buffer, self._receive_line, b"", longest=m.LONGEST)
        self._children: dict[int, ChildProcess] = {}
        self._reported: set[int] = set()  # processes whose end was sent
        self._patience = 0.0
        self._received = self._sent = time.monotonic()
        self._over = False

    def run(self) -> None:
        """Handle messages until the connection ends and all processes are gone."""
        with contextlib.closing(self._relay), contextlib.closing(self._local_host):
            self._channel.write(m.agent_greeting(__version__))
            self._relay.watch_descriptor(0, self._read_input)
            while self._children or not self._over:
                self._run_once()

    def _run_once(self) -> None:
        ending = self._over or bool(self._reported)
        self._relay.run_once(_LOOK if ending else m.PING / 5, self._poll_children)
        now = time.monotonic()
        if now > self._sent + m.PING:
            self._sent = now
            self._channel.send(m.KeepAlive())
        if self._relay.out.broken or (self._patience and now > self._received + self._patience):
            self._end_all()

    def _poll_children(self) -> None:
        for number, child in list(self._children.items()):
            if child.has_ended() and number not in self._reported:
                self._reported.add(number)
                self._channel.send(m.ProcessEnded(number, child.code or 0, child.seconds, [*child.tail]))
            if child.is_gone():
                self._local_host.forget_process(child)
                del self._children[number]
                self._reported.discard(number)
                self._channel.send(m.GroupGone(number))

    def _read_input(self) -> None:
        self._input.read()
        self._received = time.monotonic()
        if self._input.ended:
            self._end_all()

    def _receive_line(self, line: bytes) -> None:
        if self._over:
            return
        try:
            self._handle_message(m.decode_message(m.TO_AGENT, line))
        except (KVStoreError, OSError) as error:
            self._channel.send(m.AgentRefused(str(error)))

    def _handle_message(self, message: m.ToAgent) -> None:
        match message:
            case m.JobStart(folder, patience, ports, prefix):
                self._patience, self._local_host.prefix = patience, prefix
                _enter_folder(os.fsdecode(folder))
                self._channel.send(m.AgentReady(self._local_host.master_port(ports)))
            case m.StartProcess():
                self._start_process(message)
            case m.SignalProcess(number, code, grace) if child := self._children.get(number):
                if grace is None:
                    child.ask_for_report(code)
                else:
                    child.end_with(code, grace)
            case m.KeepAlive(written):
                self._channel.subtract_written(written)

    def _start_process(self, message: m.StartProcess) -> None:
        number = message.number
        spec = ProcessSpec(
            ProcessRole(message.role, message.rank),
            [os.fsdecode(word) for word in message.command],
            _merged_variables(message.variables),
            JobKeys.from_json(message.keys) if message.keys else None,
            (lambda address: self._channel.send(m.ReportedAddress(number, address)))
            if message.reports
            else None,
        )
        self._children[number] = self._local_host.start_process(spec)

    def _on_signal(self, number: int) -> None:
        if number != signal.SIGCHLD:
            self._end_all()

    def _end_all(self) -> None:
        """End all processes, and then the agent."""
        if not self._over:
            self._over = True
            self._relay.stop_watching(0)
            for child in self._children.values():
                child.end_with(signal.SIGTERM, GRACE)


def _merged_variables(variables: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the variables of a process: those of this host, and over them those of the job.

    The folder of this Python is the first of PATH, as in its activated environment.
    """
    ours = {name: value for name, value in process_variables().items() if not name.startswith(_JOB_ONLY)}
    ours["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), ours.get("PATH", os.defpath)])
    return ours | {os.fsdecode(name): os.fsdecode(value) for name, value in variables}


def _enter_folder(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise ProtocolError(
            f"cannot change to {folder} ({error.strerror}): start the job from a folder that all hosts have"
        ) from error


def main() -> None:
    """Run the agent; stdin and stdout are the pipes of ssh."""
    adopt_orphans()
    with contextlib.closing(OrphanReaper()) as reaper:
        RemoteAgent(reaper).run()


if __name__ == "__main__":
    if sys.stdin.isatty():
        sys.exit("this is the agent of `kvstore run --hosts`, which ssh starts")
    main()
