"""The parent's side of a peer in a process of its own."""

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
from typing import Any

from bench import ROOT

_START = "import sys; sys.path.append(sys.argv.pop(1)); from bench.peers.worker import main; main()"
_PATIENCE = 300.0  # seconds for one answer


class PeerError(RuntimeError):
    """The peer's process failed."""


@dataclass(frozen=True)
class Setting:
    """How to start a peer.

    `name` is its column, `label` tells its settings apart, `bench` is for a bench with peers of its own.
    """

    name: str
    python: str = sys.executable
    label: str = ""
    env: tuple[tuple[str, str], ...] = ()
    bench: str = ""


class PeerProcess:
    """A peer that is told over a pipe what to do.

    Between its turns it is stopped, so that threads which still spin for work take no time from the others.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        env = {**os.environ, **dict(setting.env)}
        self._process = subprocess.Popen(
            [setting.python, "-c", _START, str(ROOT), "/".join(filter(None, (setting.bench, setting.name)))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=tempfile.gettempdir(),  # away from the tree: an installed kvstore goes first
            env=env,
            bufsize=0,
        )
        self.pids = [self._process.pid]
        self.cpu = 0.0
        self._rest = b""

    def start_prepare(self, case: Any) -> None:
        """Let the peer prepare; `finish_prepare` waits for it."""
        self._send({"do": "prepare", "case": case.to_json()})

    def finish_prepare(self) -> tuple[list[str], list[float]] | str:
        """Return variants and digest, or the reason why the peer does not do this case."""
        reply = self._receive()
        if "unsupported" in reply:
            return str(reply["unsupported"])
        return reply["variants"], reply["digest"]

    def run(self, variant: str, repeats: int) -> list[float]:
        """Seconds of each call."""
        self._send({"do": "run", "variant": variant, "repeats": repeats})
        times: list[float] = self._receive()["times"]
        return times

    def column(self, variant: str) -> str:
        """All ways of calling count for the peer."""
        return self.setting.name

    def close(self) -> None:
        """End the process and wait for it."""
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

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
            ready, _, _ = select.select([self._process.stdout], [], [], _PATIENCE)
            piece = self._process.stdout.read(1 << 16) if ready else b""
            if not piece:
                state = "ended" if ready else f"did not answer in {_PATIENCE:g} s"
                raise PeerError(f"peer {self.setting.name} {state}; see its messages above")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line
