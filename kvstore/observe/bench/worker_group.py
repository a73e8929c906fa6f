"""The worker processes of one peer: started, connected, asked together, and ended together.

Messages are JSON. A worker sends its rank first, and then one answer to each message.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.launch.process import tied_to
from kvstore.launch.signals import deferred_signals
from kvstore.observe.processes import shared_files

Message = dict[str, Any]

_STDERR = 2
_LOOK = 0.2  # seconds between two looks at the launcher while workers start
_FIRST = 10.0  # seconds in which a worker that has connected sends its rank
_LAST_WORDS = 10.0  # seconds in which a launcher reports which of its processes failed
_GRACE = 6.0  # seconds between SIGTERM and SIGKILL: a launcher ends its processes in that time
_KEPT = 1 << 16  # bytes of the output
_CAUSE = re.compile(r"^kvstore run: (.*?)(?:; its stderr ended with:|, with an empty stderr)?$", re.MULTILINE)


class PeerFailure(KVStoreError):
    """The processes of a peer failed, or do not answer; `printed` is the end of their output."""

    def __init__(self, text: str, printed: str = "") -> None:
        super().__init__(text)
        self.printed = printed


class WorkerGroup:
    """The workers of the peer `name`.

    They connect to the Unix socket `address`; a name that begins with a zero byte has no file. `output` is
    the descriptor of a file for stdout and stderr of the processes, or that of our stderr.
    """

    def __init__(self, name: str, workers: int, address: str, output: int = _STDERR) -> None:
        self.name, self.workers, self._output = name, workers, output
        #: Processes that were started here; connections and process ids of the workers, by rank.
        self.processes: list[subprocess.Popen[bytes]] = []
        self.links: dict[int, Connection] = {}
        self.pids: dict[int, int] = {}
        self._handles, self._files = list[int](), set[str]()  # of processes; of shared memory
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(workers)

    def start(self, command: Sequence[str], variables: Mapping[str, str], folder: str | None = None) -> None:
        """Start a launcher or a worker in a folder, see `start_process`."""
        with deferred_signals():
            self.processes.append(start_process(command, variables, self._output, folder))

    def meet(self, patience: float) -> None:
        """Wait until all workers have connected.

        Raises
        ------
        PeerFailure
            Some have not, or are no job of this size.
        """
        deadline = time.monotonic() + patience
        while missing := self.workers - len(self.links):
            if select.select([self._listener], [], [], _LOOK)[0]:
                self._accept_worker()
            elif any(process.poll() is not None for process in self.processes):
                raise self.failure("some ended before all had started", _LAST_WORDS)
            elif time.monotonic() > deadline:
                raise self.failure(f"{missing} of {self.workers} have not started within {patience:g} s")

    def ask(self, message: Message, patience: float) -> list[Message]:
        """Send all workers the same message, and return their answers in rank order; see `answers`."""
        self.send(message)
        return self.answers(patience)

    def send(self, message: Message) -> None:
        """Send all workers the same message; a worker that has ended is noticed by `answers`."""
        for link in self.links.values():
            with contextlib.suppress(OSError):
                link.send_bytes(json.dumps(message).encode())

    def answers(self, patience: float) -> list[Message]:
        """Wait for an answer of each worker; return them in rank order.

        Raises
        ------
        PeerFailure
            A worker failed, ended, or has not answered within `patience` seconds.
        """
        found: dict[int, Message] = {}
        deadline = time.monotonic() + patience
        while waiting := {link: rank for rank, link in self.links.items() if rank not in found}:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = ", ".join(map(str, sorted(waiting.values())))
                raise self.failure(f"no answer within {patience:.0f} s from rank {ranks}")
            for link in waiting.keys() & ready:
                rank = waiting[link]
                found[rank] = self._received_message(link, f"rank {rank} (process {self.pids[rank]})")
        return [found[rank] for rank in range(self.workers)]

    def printed(self) -> str:
        """Return the end of the output, where it is kept."""
        if self._output == _STDERR:
            return ""
        at = max(0, os.fstat(self._output).st_size - _KEPT)
        return os.pread(self._output, _KEPT, at).decode(errors="replace")

    def failure(self, why: str, last_words: float = 0.0, certain: bool = False) -> PeerFailure:
        """Make the error; a launcher that ends in `last_words` seconds knows which process failed first."""
        if self._output != _STDERR:
            for process in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(last_words)
        causes = _CAUSE.findall(self.printed())[-1:]
        reasons = ": ".join([*causes, *([why] if certain or not causes else [])])
        return PeerFailure(f"the workers of {self.name} failed: {reasons}", self.printed())

    def note_files(self) -> None:
        """Note the shared memory that an MPI would leave behind, for `end` to remove."""
        self._files |= {name for pid in self.pids.values() for name in shared_files(pid)}

    def end(self, leave: float) -> None:
        """Disconnect, and end the processes that run after `leave` seconds; with 0 kill the workers."""
        self.note_files()
        self._listener.close()
        for link in self.links.values():
            link.close()
        self.links, self.pids = {}, {}
        try:
            if not leave:
                self._kill_workers()
            for process in self.processes:
                end_process(process, leave)
        finally:
            self._kill_workers()
            for name in self._files:
                with contextlib.suppress(OSError):
                    os.unlink(name)

    def _accept_worker(self) -> None:
        connection, _ = self._listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, user, _ = struct.unpack("3i", credentials)
        link = Connection(connection.detach())
        if user != os.getuid() or not link.poll(_FIRST):  # a name without a file has no permissions
            link.close()
            return
        rank = self._received_message(link, f"process {pid}")["rank"]
        if rank in self.links:
            raise self.failure("each process is a job of its own: its launcher is that of another library")
        self.links[rank], self.pids[rank] = link, pid
        with contextlib.suppress(OSError):
            self._handles.append(os.pidfd_open(pid))

    def _received_message(self, link: Connection, worker: str) -> Message:
        try:
            message: Message = json.loads(link.recv_bytes())
        except (EOFError, OSError):
            raise self.failure(f"{worker} has ended", _LAST_WORDS) from None
        if "error" in message:
            raise self.failure(message["error"], _LAST_WORDS, certain=True)
        return message

    def _kill_workers(self) -> None:
        """Kill workers that a launcher may not reach any more."""
        for handle in self._handles:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        self._handles = []


def start_process(
    command: Sequence[str], variables: Mapping[str, str], output: int = _STDERR, folder: str | None = None
) -> subprocess.Popen[bytes]:
    """Start a process at the head of a session of its own; the kernel kills it when this process ends."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd=folder,
        env=variables,
        start_new_session=True,
        preexec_fn=tied_to(os.getpid()),
    )


def end_process(process: subprocess.Popen[bytes], patience: float) -> None:
    """Wait for a process, then have it and its session end, then kill them."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience or 0.01)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
