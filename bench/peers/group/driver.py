"""The bench's side of a peer: a group of processes, all told the same at once."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.peers.group.launch import Launch, start
from bench.peers.group.link import PAGE
from bench.peers.process import PATIENCE, PeerError, Process, Setting

_START = 60.0  # seconds for all processes to come up
_SHM = Path("/dev/shm")
#: What a peer that had to be killed may leave there.
_NAMES = ("sm_segment.", "mpich_shm_", "deepspeed_allreduce_buffer_", "torch_", "ucx_")


class _Line:
    """The bench's end of a worker's line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def pid(self) -> int:
        """Return who is at the other end, as his id is here: a namespace may have ids of its own."""
        size = struct.calcsize("3i")
        pid, _, _ = struct.unpack(
            "3i", self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        return int(pid)

    def read(self) -> dict[str, Any] | None:
        """Read what there is; return a message once it is whole."""
        piece = self.connection.recv(1 << 20)
        if not piece:
            raise PeerError("a worker has ended; see its messages above")
        self._rest += piece
        if not piece.endswith(b"\n"):
            return None
        message: dict[str, Any] = json.loads(self._rest)
        self._rest = b""
        return message


class Group(Process):
    """A peer's processes; started when a case needs them, and again after they failed."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.helpers: list[subprocess.Popen[bytes]] = []
        self._lines: list[_Line] = []
        self.workers: list[int] = []
        self._folder = ""

    @property
    def pids(self) -> list[int]:
        return [*self.workers, *self.beside()]

    # ------------------------------------------------------------- what groups of one claim do otherwise

    #: Names of peers that are started anew for each case: their settings, or their memory, outlive a case.
    fresh: tuple[str, ...] = ()

    def plan(self, address: str, folder: str) -> Launch:
        """Say what to start."""
        raise NotImplementedError

    def codes(self) -> tuple[Path, Path]:
        """Build the barrier and the limits, once."""
        raise NotImplementedError

    def beside(self) -> list[int]:
        """Return the processes that work for the workers."""
        return [helper.pid for helper in self.helpers]

    # ------------------------------------------------------------------------------------------- orders

    def start_prepare(self, case: Any) -> None:
        self.failure = ""
        with self._failing():
            if not self._lines:
                self._start()
            self._send({"do": "prepare", "case": case.to_json()})

    def finish_prepare(self) -> tuple[list[str], list[float]] | str:
        """Return variants and digest (not a number if workers differ), or why the peer fails here."""
        if self.failure:
            return self.failure
        with self._failing():
            replies = self._replies()
        if self.failure:
            return self.failure
        if "unsupported" in replies[0]:
            return str(replies[0]["unsupported"])
        digests = [reply["digest"] for reply in replies]
        same = all(digest == digests[0] for digest in digests)
        return replies[0]["variants"], digests[0] if same else [float("nan")]

    def run(self, variant: str, repeats: int) -> list[float]:
        """Seconds of each call, of the worker that took longest."""
        before = self._beside_cpu()
        try:
            self._send({"do": "run", "variant": variant, "repeats": repeats})
            replies = self._replies()
        except (PeerError, OSError) as error:
            self._fail(error)
            raise PeerError(self.failure) from error
        used = sum(reply["cpu"] for reply in replies) + self._beside_cpu() - before
        self.cpu = used / repeats
        return [max(times) for times in zip(*(reply["times"] for reply in replies), strict=True)]

    def rest(self) -> None:
        if self.setting.name in self.fresh:
            self.close()
        elif self._lines:
            with self._failing():
                self._send({"do": "release"})
                self._replies()

    @contextlib.contextmanager
    def _failing(self) -> Any:
        try:
            yield
        except (PeerError, OSError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failure = f"peer {self.setting.name} failed: {error}"
        print(self.failure, file=sys.stderr)
        self.close(kill=True)

    # ------------------------------------------------------------------------------------------ messages

    def _send(self, request: Mapping[str, Any]) -> None:
        message = json.dumps(request).encode() + b"\n"
        for line in self._lines:
            line.connection.sendall(message)

    def _replies(self) -> list[dict[str, Any]]:
        """One reply of each worker; meanwhile let them tell each other what they ask to."""
        while True:
            messages = self._messages()
            if not all("gather" in message for message in messages):
                return messages
            self._send({"gathered": [message["gather"] for message in messages]})

    def _messages(self) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + PATIENCE
        while len(found) < len(self._lines):
            waiting = [line for rank, line in enumerate(self._lines) if rank not in found]
            ready, _, _ = select.select(waiting, [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise PeerError(f"no answer in {PATIENCE:g} s")
            for line in ready:
                message = line.read()
                if message is not None and "error" in message:
                    raise PeerError(str(message["error"]))
                if message is not None:
                    found[self._lines.index(line)] = message
        return [found[rank] for rank in range(len(self._lines))]

    def _beside_cpu(self) -> float:
        return sum(map(_cpu_of, self.beside()))

    # ------------------------------------------------------------------------------------------ processes

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="kvstore-bench-")
        address = f"{self._folder}/bench"
        self._names = _shm_names()
        plan = self.plan(address, self._folder)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            self.helpers = [start(command, self._folder) for command in plan.helpers]
            self.processes = [start(command, self._folder) for command in plan.ranks]
            self._accept(listener, plan.workers)

    def _accept(self, listener: socket.socket, workers: int) -> None:
        come: dict[int, tuple[_Line, int]] = {}
        end = time.monotonic() + _START
        while len(come) < workers:
            ready, _, _ = select.select([listener], [], [], 0.2)
            if ready:
                line = _Line(listener.accept()[0])
                hello = line.read() or {}
                come[hello["rank"]] = line, line.pid()
            elif time.monotonic() > end or any(p.poll() is not None for p in self.processes):
                raise PeerError("its processes did not come up")
        self._lines = [come[rank][0] for rank in range(workers)]
        self.workers = [come[rank][1] for rank in range(workers)]
        self._welcome()

    def _welcome(self) -> None:
        page = os.memfd_create("gate")
        os.ftruncate(page, PAGE)
        for line in self._lines:
            socket.send_fds(line.connection, [b" "], [page])
        os.close(page)
        gate, limits = map(str, self.codes())
        self._send({"gate": gate, "limits": limits, "processes": self.setting.processes})

    def close(self, kill: bool = False) -> None:
        for line in self._lines:
            line.connection.close()
        for pid in self.workers if kill else ():
            _kill_worker(pid)
        self._lines, self.workers = [], []
        for process in self.processes:
            end(process, 0.0 if kill else 15.0)
        for helper in self.helpers:
            end(helper, 0.0)
        self.processes, self.helpers = [], []
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            _sweep(self._names)
            self._folder = ""


def _kill_worker(pid: int) -> None:
    """Kill a worker that a launcher may not reach any more."""
    with contextlib.suppress(OSError):
        if b"bench.peers." in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Wait, then ask, then kill the process and all of its session."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience or 0.01)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)


def _cpu_of(pid: int) -> float:
    """Processor seconds of another process so far."""
    with contextlib.suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)  # its clock, as clock_getcpuclockid(3) makes it
    return 0.0


def _shm_names() -> set[str]:
    return set(os.listdir(_SHM)) if _SHM.is_dir() else set()


def _sweep(before: set[str]) -> None:
    """Unlink what a peer that was killed left."""
    for name in _shm_names() - before:
        if name.startswith(_NAMES):
            with contextlib.suppress(OSError):
                (_SHM / name).unlink()
