"""The bench's side of a peer: what every kind of process is asked for, and a single process on a pipe."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from bench import ROOT

_START = "import sys; sys.path.append(sys.argv.pop(1)); from bench.peers.{} import main; main()"
PATIENCE = 300.0  # seconds for one answer

Own = TypeVar("Own", bound="Process")


class PeerError(RuntimeError):
    """The peer's process failed."""


@dataclass(frozen=True)
class Setting:
    """How to start a peer.

    `name` is its column, `label` tells its settings apart; `processes` are the workers of a group.
    """

    name: str
    claim: str = "local"
    python: str = sys.executable
    label: str = ""
    env: tuple[tuple[str, str], ...] = ()
    processes: int = 1
    servers: int = 1

    def command(self, module: str, *arguments: object) -> list[str]:
        """Return the command that runs the `main` of a module of `bench.peers` with this peer."""
        start = [self.python, "-c", _START.format(module), str(ROOT), self.claim, self.name]
        return [*start, *map(str, arguments)]


class Process:
    """A peer's process, or a group of them; `cpu` is what a call of the last run took of the processors.

    `moved` are the bytes that it sent over the busiest link, where hosts are joined by some.

    `failure` says why a peer was ended; it is started anew for the next case.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.cpu = self.moved = 0.0
        self.failure = ""

    @property
    def pids(self) -> list[int]:
        raise NotImplementedError

    def start_prepare(self, case: Any) -> None:
        """Let the peer prepare; `finish_prepare` waits for it."""
        raise NotImplementedError

    def finish_prepare(self) -> tuple[list[str], list[float]] | str:
        """Return variants and digest, or the reason why the peer does not do this case."""
        raise NotImplementedError

    def run(self, variant: str, repeats: int) -> list[float]:
        """Seconds of each call."""
        raise NotImplementedError

    def column(self, variant: str) -> str:
        """Where the tables show a variant; of those in one column the best one counts."""
        return self.setting.name

    def rest(self) -> None:
        """Let go of what the case needed."""

    def close(self, kill: bool = False) -> None:
        """End all processes and wait for them."""

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(kill=kind is not None)


class PeerProcess(Process):
    """A peer that is told over a pipe what to do.

    Between its turns it is stopped, so that threads which still spin for work take no time from the others.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._process = subprocess.Popen(
            setting.command("worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=tempfile.gettempdir(),  # away from the tree: an installed kvstore goes first
            env={**os.environ, **dict(setting.env)},
            bufsize=0,
        )
        self._rest = b""

    @property
    def pids(self) -> list[int]:
        return [self._process.pid]

    def start_prepare(self, case: Any) -> None:
        self._send({"do": "prepare", "case": case.to_json()})

    def finish_prepare(self) -> tuple[list[str], list[float]] | str:
        reply = self._receive()
        if "unsupported" in reply:
            return str(reply["unsupported"])
        return reply["variants"], reply["digest"]

    def run(self, variant: str, repeats: int) -> list[float]:
        self._send({"do": "run", "variant": variant, "repeats": repeats})
        times: list[float] = self._receive()["times"]
        return times

    def close(self, kill: bool = False) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise PeerError(f"peer {self.setting.name} has gone; see its messages above") from None

    def _receive(self) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(self._line())
        self._process.send_signal(signal.SIGSTOP)
        if "error" in reply:
            raise PeerError(f"peer {self.setting.name} failed:\n{reply['error']}")
        return reply

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
            piece = self._process.stdout.read(1 << 16) if ready else b""
            if not piece:
                state = "ended" if ready else f"did not answer in {PATIENCE:g} s"
                raise PeerError(f"peer {self.setting.name} {state}; see its messages above")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line
