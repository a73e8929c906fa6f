"""The bench's side of a peer: the requests to every kind of process, and a single process."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from bench import ROOT
from kvstore.launch.process import new_job
from kvstore.observe.bench.worker_group import Message, WorkerGroup

_START = "import sys; sys.path.append(sys.argv.pop(1)); from bench.peers.{} import main; main()"
PATIENCE = 300.0  # seconds for one answer
_LEAVE = 10.0  # seconds in which a peer ends by itself

Own = TypeVar("Own", bound="Process")


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
    """A peer with one worker.

    Between its turns it is stopped, so that threads which still spin for work take no time from the others.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        address = f"\0kvstore/bench/{new_job()}"
        self._group = WorkerGroup(setting.name, 1, address)
        # Away from the tree: an installed kvstore is imported from its environment.
        command, env = setting.command("worker", address[1:]), {**os.environ, **dict(setting.env)}
        self._group.start(command, env, tempfile.gettempdir())

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._group.processes]

    def start_prepare(self, case: Any) -> None:
        self._group.meet(PATIENCE)
        self._send({"do": "prepare", "case": case.to_json()})

    def finish_prepare(self) -> tuple[list[str], list[float]] | str:
        reply = self._reply()
        if "unsupported" in reply:
            return str(reply["unsupported"])
        return reply["variants"], reply["digest"]

    def run(self, variant: str, repeats: int) -> list[float]:
        self._send({"do": "run", "variant": variant, "repeats": repeats})
        times: list[float] = self._reply()["times"]
        return times

    def close(self, kill: bool = False) -> None:
        self._signal(signal.SIGCONT)
        self._group.end(0.0 if kill else _LEAVE)

    def _send(self, request: Message) -> None:
        self._signal(signal.SIGCONT)
        self._group.send(request)

    def _reply(self) -> Message:
        (reply,) = self._group.answers(PATIENCE)
        self._signal(signal.SIGSTOP)
        return reply

    def _signal(self, number: signal.Signals) -> None:
        for process in self._group.processes:
            process.send_signal(number)
