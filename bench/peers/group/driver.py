"""The bench's side of a peer: a group of processes, which all receive the same requests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.peers.group.launch import Launch, start, variables, workers
from bench.peers.group.link import PAGE
from bench.peers.setting import Setting
from bench.runner import compiled
from kvstore.observe.bench.worker_group import Message, PeerFailure, WorkerGroup, end_process

_START = 60.0  # seconds for all processes to start
PATIENCE = 300.0  # seconds for one reply
_LEAVE = 15.0  # seconds in which they end on request
_SHM = Path("/dev/shm")
#: Names that a killed peer can leave there.
_NAMES = ("sm_segment.", "mpich_shm_", "deepspeed_allreduce_buffer_", "torch_", "ucx_")


class Group:
    """A peer's processes; started when a case needs them, and again after a failure.

    `cpu` is the processor seconds of a call of the last run, `moved` the bytes on the busiest link between
    hosts. `failure` is the reason for which the processes were ended.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.cpu = self.moved = 0.0
        self.failure = ""
        self._group: WorkerGroup | None = None
        self.helpers: list[subprocess.Popen[bytes]] = []
        self._folder = ""

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        return self._group.processes if self._group else []

    @property
    def workers(self) -> list[int]:
        """Return the ids of the workers in this namespace: their own namespace can have other ids."""
        return list(self._group.pids.values()) if self._group else []

    @property
    def pids(self) -> list[int]:
        return [*self.workers, *self.beside()]

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(kill=kind is not None)

    # ------------------------------------------------------------- overridden by groups of a claim

    #: Names of peers that are restarted for each case, as they keep settings or memory.
    fresh: tuple[str, ...] = ()

    def plan(self, address: str, folder: str) -> Launch:
        """Return the commands to start."""
        raise NotImplementedError

    def codes(self) -> tuple[Path, Path]:
        """Compile the barrier and the limits, once."""
        raise NotImplementedError

    def beside(self) -> list[int]:
        """Return the processes that work for the workers."""
        return [helper.pid for helper in self.helpers]

    def column(self, variant: str) -> str:
        """Return the column of a variant in the tables; the fastest variant of a column counts."""
        return self.setting.column or self.setting.name

    # ----------------------------------------------------------------------------------------- requests

    def start_prepare(self, case: Any) -> None:
        """Request `prepare`; `finish_prepare` waits for it."""
        self.failure = ""
        with self._failing():
            if self._group is None:
                self._start()
            self._send({"do": "prepare", "case": case.to_json()})

    def finish_prepare(self) -> tuple[list[str], list[float]] | str:
        """Return variants and digest (NaN if workers differ), or the reason of a failure."""
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
        """Return the seconds of each call, of the slowest worker."""
        before = self._beside_cpu()
        try:
            self._send({"do": "run", "variant": variant, "repeats": repeats})
            replies = self._replies()
        except PeerFailure as error:
            self._fail(error)
            raise
        used = sum(reply["cpu"] for reply in replies) + self._beside_cpu() - before
        self.cpu = used / repeats
        return [max(times) for times in zip(*(reply["times"] for reply in replies), strict=True)]

    def rest(self) -> None:
        """Free the arrays of the case."""
        if self.setting.name in self.fresh:
            self.close()
        elif self._group is not None:
            with self._failing():
                self._send({"do": "release"})
                self._replies()

    @contextlib.contextmanager
    def _failing(self) -> Any:
        try:
            yield
        except (PeerFailure, OSError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failure = str(error)
        print(self.failure, file=sys.stderr)
        self.close(kill=True)

    # ------------------------------------------------------------------------------------------ messages

    def _send(self, request: Message) -> None:
        assert self._group is not None
        self._group.send(request)

    def _replies(self) -> list[Message]:
        """Return a reply of each worker; until then forward the messages between workers."""
        assert self._group is not None
        while "gather" in (replies := self._group.answers(PATIENCE))[0]:
            self._send({"gathered": [reply["gather"] for reply in replies]})
        return replies

    def _beside_cpu(self) -> float:
        return sum(map(_cpu_of, self.beside()))

    # ------------------------------------------------------------------------------------------ processes

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="kvstore-bench-")
        address = f"{self._folder}/bench"
        self._names = _shm_names()
        plan = self.plan(address, self._folder)
        group = self._group = WorkerGroup(self.setting.name, plan.workers, address)
        self.helpers = [start(command, self._folder) for command in plan.helpers]
        for command, env in plan.ranks:
            group.start(command, variables(env, self._folder), self._folder)
        group.meet(_START)
        page = os.memfd_create("gate")
        os.ftruncate(page, PAGE)
        for link in group.links.values():
            with socket.socket(fileno=os.dup(link.fileno())) as connection:
                socket.send_fds(connection, [b" "], [page])
        os.close(page)
        gate, limits = map(str, self.codes())
        self._send({"gate": gate, "limits": limits, "processes": self.setting.processes})

    def close(self, kill: bool = False) -> None:
        """End all processes and wait for them."""
        if self._group is not None:
            self._group.end(0.0 if kill else _LEAVE)
            self._group = None
        for helper in self.helpers:
            end_process(helper, 0.0)
        self.helpers = []
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            _sweep(self._names)
            self._folder = ""


class Alone(Group):
    """A peer with one worker.

    Between its turns it is stopped, so that threads which still spin for work slow no other peer down.
    """

    def plan(self, address: str, folder: str) -> Launch:
        return workers(self.setting, address, {})

    def codes(self) -> tuple[Path, Path]:
        gate = compiled.build(Path(__file__).with_name("meet.c"))
        return gate, gate

    def close(self, kill: bool = False) -> None:
        self._signal(signal.SIGCONT)
        super().close(kill)

    def _send(self, request: Message) -> None:
        self._signal(signal.SIGCONT)
        super()._send(request)

    def _replies(self) -> list[Message]:
        replies = super()._replies()
        self._signal(signal.SIGSTOP)
        return replies

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)


def _cpu_of(pid: int) -> float:
    """Return the processor seconds of another process so far."""
    with contextlib.suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)  # its clock, as in clock_getcpuclockid(3)
    return 0.0


def _shm_names() -> set[str]:
    return set(os.listdir(_SHM)) if _SHM.is_dir() else set()


def _sweep(before: set[str]) -> None:
    """Unlink the names that a killed peer has left."""
    for name in _shm_names() - before:
        if name.startswith(_NAMES):
            with contextlib.suppress(OSError):
                (_SHM / name).unlink()
