"""The agent of `kvstore run --hosts`: runs on another host, at the other end of ssh.

It starts what it is told to, sends back what its processes write and how they end, and decides nothing. When
its stdin ends, whatever the reason, or is silent for too long, it ends all that it has started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import Any

from kvstore.errors import KVStoreError, ProtocolError
from kvstore.settings.environment import process_variables
from kvstore.settings.keys import Keys

from ..child_process import ChildProcess, ProcessRole
from ..local_host import LocalHost
from ..orphan_reaper import OrphanReaper
from ..output import Sink
from ..output_relay import OutputRelay
from ..process import GRACE, adopt_orphans
from ..signals import ENDING
from . import messages as m

_LOOK = 0.05  # seconds between two looks at groups that are about to end
_FULL = 1 << 20  # bytes of output that may be on their way
_CHUNK = 1 << 16
_LEFT_BEHIND = ("KVSTORE_", "DMLC_")  # variables that only the job may set


class _Channel(Sink):
    """Our stdout, on which messages go. It is full, too, while much of what was sent was not passed on."""

    def __init__(self) -> None:
        super().__init__(1)
        self._under_way = 0

    @property
    def full(self) -> bool:
        return super().full or self._under_way > _FULL

    def send(self, message: m.From) -> None:
        """Queue a message to `kvstore run`."""
        self.write(m.packed(message))

    def output(self, number: int, stream: int, line: bytes) -> None:
        """Queue a line of output."""
        self._under_way += len(line)
        self.send(m.Output(number, stream, line))

    def passed_on(self, size: int) -> None:
        """Take note that this much was written at the other end, marks included."""
        self._under_way = max(0, self._under_way - size)


class _Stream:
    """Sends the lines of one stream of one process."""

    def __init__(self, channel: _Channel, number: int, stream: int) -> None:
        self._channel, self._number, self._stream = channel, number, stream

    def write(self, data: bytes) -> None:
        """Send a line without its newline, which is put back at the other end."""
        self._channel.output(self._number, self._stream, data.removesuffix(b"\n"))


class RemoteAgent:
    """One host's part of a job."""

    def __init__(self, reaper: OrphanReaper) -> None:
        self._channel = _Channel()
        self._relay = OutputRelay((signal.SIGCHLD, *ENDING), self._on_signal, self._channel)
        self._local_host = LocalHost(self._relay, reaper, prefix=False)
        self._reader = m.Reader(m.To)
        self._children: dict[int, ChildProcess] = {}
        self._told: set[int] = set()  # whose end was told
        self._patience = 0.0
        self._heard = self._spoke = time.monotonic()
        self._over = False

    def run(self) -> None:
        """Do as told, until the other end is gone."""
        with contextlib.closing(self._relay), contextlib.closing(self._local_host):
            self._channel.write(m.MAGIC)
            self._channel.send(m.AgentHello(m.version()))
            self._relay.watch(0, self._on_input)
            while self._children or not self._over:
                self._turn()

    def _turn(self) -> None:
        ending = self._over or any(number in self._told for number in self._children)
        self._relay.turn(_LOOK if ending else m.PING / 5, self._look_after_children)
        now = time.monotonic()
        if now > self._spoke + m.PING:
            self._spoke = now
            self._channel.send(m.KeepAlive())
        if self._relay.out.broken or (self._patience and now > self._heard + self._patience):
            self._end_all()

    def _look_after_children(self) -> None:
        for number, child in list(self._children.items()):
            if child.ended() and number not in self._told:
                self._told.add(number)
                self._channel.send(m.Ended(number, child.code or 0, child.seconds))
            if child.gone():
                self._local_host.forget(child)
                del self._children[number]
                self._told.discard(number)
                self._channel.send(m.Gone(number))

    def _on_input(self) -> None:
        data = os.read(0, _CHUNK)
        self._heard = time.monotonic()
        if not data:
            self._end_all()
            return
        try:
            for message in self._reader.feed(data):
                self._on_message(message)
        except ProtocolError as error:
            self._refuse(error)

    def _on_message(self, message: Any) -> None:
        if self._over:
            return
        try:
            self._do(message)
        except (KVStoreError, OSError) as error:
            self._refuse(error)

    def _do(self, message: Any) -> None:
        match message:
            case m.JobStart(folder, patience, ports):
                self._patience = patience
                _enter(os.fsdecode(folder))
                port = self._local_host.master_port(ports)
                self._channel.send(m.AgentReady(port))
            case m.StartProcess():
                self._start(message)
            case m.EndProcess(number, code, grace) if number in self._children:
                self._children[number].end(code, grace)
            case m.AskProcess(number, code) if number in self._children:
                self._children[number].ask(code)
            case m.Credit(size):
                self._channel.passed_on(size)

    def _start(self, message: m.StartProcess) -> None:
        number = message.number

        def tell(address: str) -> None:
            self._channel.send(m.Address(number, address))

        sinks = _Stream(self._channel, number, 1), _Stream(self._channel, number, 2)
        self._children[number] = self._local_host.start(
            ProcessRole(message.role, message.rank),
            [os.fsdecode(word) for word in message.command],
            _environment(message.variables),
            Keys.from_json(message.keys) if message.keys else None,
            tell if message.tells else None,
            sinks,
        )

    def _refuse(self, error: Exception) -> None:
        self._channel.send(m.AgentRefused(str(error)))

    def _on_signal(self, number: int) -> None:
        if number != signal.SIGCHLD:
            self._end_all()

    def _end_all(self) -> None:
        """End what runs, and then ourselves; nobody is left who could be told."""
        if not self._over:
            self._over = True
            self._relay.forget(0)
            for child in self._children.values():
                child.end(signal.SIGTERM, GRACE)


def _environment(variables: dict[bytes, bytes]) -> dict[str, str]:
    """Variables of a process: those of this host, and over them those of the job.

    Programs that stand beside this Python are found first, as where its environment is activated.
    """
    ours = {name: value for name, value in process_variables().items() if not name.startswith(_LEFT_BEHIND)}
    ours["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), ours.get("PATH", os.defpath)])
    return ours | {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()}


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise ProtocolError(
            f"cannot change to {folder} ({error.strerror}): start the job from a folder that all hosts have"
        ) from error


def main() -> None:
    """Be the agent; the two pipes of ssh are stdin and stdout."""
    adopt_orphans()
    with contextlib.closing(OrphanReaper()) as reaper:
        RemoteAgent(reaper).run()


if __name__ == "__main__":
    if sys.stdin.isatty():
        sys.exit("this is the far side of `kvstore run --hosts`, which ssh starts")
    main()
